"""Partition: a Graph becomes regions, one per run of capturable ops on one stream.

A region grows until something needs it to be finished: an event recorded behind it, a value of it
used on another stream, or an op that cannot be captured. Such ops become eager regions: one call
of XLA per run of them, save those that call back into Python, which JAX runs one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax

from tracegraph.capturing.drafter import CAPTURING_STREAM, Draft, Drafter
from tracegraph.capturing.flat_function import make_flat_function
from tracegraph.capturing.partition_check import Cut, check_partition
from tracegraph.capturing.whole_function import make_whole_function
from tracegraph.constraints.constants import LARGE_CONSTANT_BYTES, measure_bytes
from tracegraph.ir.graph import Constant, Graph, Operand, Value
from tracegraph.jax_internals import (
    describe_physical,
    embeds_arrays,
)
from tracegraph.lowering.request import (
    BufferSpec,
    CaptureRequest,
    InputSpec,
    OutputSpec,
    Place,
    Region,
    Role,
)

# How a marked op is named in XLA's program.
_MARK = "tracegraph_op"
_MARKED = re.compile(rf"(?:^|/){_MARK}(\d+)(?=/|$)")


def partition_graph(
    graph: Graph,
    *,
    input_names: Sequence[str],
    donated: Collection[int],
    uncapturable: Collection[int] = (),
    is_marked: bool = False,
    bind: Callable[..., list[Any]] | None = None,
    lifted: Collection[Value] = (),
) -> CaptureRequest:
    """Cuts a graph into regions.

    Args:
        graph: checked and optimised.
        input_names: one unique name per graph input; names that begin with ``%`` are ours.
        donated: indices of the donated inputs.
        uncapturable: indices of the ops that run eagerly between two graphs.
        is_marked: let XLA's program name the op behind each instruction; see `find_marked_op`.
        bind: of the trace that the graph was made from, for a region that is all of it.
        lifted: constants that are inputs, whatever their size.

    Returns:
        The request, with inputs in the order of the graph's inputs, then those of its constants
        that are not embedded.
    """
    drafts = Drafter().split(graph, uncapturable)
    embedded = {v: array for v, array in find_embedded(graph).items() if v not in lifted}
    constants = [each for each in graph.constants if each.value not in embedded]
    specs = _name_inputs(graph, input_names, constants)
    producers = {value.number: draft for draft in drafts for value in _list_own(draft)}
    aliases = {output: graph.inputs[index] for output, index in graph.aliases}
    kept = {value for index, value in enumerate(graph.inputs) if index not in donated}
    outputs = [
        _place_output(operand, index, aliases.get(index), kept, drafts, producers, specs)
        for index, operand in enumerate(graph.outputs)
    ]
    reads = [_list_reads(draft, embedded) for draft in drafts]
    used = _find_values_used_outside(graph, reads)
    marks = {id(op): f"{_MARK}{i}" for i, op in enumerate(graph.ops)} if is_marked else {}
    bind = None if constants or is_marked else bind
    cuts = [
        _finish(draft, inputs, graph, used, specs, marks, bind, embedded)
        for draft, inputs in zip(drafts, reads, strict=True)
    ]
    roles = [Role.DONATED if i in donated else Role.COPIED for i in range(len(graph.inputs))]
    values = [*graph.inputs, *(constant.value for constant in constants)]
    roles += [Role.CONSTANT] * len(constants)
    request = CaptureRequest(
        name=graph.name,
        regions=tuple(cut.region for cut in cuts),
        inputs=tuple(
            InputSpec(specs[value.number], role) for value, role in zip(values, roles, strict=True)
        ),
        outputs=tuple(outputs),
    )
    check_partition(
        graph,
        request,
        cuts,
        uncapturable=uncapturable,
        donated=donated,
        describe=_describe_operand,
    )
    return request


def find_embedded(graph: Graph) -> dict[Value, Any]:
    """Returns the closed-over arrays that are part of the regions' programs.

    Note [Embedded constants]. `jax.jit` embeds what a function closes over, and XLA folds it: the
    last bits are others than those of the same array as an input. So it is embedded here, too, up
    to a size. Large arrays are inputs, written once, which all regions and JAX's memory statistics
    can see. Where JAX itself makes inputs of arrays, only scalars are embedded.
    """
    limit = LARGE_CONSTANT_BYTES if embeds_arrays() else 0
    return {
        each.value: each.array
        for each in graph.constants
        if measure_bytes(each.array) < limit or each.value.aval.ndim == 0
    }


def list_region_ops(graph: Graph, uncapturable: Collection[int] = ()) -> dict[str, list[int]]:
    """Returns the indices of the ops of each region, by its name.

    Args:
        graph: as for `partition_graph`.
        uncapturable: the same.
    """
    index_of = {id(op): index for index, op in enumerate(graph.ops)}
    drafts = Drafter().split(graph, uncapturable)
    return {draft.name: [index_of[id(op)] for op in draft.ops] for draft in drafts}


def find_marked_op(path: str) -> int | None:
    """Returns the index of the op that an instruction of a marked region comes from, or None.

    Args:
        path: XLA's name of the operation.

    Example:
        >>> find_marked_op("jit(region0)/tracegraph_op12/jit(solve)/lu")
        12
    """
    found = _MARKED.search(path)
    return None if found is None else int(found[1])


def _name_inputs(
    graph: Graph, names: Sequence[str], constants: Sequence[Constant]
) -> dict[int, BufferSpec]:
    """Returns the buffer of each input and constant by its value's number."""
    pairs = [*zip(graph.inputs, names, strict=True)]
    pairs += [(constant.value, f"%{constant.name}") for constant in constants]
    return {value.number: describe_buffer(name, value.aval) for value, name in pairs}


def describe_buffer(name: str, aval: Any) -> BufferSpec:
    """Returns the buffer that holds a value of this abstract value."""
    shape, dtype = describe_physical(aval)
    return BufferSpec(name, shape, dtype, bool(getattr(aval, "weak_type", False)))


def _describe_operand(name: str, operand: Operand) -> BufferSpec:
    return describe_buffer(name, operand.aval)


def _place_output(
    operand: Operand,
    index: int,
    alias: Value | None,
    kept: Set[Operand],
    drafts: list[Draft],
    producers: dict[int, Draft],
    specs: dict[int, BufferSpec],
) -> OutputSpec:
    """Returns where a result is, adding it to a region where it has no buffer yet."""
    if alias is not None:
        target = specs[alias.number]
        if operand is alias:
            return OutputSpec(target, target.name)
        # A buffer of its own, so that the value can be written over the donated input.
        return OutputSpec(_emit(operand, index, drafts, producers), target.name)
    if not isinstance(operand, Value):
        return OutputSpec(_emit(operand, index, drafts, producers))
    if operand.number in producers:
        return OutputSpec(describe_buffer(f"%{operand.number}", operand.aval))
    if operand in kept:
        return OutputSpec(specs[operand.number])
    # Donated inputs are overwritten, and constants must not be, which users may do to a result.
    return OutputSpec(_emit(operand, index, drafts, producers))


def _emit(
    operand: Operand, index: int, drafts: list[Draft], producers: dict[int, Draft]
) -> BufferSpec:
    """Makes a region return the operand as a result of its own."""
    name = f"%out{index}"
    producer = producers.get(operand.number) if isinstance(operand, Value) else None
    if producer is None:
        producer = _find_epilogue(drafts)
    producer.extra[name] = operand
    return describe_buffer(name, operand.aval)


def _find_epilogue(drafts: list[Draft]) -> Draft:
    """Returns the region that returns literals and inputs: the only one, or a new last one."""
    if len(drafts) == 1 and drafts[0].place.is_captured and not drafts[0].point:
        return drafts[0]
    if drafts and drafts[-1].name == "epilogue":
        return drafts[-1]
    others = (draft.name for draft in drafts if draft.place.stream != CAPTURING_STREAM)
    drafts.append(Draft("epilogue", Place(CAPTURING_STREAM, tuple(sorted(others)))))
    return drafts[-1]


def _list_own(draft: Draft) -> list[Value]:
    """Returns the values that the region is the one to make."""
    values = [value for op in draft.ops for value in op.results]
    return [value for value in values if value not in draft.repeated]


def _list_reads(draft: Draft, embedded: Collection[Value]) -> list[Value]:
    """Returns the values that a region reads and does not hold, in order of first use."""
    own = {value for op in draft.ops for value in op.results}
    own.update(embedded)
    operands = [operand for op in draft.ops for operand in op.operands if operand not in own]
    operands += [operand for operand in draft.extra.values() if operand not in own]
    return [operand for operand in dict.fromkeys(operands) if isinstance(operand, Value)]


def _find_values_used_outside(graph: Graph, reads: Sequence[Sequence[Value]]) -> set[int]:
    """Returns the numbers of the values that need a buffer: used in another region or returned."""
    aliased = {output for output, _ in graph.aliases}
    returned = [each for index, each in enumerate(graph.outputs) if index not in aliased]
    needed = [*returned, *(value for values in reads for value in values)]
    return {operand.number for operand in needed if isinstance(operand, Value)}


def _finish(
    draft: Draft,
    inputs: Sequence[Value],
    graph: Graph,
    used: set[int],
    specs: dict[int, BufferSpec],
    marks: Mapping[int, str],
    bind: Callable[..., list[Any]] | None,
    embedded: Mapping[Value, Any],
) -> Cut:
    own = _list_own(draft)
    returned: list[tuple[str, Operand]] = [
        (f"%{value.number}", value) for value in own if value.number in used
    ]
    returned += draft.extra.items()
    results = [operand for _, operand in returned]
    flat = make_flat_function(
        draft.name, draft.ops, inputs, results, marks=marks, embedded=embedded
    )
    function: Callable[..., tuple[Any, ...]] = flat
    if bind is not None and draft.is_compiled and len(draft.ops) == len(graph.ops):
        function = make_whole_function(bind, graph, inputs, results, flat)
    # Lowering compiles what is captured; what runs eagerly is compiled at its first call.
    is_jitted = draft.is_compiled and not draft.place.is_captured
    region = Region(
        name=draft.name,
        function=jax.jit(function) if is_jitted else function,
        inputs=tuple(
            specs.get(v.number) or describe_buffer(f"%{v.number}", v.aval) for v in inputs
        ),
        outputs=tuple(describe_buffer(name, operand.aval) for name, operand in returned),
        place=draft.place,
        point=draft.point,
    )
    return Cut(region, flat)
