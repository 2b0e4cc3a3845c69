"""LoweredSpread and CompiledSpread: the stages of a capture over several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tracegraph.capturing.compiled_capture import CompiledCapture, MemoryAnalysis
from tracegraph.capturing.stage import Stage
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.spread import Spread, check_spread, find_spread
from tracegraph.constraints.violation import Violation, make_capture_error
from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import make_function
from tracegraph.lowering.compile_spread import SpreadProgram, compile_spread
from tracegraph.lowering.compiler import PhaseProgress
from tracegraph.lowering.overlap import Overlap
from tracegraph.replaying.spread_call import SpreadCall, make_flat
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.spread_verification import verify_spread


@dataclasses.dataclass(frozen=True)
class LoweredSpread(Stage):
    """A function compiled for several devices: everything is known, nothing is allocated.

    Attributes:
        prepared: the call that it was compiled for.
        checked: the traced and optimised graph.
        lowered: XLA's program.
        spread: the devices.
        device: that runs it; it is the first of them, or JAX's default device.
    """

    prepared: PreparedCall = dataclasses.field(repr=False)
    checked: CheckedGraph = dataclasses.field(repr=False)
    lowered: SpreadProgram  # pyright: ignore[reportIncompatibleVariableOverride]
    spread: Spread
    device: Device

    @property
    def pool_bytes(self) -> int:
        """Bytes that it takes from the pool: none, each device's part belongs to JAX."""
        return 0

    def as_text(self) -> str:
        """Returns the traced graph and XLA's optimised program, which every device runs."""
        return f"{self.checked}\n\n{self.lowered.executable.as_text()}"

    def instantiate(self) -> SpreadCall:
        """Returns what is called like the function; nothing has to be allocated."""
        return SpreadCall(self.prepared, self.checked, self.lowered)

    def compile(self) -> CompiledSpread:
        """Returns the program with what `jax.stages.Compiled` offers."""
        prepared = self.prepared.drop_values()
        # Called like a graph of one device.
        call: Any = self.instantiate()
        return CompiledSpread(prepared, self.checked, self.lowered, self.device, call)


class CompiledSpread(CompiledCapture):
    """A function compiled for several devices, which is called with its dynamic arguments."""

    lowered: SpreadProgram  # pyright: ignore[reportIncompatibleVariableOverride]
    _takes_spread = True

    def memory_analysis(self) -> MemoryAnalysis:
        """Returns the bytes on each device; no pool holds any of them."""
        found: Any = self.lowered.executable.memory_analysis()
        return MemoryAnalysis(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
            found.generated_code_size_in_bytes,
            0,
        )

    def _compare(self, found: PreparedCall) -> None:
        call: Any = self._graph
        verify_spread(found, call)


def find_call_spread(prepared: PreparedCall, graph: Graph | None = None) -> Spread | None:
    """Returns the devices that a call is spread over, None for one device.

    Args:
        prepared: the call.
        graph: the function, once it is traced: it may name a mesh itself.
    """
    return find_spread(prepared.list_leaves(), graph)


def check_spread_call(prepared: PreparedCall, checked: CheckedGraph, spread: Spread) -> None:
    """Checks what a call over several devices must not do.

    Raises:
        CaptureError: devices are mixed, or an option needs the buffers of one device.
    """
    graph = checked.graph
    violations = [*checked.uncapturable.values()]
    violations += check_spread(spread, prepared.list_leaves(), graph)
    options = prepared.options
    if options.outputs != "fresh":
        why = "static results are in one device's pool; on several devices they are JAX's arrays"
        option, fix = f"outputs={options.outputs!r}", 'leave outputs="static" out'
        violations.append(_make_option_violation(prepared, spread, (option, why, fix)))
    if violations:
        raise make_capture_error(violations, graph_name=graph.name, graph=graph)


def compile_call(
    prepared: PreparedCall, jaxpr: Any, spread: Spread, progress: PhaseProgress, overlap: Overlap
) -> SpreadProgram:
    """Compiles a call for the devices that it is spread over.

    Args:
        prepared: the call.
        jaxpr: what JAX traced of it.
        spread: the devices.
        progress: is notified of the phases.
        overlap: work for this thread meanwhile.
    """
    types = jax.tree_util.tree_leaves(prepared.make_abstract_arguments())
    function = make_flat(make_function(jaxpr), prepared.options.name)
    return compile_spread(
        function,
        types,
        spread.devices,
        donated=prepared.donated,
        progress=progress,
        overlap=overlap,
    )


def _make_option_violation(
    prepared: PreparedCall, spread: Spread, texts: tuple[str, str, str]
) -> Violation:
    option, why, fix = texts
    return Violation(
        "several-devices",
        f"`{prepared.options.name}` has {option} and runs on {spread}",
        f"{locate_caller()}, {spread.source}",
        why,
        fix,
    )
