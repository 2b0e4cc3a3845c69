"""The pipeline: a prepared call becomes a captured graph, one method per phase."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.capturing.capture_lowering import list_preparations, lower_checked
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.meshes import check_context_mesh, check_meshes
from tracegraph.constraints.violation import make_capture_error
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.overlap import Overlap
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.jit_call import JitCall
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import FirstTrace, check_trace, finish_checks, trace_call
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.trace import JaxTrace
from tracegraph.verification.capture_verification import verify_capture
from tracegraph.verification.jit_comparison import JitComparison, compare_with_jit
from tracegraph.verification.report import VerificationReport


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured graph and how it came about.

    Attributes:
        graph: a `CapturedGraph`, or a `JitCall` where `jax.jit` is faster.
        verification: what comparing it with its reference found.
        seconds: of each phase, by name.
        comparison: with `jax.jit`, of a graph with eager parts; None without any.
    """

    graph: Any
    verification: VerificationReport
    seconds: Mapping[str, float]
    comparison: JitComparison | None = None


class CapturePipeline:
    """The phases of one capture, in order: each takes what the one before returned.

    Args:
        prepared: the call that is captured.
        device: that it is captured for.
        pool: that the memory of the graph comes from.
        progress: is notified of each phase, and counts its seconds.
    """

    def __init__(
        self, prepared: PreparedCall, device: Device, pool: FunctionPool, progress: Progress
    ) -> None:
        self._prepared, self._device, self._pool = prepared, device, pool
        self._progress = progress
        # Of the function, once it is traced.
        self._jaxpr: Any = None

    def capture(self, announce: Callable[[CapturedGraph], None]) -> Capture:
        """Runs all phases.

        Args:
            announce: is called with the new graph before it is verified.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.
            UnsupportedError: XLA's program holds what no graph holds.
            VerificationError: the new graph differs from its reference.
            OutOfMemoryError: the pool cannot hold the graph.
        """
        graph = self.instantiate(self.run_to_lowered())
        with graph.hold_back():
            announce(graph)
            verification = self.verify(graph)
            comparison, call = self.compare(graph)
        # Complete when the progress has ended.
        return Capture(call or graph, verification, self._progress.seconds, comparison)

    def run_to_lowered(self) -> LoweredCapture:
        """Runs the phases that allocate no device memory."""
        return self.lower(self.check(self.trace()))

    def trace(self) -> JaxTrace:
        """Lets JAX run the function once on abstract values."""
        self._progress.enter("trace")
        check_context_mesh(self._prepared.options.name, self._device.jax_device)
        trace = trace_call(self._prepared)
        self._jaxpr = trace.jaxpr
        return trace

    def check(self, trace: JaxTrace) -> FirstTrace:
        """Makes the graph, optimises it, and checks what one trace shows."""
        self._progress.enter("check")
        first = check_trace(self._prepared, trace)
        graph = first.checked.graph
        violations = check_meshes(graph, self._device.jax_device)
        if violations:
            raise make_capture_error(violations, graph_name=graph.name, graph=graph)
        return first

    def lower(self, first: FirstTrace) -> LoweredCapture:
        """Compiles, plans and builds; the checks are finished while XLA compiles, or at the end."""
        preparations = list_preparations(self._device, self._prepared.options, first.checked.graph)
        overlap = Overlap("check", lambda: self.finish_checks(first), preparations)
        compiler = Compiler(self._device, self._progress, overlap)
        self._progress.enter("lower")
        try:
            checked, lowered = lower_checked(self._prepared, first, compiler)
        except Exception:
            # A difference between the two traces may be the reason: it is reported first.
            overlap.finish()
            raise
        compiler.finish_overlap()
        return LoweredCapture(self._prepared, checked, lowered, self._device, self._pool)

    def finish_checks(self, first: FirstTrace) -> None:
        """Traces a second time, compares the two traces and verifies what the passes made."""
        finish_checks(self._prepared, first)

    def instantiate(self, lowered: LoweredCapture) -> CapturedGraph:
        """Allocates the arena and makes the graph executable."""
        self._progress.enter("instantiate")
        return lowered.instantiate()

    def verify(self, graph: CapturedGraph) -> VerificationReport:
        """Compares the new graph with its reference."""
        if not self._prepared.options.verify:
            return VerificationReport(skipped="verify=False")
        self._progress.enter("verify")
        return verify_capture(self._prepared, graph, self._device)

    def compare(self, graph: CapturedGraph) -> tuple[JitComparison | None, JitCall | None]:
        """Times a graph with eager parts against `jax.jit`; returns what replaces one that lost."""
        if graph.replay.is_whole:
            return None, None
        self._progress.enter("compare", "with jax.jit")
        make_call = functools.partial(JitCall, self._prepared, self._jaxpr, graph)
        return compare_with_jit(self._prepared, graph, make_call)
