"""From a checked function to its lowering; in partial mode what no graph holds is cut out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.partition import partition_graph
from tracegraph.capturing.progress import Progress
from tracegraph.capturing.unlowered import find_refused, find_unlowered
from tracegraph.constraints.violation import Violation
from tracegraph.ir.graph import Graph, Op, Value
from tracegraph.jax_internals import describe_physical
from tracegraph.lowering.collector import collect_ahead, find_wait_seconds, hold_collector
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.lower import Lowered, lower_request
from tracegraph.lowering.overlap import Preparation
from tracegraph.lowering.planning.lent_inputs import is_lendable, lend_arguments
from tracegraph.lowering.request import BufferSpec, CaptureRequest, Role
from tracegraph.lowering.tuning import Tuning
from tracegraph.lowering.warm_memory import warm_memory
from tracegraph.options import LIVE_OUTPUTS, Options
from tracegraph.runtime.definition.nodes import KernelCode
from tracegraph.runtime.definition.packing import is_packable
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.late_import import import_late
from tracegraph.tracing.checked_graph import CheckedGraph, FirstTrace
from tracegraph.tracing.prepared_call import PreparedCall

# Note [Late imports].
prepare_reading: Callable[[], None] = import_late(
    "tracegraph.lowering.xla.decode", "prepare_reading"
)
list_loop_kernels: Callable[[str], list[KernelCode]] = import_late(
    "tracegraph.lowering.kernels.loops.loop_kernels", "list_loop_kernels"
)
read_region = import_late("tracegraph.lowering.read_region", "read_region")
plan_program = import_late("tracegraph.lowering.plan_program", "plan_program")
# Heap bytes that reading a program takes, for each op of its graph.
WARM_BYTES = 16 << 10
# Ops that a loop counts for at most, unless one iteration has more: a longer one is not unrolled.
MOST_LOOP_OPS = 1024
# By the names of their primitives.
LOOPS = ("scan", "while", "cond")
# From here on a program for their copies saves more than it costs, see `CudaComparison`.
MANY_ARGUMENTS = 16
# Compilations that may follow one another before a refused region runs eagerly as a whole.
MAX_PRECISE_CUTS = 3


def lower_checked(
    prepared: PreparedCall,
    first: FirstTrace,
    compiler: Compiler,
    *,
    shares_arguments: bool = False,
) -> tuple[CheckedGraph, Lowered]:
    """Lowers a function for the compiler's device.

    In partial mode on a GPU, ops that become work that no graph holds run eagerly: those that are
    known by name, then those that lowering refuses. They are added to ``uncapturable``, each with
    its reason, so that `explain` lists them.

    Args:
        prepared: the call that is captured.
        first: the function.
        compiler: for the device.
        shares_arguments: see `share_arguments`.

    Returns:
        What was lowered, and its lowering.

    Raises:
        UnsupportedError: XLA's program holds what no graph holds; in partial mode, for a reason
            that lies in no op.
    """
    if prepared.options.mode == "partial" and compiler.target.takes_kernels:
        return _lower_cut(prepared, first, compiler)
    request = make_request(prepared, first.checked, bind=first.traced.bind)
    if shares_arguments:
        request = share_arguments(request)
    elif prepared.options.outputs != LIVE_OUTPUTS:
        request = lend_arguments(request)
    return first.checked, lower_request(request, compiler)


def compile_again(
    prepared: PreparedCall,
    first: FirstTrace,
    device: Device,
    *,
    shares_arguments: bool,
    tuning: Tuning,
) -> tuple[CompiledRegion, ...]:
    """Returns the regions of a function whose lowering came from a file without them.

    Args:
        prepared: the call, without values.
        first: the function.
        device: that it is compiled for.
        shares_arguments: see `share_arguments`.
        tuning: as it was lowered with.
    """
    progress = Progress(f"compiling `{prepared.options.name}`")
    with progress:
        compiler = Compiler(device, progress, tuning=tuning)
        shared = {"shares_arguments": shares_arguments}
        _, lowered = lower_checked(prepared, first, compiler, **shared)
        return lowered.regions


def lower_lifted(recipe: LoweredCapture, lifted: Collection[Value], tuning: Tuning) -> Lowered:
    """Lowers a captured function again, with closed-over arrays as inputs of the graph.

    Args:
        recipe: of the captured graph.
        lifted: the arrays.
        tuning: as it was lowered with.
    """
    request = make_request(recipe.prepared, recipe.checked, lifted=lifted)
    if any(not each.is_kept for each in recipe.lowered.program.inputs):
        request = share_arguments(request)
    elif recipe.prepared.options.outputs != LIVE_OUTPUTS:
        request = lend_arguments(request)
    progress = Progress(f"compiling `{recipe.prepared.options.name}` without closed-over arrays")
    with progress:
        return lower_request(request, Compiler(recipe.device, progress, tuning=tuning))


def share_arguments(request: CaptureRequest) -> CaptureRequest:
    """Returns a request whose arguments and results are in the memory that a pool shares.

    The caller fills all arguments and takes all results out in each call, under the pool's lock.
    Donated state and constants stay the graph's own.
    """
    passing = {each.buffer.name for each in request.inputs if each.role is Role.COPIED}
    stays = {each.buffer.name for each in request.inputs} - passing
    inputs = tuple(
        dataclasses.replace(each, is_kept=each.buffer.name not in passing)
        for each in request.inputs
    )
    outputs = tuple(
        dataclasses.replace(each, is_kept=each.alias is not None or each.buffer.name in stays)
        for each in request.outputs
    )
    return dataclasses.replace(request, inputs=inputs, outputs=outputs)


@hold_collector
def make_request(
    prepared: PreparedCall,
    checked: CheckedGraph,
    *,
    bind: Callable[..., list[Any]] | None = None,
    is_marked: bool = False,
    lifted: Collection[Value] = (),
) -> CaptureRequest:
    """Returns the regions of a checked graph.

    Args:
        prepared: the call that is captured.
        checked: the graph.
        bind: of its trace, to bind it as one call where one region is all of it.
        is_marked: see `partition_graph`.
        lifted: the same.
    """
    request = partition_graph(
        checked.graph,
        input_names=prepared.names,
        donated=prepared.donated,
        uncapturable=checked.uncapturable,
        is_marked=is_marked,
        bind=bind,
        lifted=lifted,
    )
    if prepared.options.outputs == "fresh":
        return request
    outputs = tuple(dataclasses.replace(each, is_static=True) for each in request.outputs)
    return dataclasses.replace(request, outputs=outputs)


def list_preparations(device: Device, options: Options, graph: Graph) -> list[Preparation]:
    """Returns what a capture on a GPU does once per process or type: better while XLA compiles.

    Args:
        device: that the graph is for.
        options: how it is captured.
        graph: what is captured.

    Returns:
        In the order in which they are made.
    """
    if not device.takes_kernels:
        return []
    preparations = [
        Preparation("lower", prepare_reading),
        Preparation("lower", read_region.load),
        Preparation("lower", plan_program.load),
        Preparation("lower", functools.partial(warm_memory, WARM_BYTES * count_ops(graph))),
    ]
    types = [describe_physical(operand.aval) for operand in graph.outputs]
    in_place = {index for index, _ in graph.aliases}
    fresh = [each for index, each in enumerate(types) if index not in in_place]
    if options.outputs == "fresh":
        preparations += [
            Preparation("verify", functools.partial(device.prepare_result, *each))
            for each in dict.fromkeys(fresh)
        ]
    own = list_own_arguments(graph)
    if options.verify and len(own) >= MANY_ARGUMENTS:
        prepare = functools.partial(device.prepare_copies, own)
        preparations.append(Preparation("verify", prepare))
    if options.verify:
        preparations.append(Preparation("verify", device.preload_comparison))
    if any(_has_op(graph, name) for name in LOOPS):
        prepare = functools.partial(_preload_loop_kernels, device)
        preparations.append(Preparation("instantiate", prepare))
    if _has_op(graph, "conv_general_dilated"):
        preparations.append(Preparation("lower", device.preload_convolutions))
    if _has_op(graph, "dot_general"):
        # Late: the first time in a process it takes longer than XLA for a small program.
        preparations.append(Preparation("instantiate", device.preload_matmuls))
    # Last: all that was made ahead is looked at once.
    return [*preparations, Preparation("lower", collect_ahead, find_wait_seconds())]


def _preload_loop_kernels(device: Device) -> None:
    device.preload_kernels(list_loop_kernels(device.target.architecture))


def list_own_arguments(graph: Graph) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shape and dtype of each argument that a graph has memory for, in their order.

    Args:
        graph: what is captured; see Note [Lent inputs] for its large arguments.
    """
    state = {index for _, index in graph.aliases}
    types = [describe_physical(operand.aval) for operand in graph.inputs]
    return [
        each
        for index, each in enumerate(types)
        if index in state
        or not is_lendable(BufferSpec(f"{index}", *each, is_packed=is_packable(each[1])))
    ]


def count_ops(graph: Graph) -> int:
    """Returns how many ops a graph has once its loops are unrolled, as far as they may be.

    Args:
        graph: those inside of its ops count, too.
    """
    return sum(1 + _count_inner(op) for op in graph.ops)


def _count_inner(op: Op) -> int:
    inner = sum(count_ops(each) for _, each in op.subgraphs)
    turns = op.params.get("length", 1) if op.name == "scan" else 1
    return max(inner, min(inner * turns, MOST_LOOP_OPS))


def _has_op(graph: Graph, name: str) -> bool:
    return any(
        op.primitive.name == name or any(_has_op(inner, name) for _, inner in op.subgraphs)
        for op in graph.ops
    )


def _lower_cut(
    prepared: PreparedCall, first: FirstTrace, compiler: Compiler
) -> tuple[CheckedGraph, Lowered]:
    """Lowers with all that no graph holds cut out."""
    checked = _cut(first.checked, find_unlowered(first.checked.graph))
    cuts = 0
    while True:
        request = make_request(prepared, checked, bind=first.traced.bind, is_marked=True)
        try:
            return checked, lower_request(request, compiler)
        except UnsupportedError as error:
            found = find_refused(
                checked.graph,
                error.refused,
                checked.uncapturable.keys(),
                is_precise=cuts < MAX_PRECISE_CUTS,
            )
            if not found:
                raise
        checked = _cut(checked, found)
        cuts += 1


def _cut(checked: CheckedGraph, found: Mapping[int, Violation]) -> CheckedGraph:
    # The reason that was found first stays.
    reasons = dict(sorted({**found, **checked.uncapturable}.items()))
    return dataclasses.replace(checked, uncapturable=reasons)
