"""LoweredSpreadGraphs: a function lowered for several GPUs, a graph on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tracegraph.capturing.capture_lowering import make_request
from tracegraph.capturing.compiled_capture import CompiledCapture
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.spread import Spread, find_spread
from tracegraph.constraints.violation import Violation, make_capture_error
from tracegraph.jax_internals import is_key_dtype
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.compile_spread import (
    Agree,
    Spreading,
    SpreadLowering,
    SpreadProgram,
    agree_alone,
)
from tracegraph.lowering.compiler import PhaseProgress
from tracegraph.lowering.overlap import Overlap
from tracegraph.lowering.request import CaptureRequest
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.arrays.spread_buffer import GlobalType
from tracegraph.runtime.default_device import find_any_device, join_gpus
from tracegraph.runtime.device import Device
from tracegraph.runtime.jax_interop import make_aval
from tracegraph.runtime.late_import import import_late
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.checked_graph import CheckedGraph, FirstTrace
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.user_memory.live_plans import watch_plan
from tracegraph.verification.spread_verification import verify_spread_graph

# Note [Late imports].
lower_spread: Callable[..., SpreadLowering] = import_late(
    "tracegraph.lowering.lower_spread", "lower_spread"
)


@dataclasses.dataclass(frozen=True)
class LoweredSpreadGraphs(LoweredCapture):
    """A function lowered for several GPUs: everything is known, nothing is allocated.

    More than six fields because it is what a capture for one GPU is, and where the parts are.

    Attributes:
        program: of XLA, for all GPUs.
        whole: the sharding of what each GPU holds whole.
        types: of the static inputs and the results, by the names of their buffers.
    """

    program: SpreadProgram = dataclasses.field(kw_only=True)
    whole: Any = dataclasses.field(kw_only=True, repr=False)
    types: Mapping[str, GlobalType] = dataclasses.field(kw_only=True, repr=False)

    @hold_collector
    def instantiate(self) -> SpreadGraph:
        """Allocates an arena on each GPU and returns the graph; it is called like the function.

        Raises:
            OutOfMemoryError: a GPU cannot hold its arena.
            UnsupportedError: a GPU cannot reach the memory of another.
        """
        own = jax.process_index()
        devices = [find_any_device(d) for d in self.program.devices if d.process_index == own]
        pool, *others = self.pool.join_all(devices, self.whole)
        gpus = join_gpus(self.program.devices, self.whole, self.types, others)
        state = ArrayState(self.prepared.options.outputs)
        replay = Replay(self.lowered.definition, gpus, pool, state)
        return SpreadGraph(self.prepared, self.checked, self.lowered, replay, self.program)

    def compile(self) -> CompiledCapture:
        """Allocates the arenas and returns the graph with what `jax.stages.Compiled` offers."""
        graph = self.instantiate()
        watch_plan(self.lowered.plan, graph.replay)
        prepared = self.prepared.drop_values()
        return _CompiledSpreadGraphs(prepared, self.checked, self.lowered, self.device, graph)


class _CompiledSpreadGraphs(CompiledCapture):
    _graph: SpreadGraph
    _takes_spread = True

    def _compare(self, found: PreparedCall) -> None:
        verify_spread_graph(found, self._graph)


def check_spread_graphs(prepared: PreparedCall, checked: CheckedGraph, spread: Spread) -> None:
    """Checks what only graphs of several GPUs must not do.

    Raises:
        CaptureError: an option or the function needs one device.
    """
    found = []
    if prepared.options.pool is not None:
        found.append(_make_violation(prepared, spread, "pool=", "a pool is of one device"))
    if checked.graph.has_streams:
        found.append(_make_violation(prepared, spread, "streams", "a stream is of one device"))
    if found:
        raise make_capture_error(found, graph_name=checked.graph.name, graph=checked.graph)


def lower_for_gpus(
    prepared: PreparedCall,
    first: FirstTrace,
    spread: Spread,
    device: Device,
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree = agree_alone,
) -> SpreadLowering:
    """Compiles a call for the GPUs that it is spread over, and lowers what XLA wrote.

    Args:
        prepared: the call.
        first: the function.
        spread: the GPUs.
        device: one of them.
        progress: is notified of the phases.
        overlap: work for this thread while XLA compiles.
        agree: see `Agree`.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it.
        UnsupportedError: XLA's program holds what no graph holds.
    """
    request = make_request(prepared, first.checked, bind=first.traced.bind)
    shardings = {
        name: _find_physical(leaf)
        for name, leaf in zip(prepared.names, prepared.signature.leaves, strict=True)
        if leaf.sharding is not None
    }
    avals = _list_avals(request, first.checked)
    is_named = find_spread((), first.checked.graph) is not None
    spreading = Spreading(spread.devices, make_whole(spread), shardings, avals, is_named)
    return lower_spread(request, spreading, device, progress, overlap, agree)


def make_lowered(
    prepared: PreparedCall,
    first: FirstTrace,
    lowering: SpreadLowering,
    spread: Spread,
    device: Device,
    pool: FunctionPool,
) -> LoweredSpreadGraphs:
    """Returns the stage of a lowering."""
    return LoweredSpreadGraphs(
        prepared,
        first.checked,
        lowering.lowered,
        device,
        pool,
        program=lowering.program,
        whole=make_whole(spread),
        types=lowering.types,
    )


def make_whole(spread: Spread) -> NamedSharding:
    """Returns the sharding of an array that each device holds whole."""
    return NamedSharding(Mesh(spread.devices, ("devices",)), PartitionSpec())


def _find_physical(leaf: Any) -> Any:
    """Returns the sharding of the memory of a leaf: that of a typed key has a further axis."""
    if not is_key_dtype(leaf.dtype) or not isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding
    spec = [*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec))]
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))


def _list_avals(request: CaptureRequest, checked: CheckedGraph) -> dict[str, Any]:
    """Returns JAX's abstract value of each input and result, by the name of its buffer."""
    graph = checked.graph
    found: dict[str, Any] = {}
    for spec in request.inputs:
        buffer = spec.buffer
        found[buffer.name] = make_aval(buffer.shape, buffer.dtype, weak_type=buffer.weak_type)
    for spec, operand in zip(request.outputs, graph.outputs, strict=True):
        buffer = spec.buffer
        aval = operand.aval
        if is_key_dtype(aval.dtype) or (aval.dtype, aval.shape) != (buffer.dtype, buffer.shape):
            aval = make_aval(buffer.shape, buffer.dtype, weak_type=buffer.weak_type)
        found[spec.alias or buffer.name] = aval
    return found


def _make_violation(prepared: PreparedCall, spread: Spread, what: str, why: str) -> Violation:
    return Violation(
        "several-devices",
        f"`{prepared.options.name}` has {what} and runs on {spread}",
        f"{locate_caller()}, {spread.source}",
        why,
        f"leave {what} out, or capture a function of one device",
    )
