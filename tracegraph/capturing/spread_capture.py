"""LoweredSpread and CompiledSpread: the stages of a capture over several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tracegraph.capturing.agreement import Agreement
from tracegraph.capturing.capture_stage import CaptureStage
from tracegraph.capturing.compiled_capture import CompiledCapture, MemoryAnalysis
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.spread import Spread, check_spread, find_spread
from tracegraph.constraints.violation import Violation, make_capture_error
from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import make_function
from tracegraph.lowering.compile_spread import (
    Agree,
    SpreadProgram,
    agree_alone,
    compile_spread,
)
from tracegraph.lowering.compiler import PhaseProgress
from tracegraph.lowering.overlap import Overlap
from tracegraph.replaying.spread_call import SpreadCall, make_flat
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.jit_comparison import (
    JitComparison,
    find_skip_reason,
    is_graph_needed,
)
from tracegraph.verification.spread_comparison import time_spread
from tracegraph.verification.spread_verification import verify_spread


@dataclasses.dataclass(frozen=True)
class LoweredSpread(CaptureStage):
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
    options = prepared.options
    violations += check_spread(spread, prepared.list_leaves(), graph, is_cut=options.is_cut)
    if options.outputs != "fresh":
        why = "static results are in one device's pool; on several devices they are JAX's arrays"
        option, fix = f"outputs={options.outputs!r}", 'leave outputs="static" out'
        violations.append(_make_option_violation(prepared, spread, (option, why, fix)))
    if violations:
        raise make_capture_error(violations, graph_name=graph.name, graph=graph)


def compile_call(
    prepared: PreparedCall,
    jaxpr: Any,
    devices: tuple[Any, ...],
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree = agree_alone,
) -> SpreadProgram:
    """Compiles a call for the devices that it is spread over.

    Args:
        prepared: the call.
        jaxpr: what JAX traced of it.
        devices: that the call is spread over.
        progress: is notified of the phases.
        overlap: work for this thread meanwhile.
        agree: see `Agree`.
    """
    types = jax.tree_util.tree_leaves(prepared.make_abstract_arguments())
    function = make_flat(make_function(jaxpr), prepared.options.name)
    return compile_spread(
        function,
        types,
        devices,
        donated=prepared.donated,
        progress=progress,
        overlap=overlap,
        agree=agree,
    )


def compare_spread(
    prepared: PreparedCall,
    graph: SpreadCall | SpreadGraph,
    jaxpr: Any,
    agreement: Agreement,
    progress: PhaseProgress,
) -> tuple[JitComparison | None, SpreadCall | None]:
    """Times graphs that are cut against XLA's program; returns the program if they lose.

    Args:
        prepared: the call.
        graph: what was captured.
        jaxpr: what JAX traced.
        agreement: of its processes.
        progress: is notified of the phase.
    """
    if isinstance(graph, SpreadCall) or is_graph_needed(prepared, graph):
        return None, None
    skipped = find_skip_reason(prepared, graph)
    if skipped:
        return JitComparison(skipped=skipped), None
    progress.enter("compare", "with jax.jit")
    devices, agree = graph.program.devices, agreement.confirm_program
    program = compile_call(prepared, jaxpr, devices, progress, Overlap(), agree)
    call = SpreadCall(prepared, graph.checked, program)
    progress.enter("compare", "with jax.jit")
    # Each round is a meeting of all: none begins before all have a program.
    agreement.confirm("compiled")
    times = agreement.confirm("compared", times=time_spread(prepared, graph, call))
    slowest = [max(each) for each in zip(*times, strict=True)]
    comparison = JitComparison(*slowest)
    return comparison, call if comparison.is_jit_faster else None


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
