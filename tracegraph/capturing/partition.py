"""Partition: a Graph becomes regions, one per run of capturable ops on one stream.

A region grows until something needs it to be finished: an event recorded behind it, a value of it
used on another stream, or an op that cannot be captured. Such ops become eager regions: one call
of XLA per run of them, save those that call back into Python, which JAX runs one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax

from tracegraph.capturing.whole_function import make_whole_function
from tracegraph.constraints.callbacks import has_callback
from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.jax_internals import bind_op, describe_physical, to_logical, to_physical
from tracegraph.lowering.request import (
    BufferSpec,
    CaptureRequest,
    InputSpec,
    OutputSpec,
    Place,
    Region,
    Role,
)

CAPTURING_STREAM = 0
# How a marked op is named in XLA's program.
_MARK = "tracegraph_op"
_MARKED = re.compile(rf"(?:^|/){_MARK}(\d+)(?=/|$)")


@dataclasses.dataclass(frozen=True, eq=False)
class _Draft:
    """A region that is not finished yet.

    More than six fields because it is the region and its place among the others at once.
    """

    name: str
    place: Place
    is_compiled: bool = True
    ops: list[Op] = dataclasses.field(default_factory=list)
    covered: set[str] = dataclasses.field(default_factory=set)
    extra: dict[str, Operand] = dataclasses.field(default_factory=dict)


def partition_graph(
    graph: Graph,
    *,
    input_names: Sequence[str],
    donated: Collection[int],
    uncapturable: Collection[int] = (),
    is_marked: bool = False,
    bind: Callable[..., list[Any]] | None = None,
) -> CaptureRequest:
    """Cuts a graph into regions.

    Args:
        graph: checked and optimised.
        input_names: one unique name per graph input; names that begin with ``%`` are ours.
        donated: indices of the donated inputs.
        uncapturable: indices of the ops that run eagerly between two graphs.
        is_marked: let XLA's program name the op behind each instruction; see `find_marked_op`.
        bind: of the trace that the graph was made from, for a region that is all of it.

    Returns:
        The request, with inputs in the order of the graph's inputs, then its constants.
    """
    drafts = _Drafter().split(graph, uncapturable)
    specs = _name_inputs(graph, input_names)
    producers = {value.number: d for d in drafts for op in d.ops for value in op.results}
    aliases = {output: graph.inputs[index] for output, index in graph.aliases}
    kept = {value for index, value in enumerate(graph.inputs) if index not in donated}
    outputs = [
        _place_output(operand, index, aliases.get(index), kept, drafts, producers, specs)
        for index, operand in enumerate(graph.outputs)
    ]
    reads = [_list_reads(draft) for draft in drafts]
    used = _find_values_used_outside(graph, reads)
    marks = {id(op): f"{_MARK}{i}" for i, op in enumerate(graph.ops)} if is_marked else {}
    bind = None if graph.constants or is_marked else bind
    regions = tuple(
        _finish(draft, inputs, graph, used, specs, marks, bind)
        for draft, inputs in zip(drafts, reads, strict=True)
    )
    roles = [Role.DONATED if i in donated else Role.COPIED for i in range(len(graph.inputs))]
    values = [*graph.inputs, *(constant.value for constant in graph.constants)]
    roles += [Role.CONSTANT] * len(graph.constants)
    return CaptureRequest(
        name=graph.name,
        regions=regions,
        inputs=tuple(
            InputSpec(specs[value.number], role) for value, role in zip(values, roles, strict=True)
        ),
        outputs=tuple(outputs),
    )


def list_region_ops(graph: Graph, uncapturable: Collection[int] = ()) -> dict[str, list[int]]:
    """Returns the indices of the ops of each region, by its name.

    Args:
        graph: as for `partition_graph`.
        uncapturable: the same.
    """
    index_of = {id(op): index for index, op in enumerate(graph.ops)}
    drafts = _Drafter().split(graph, uncapturable)
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


class _Drafter:
    """Walks the ops in program order and assigns them to regions."""

    def __init__(self) -> None:
        self._drafts: dict[str, _Draft] = {}
        self._open: dict[int, _Draft] = {}
        self._last: dict[int, _Draft] = {}
        self._waits: dict[int, set[str]] = {}
        self._events: dict[int, set[str]] = {}
        self._producers: dict[Operand, _Draft] = {}
        self._floor: _Draft | None = None

    def split(self, graph: Graph, uncapturable: Collection[int]) -> list[_Draft]:
        """Returns the regions in program order."""
        if graph.ops and not uncapturable and not graph.has_streams:
            # Nothing to cut at, as in most graphs.
            self._start(CAPTURING_STREAM).ops.extend(graph.ops)
            return list(self._drafts.values())
        awaited = {op.params["event"] for op in graph.ops if op.name == "tg_wait"}
        for index, op in enumerate(graph.ops):
            if op.name == "tg_record":
                if op.params["event"] in awaited:
                    self._record(op.params["stream"], op.params["event"])
            elif op.name == "tg_wait":
                self._wait(op.params["stream"], op.params["event"])
            elif index in uncapturable:
                self._add_eager(op)
            else:
                self._add(op)
        return list(self._drafts.values())

    def _record(self, stream: int, event: int) -> None:
        self._open.pop(stream, None)
        self._events[event] = self._find_previous(stream)

    def _wait(self, stream: int, event: int) -> None:
        new = self._events.get(event, set()) - self._find_covered(stream)
        if new:
            self._open.pop(stream, None)
            self._waits.setdefault(stream, set()).update(new)

    def _add_eager(self, op: Op) -> None:
        """Adds the op to an eager region that comes after everything before it."""
        is_compiled = not has_callback(op)
        latest = next(reversed(self._drafts.values()), None)
        if latest is not None and latest is self._floor and latest.is_compiled and is_compiled:
            self._append(latest, op)
            return
        everything = {draft.name for draft in self._last.values()}
        self._waits.setdefault(CAPTURING_STREAM, set()).update(everything)
        self._floor = self._start(CAPTURING_STREAM, is_captured=False, is_compiled=is_compiled)
        self._append(self._floor, op)
        self._open.clear()

    def _add(self, op: Op) -> None:
        stream = op.origin.stream
        missing = self._find_missing(op, stream)
        # Only the backward pass finds any: its streams are synchronised by data, see
        # docs/constraints.md#stream-wait.
        for producer in missing:
            if self._open.get(producer.place.stream) is producer:
                del self._open[producer.place.stream]
            self._waits.setdefault(stream, set()).add(producer.name)
        if missing:
            self._open.pop(stream, None)
        self._append(self._open.get(stream) or self._start(stream), op)

    def _find_missing(self, op: Op, stream: int) -> list[_Draft]:
        """Returns the regions that made operands which the next op on this stream may not read."""
        own = self._open.get(stream)
        producers = [self._producers.get(operand, own) for operand in op.operands]
        others = [each for each in producers if each is not None and each is not own]
        if not others:
            return []
        covered = self._find_covered(stream)
        return [producer for producer in others if producer.name not in covered]

    def _find_previous(self, stream: int) -> set[str]:
        """Returns the regions that the next one on this stream directly comes after."""
        before = [self._last.get(stream), self._floor]
        return self._waits.get(stream, set()) | {draft.name for draft in before if draft}

    def _find_covered(self, stream: int) -> set[str]:
        """Returns all regions whose values the next op on this stream may read."""
        draft = self._open.get(stream)
        if draft is not None:
            return {*draft.covered, draft.name}
        return self._close_over(self._find_previous(stream))

    def _close_over(self, names: set[str]) -> set[str]:
        return names.union(*(self._drafts[name].covered for name in names))

    def _append(self, draft: _Draft, op: Op) -> None:
        draft.ops.append(op)
        self._producers.update(dict.fromkeys(op.results, draft))

    def _start(self, stream: int, *, is_captured: bool = True, is_compiled: bool = True) -> _Draft:
        previous = self._find_previous(stream)
        self._waits.pop(stream, None)
        # A stream is in order by itself.
        waits = sorted(name for name in previous if self._drafts[name].place.stream != stream)
        draft = _Draft(
            name=f"region{len(self._drafts)}",
            place=Place(stream, tuple(waits), is_captured),
            is_compiled=is_compiled,
            covered=self._close_over(previous),
        )
        self._drafts[draft.name] = draft
        self._open[stream] = self._last[stream] = draft
        return draft


def _name_inputs(graph: Graph, names: Sequence[str]) -> dict[int, BufferSpec]:
    """Returns the buffer of each input and constant by its value's number."""
    pairs = [*zip(graph.inputs, names, strict=True)]
    pairs += [(constant.value, f"%{constant.name}") for constant in graph.constants]
    return {value.number: describe_buffer(name, value.aval) for value, name in pairs}


def describe_buffer(name: str, aval: Any) -> BufferSpec:
    """Returns the buffer that holds a value of this abstract value."""
    shape, dtype = describe_physical(aval)
    return BufferSpec(name, shape, dtype, bool(getattr(aval, "weak_type", False)))


def _place_output(
    operand: Operand,
    index: int,
    alias: Value | None,
    kept: Set[Operand],
    drafts: list[_Draft],
    producers: dict[int, _Draft],
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
    operand: Operand, index: int, drafts: list[_Draft], producers: dict[int, _Draft]
) -> BufferSpec:
    """Makes a region return the operand as a result of its own."""
    name = f"%out{index}"
    producer = producers.get(operand.number) if isinstance(operand, Value) else None
    if producer is None:
        producer = _find_epilogue(drafts)
    producer.extra[name] = operand
    return describe_buffer(name, operand.aval)


def _find_epilogue(drafts: list[_Draft]) -> _Draft:
    """Returns the region that returns literals and inputs: the only one, or a new last one."""
    if len(drafts) == 1 and drafts[0].place.is_captured:
        return drafts[0]
    if drafts and drafts[-1].name == "epilogue":
        return drafts[-1]
    others = (draft.name for draft in drafts if draft.place.stream != CAPTURING_STREAM)
    drafts.append(_Draft("epilogue", Place(CAPTURING_STREAM, tuple(sorted(others)))))
    return drafts[-1]


def _list_reads(draft: _Draft) -> list[Value]:
    """Returns the values that a region reads and does not make, in order of first use."""
    own = {value for op in draft.ops for value in op.results}
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
    draft: _Draft,
    inputs: Sequence[Value],
    graph: Graph,
    used: set[int],
    specs: dict[int, BufferSpec],
    marks: Mapping[int, str],
    bind: Callable[..., list[Any]] | None,
) -> Region:
    own = [value for op in draft.ops for value in op.results]
    returned: list[tuple[str, Operand]] = [
        (f"%{value.number}", value) for value in own if value.number in used
    ]
    returned += draft.extra.items()
    results = [operand for _, operand in returned]
    function = make_flat_function(draft.name, draft.ops, inputs, results, marks=marks)
    if bind is not None and draft.place.is_captured and len(draft.ops) == len(graph.ops):
        function = make_whole_function(bind, graph, inputs, results, function)
    # Lowering compiles what is captured; what runs eagerly is compiled at its first call.
    is_jitted = draft.is_compiled and not draft.place.is_captured
    return Region(
        name=draft.name,
        function=jax.jit(function) if is_jitted else function,
        inputs=tuple(
            specs.get(v.number) or describe_buffer(f"%{v.number}", v.aval) for v in inputs
        ),
        outputs=tuple(describe_buffer(name, operand.aval) for name, operand in returned),
        place=draft.place,
    )


def make_flat_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[Value],
    outputs: Sequence[Operand],
    *,
    marks: Mapping[int, str] | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a traceable function of physical arrays that binds the ops in order.

    Args:
        name: of the function, as it shows in profiles.
        ops: in program order.
        inputs: the values of the arguments.
        outputs: what to return.
        marks: by the identity of an op the scope that it is bound in.
    """
    marks = marks or {}

    def run(*arrays: Any) -> tuple[Any, ...]:
        known = {
            value.number: to_logical(array, value.aval)
            for value, array in zip(inputs, arrays, strict=True)
        }

        def read(operand: Operand) -> Any:
            return known[operand.number] if isinstance(operand, Value) else operand.value

        for op in ops:
            mark = marks.get(id(op))
            with jax.named_scope(mark) if mark else contextlib.nullcontext():
                results = bind_op(op, [read(operand) for operand in op.operands])
            known.update((v.number, r) for v, r in zip(op.results, results, strict=True))
        return tuple(to_physical(read(operand), operand.aval) for operand in outputs)

    run.__name__ = name
    return run
