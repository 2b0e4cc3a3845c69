"""The pipeline: a prepared call becomes a captured graph, one method per phase."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegraph.capturing.agreement import Agreement, describe_cuts
from tracegraph.capturing.capture_lowering import (
    compile_again,
    list_preparations,
    lower_checked,
)
from tracegraph.capturing.fastest_variant import (
    choose_variant,
    find_chosen,
    takes_replacements,
)
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.handler_errors import translate_compile_error
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.partition import find_embedded
from tracegraph.capturing.progress import Progress
from tracegraph.capturing.spread_capture import (
    LoweredSpread,
    check_spread_call,
    compare_spread,
    compile_call,
    find_call_spread,
)
from tracegraph.capturing.spread_graphs import (
    LoweredSpreadGraphs,
    check_spread_graphs,
    lower_for_gpus,
    make_lowered,
)
from tracegraph.capturing.variant import Variant
from tracegraph.constraints.host_memory import check_host_memory
from tracegraph.constraints.meshes import check_context_mesh, check_meshes
from tracegraph.constraints.spread import Spread
from tracegraph.constraints.violation import make_capture_error
from tracegraph.kernel_caching.cached_lowering import CachedLowering, CacheSlot, find_slot
from tracegraph.lowering.compile_spread import agree_alone
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.overlap import Overlap, Preparation
from tracegraph.lowering.tuning import UNTUNED, Tuning
from tracegraph.replacements.match import find_machine
from tracegraph.replacements.report import Replacement
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import (
    CheckedGraph,
    FirstTrace,
    check_trace,
    finish_checks,
    trace_call,
)
from tracegraph.tracing.outer_values import OuterValues, read_outer_values
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.result_names import name_results
from tracegraph.tracing.trace import JaxTrace
from tracegraph.verification.capture_verification import verify_capture
from tracegraph.verification.jit_comparison import (
    JitComparison,
    compare_with_jit,
    is_graph_needed,
)
from tracegraph.verification.report import VerificationReport
from tracegraph.verification.spread_verification import verify_spread, verify_spread_graph


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured graph and how it came about.

    Attributes:
        graph: a `CapturedGraph`, a `SpreadCall` on several devices, or a `JitCall` where `jax.jit`
            is faster.
        verification: what comparing it with its reference found.
        seconds: of each phase, by name.
        comparison: with `jax.jit`, of a graph with eager parts; None without any.
        recipe: makes the graph again; it holds no memory of the device.
        replacements: what became of ops that have one, with ``numerics="equivalent"``.
    """

    graph: Any
    verification: VerificationReport
    seconds: Mapping[str, float]
    comparison: JitComparison | None = None
    recipe: LoweredCapture | None = None
    replacements: tuple[Replacement, ...] = ()


class CapturePipeline:
    """The phases of one capture, in order: each takes what the one before returned.

    Args:
        prepared: the call that is captured.
        device: that it is captured for.
        pool: that the memory of the graph comes from.
        progress: is notified of each phase, and counts its seconds.

    Attributes:
        shares_arguments: True where arguments and results are in memory that the pool shares.
        takes_spread: True where the call may run on several devices.
        variant: the program that is captured, once it is lowered; another pipeline may go on with
            it.
    """

    shares_arguments = False
    takes_spread = False

    def __init__(
        self, prepared: PreparedCall, device: Device, pool: FunctionPool, progress: Progress
    ) -> None:
        self._prepared, self._device, self._pool = prepared, device, pool
        self._progress = progress
        # Of the function, once it is traced.
        self._jaxpr: Any = None
        # What the function reads from around it, the same.
        self._outer: OuterValues = {}
        self.variant: Variant | None = None
        self._replacements: tuple[Replacement, ...] = ()
        # True while a graph is made of it: only then may others be timed beside.
        self._is_capturing = False
        # The devices of a call that is spread over several, once that is known, and what their
        # processes agree on, if it is captured.
        self._spread: Spread | None = None
        self._agreement: Agreement | None = None

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
        self._is_capturing = True
        try:
            lowered = self.run_to_lowered()
        except BaseException as error:
            agreement = self._agreement or self._make_agreement(self._spread)
            if agreement is not None:
                agreement.withdraw(error)
            raise
        if isinstance(lowered, LoweredSpread | LoweredSpreadGraphs):
            return self._finish_spread(lowered)
        graph = self.instantiate(lowered)
        with graph.hold_back():
            announce(graph)
            verification = self.verify(graph)
            comparison, call = self.compare(graph)
        # Complete when the progress has ended.
        recipe = dataclasses.replace(lowered, prepared=lowered.prepared.drop_values())
        seconds = self._progress.seconds
        return Capture(call or graph, verification, seconds, comparison, recipe, self._replacements)

    def _finish_spread(self, lowered: LoweredSpread | LoweredSpreadGraphs) -> Capture:
        """Verifies what runs on several devices, when all of their processes have it."""
        assert self._agreement is not None
        agreement, recipe, cuts = self._agreement, None, ""
        if isinstance(lowered, LoweredSpreadGraphs):
            recipe = dataclasses.replace(lowered, prepared=lowered.prepared.drop_values())
            cuts = describe_cuts(lowered.lowered.definition)
        try:
            graph = self.instantiate(lowered)
            agreement.confirm("compiled", f"{self._prepared.options.prefer} {cuts}")
            verification = self.verify(graph)
            agreement.confirm("verified")
            comparison, call = compare_spread(
                self._prepared, graph, self._jaxpr, agreement, self._progress
            )
        except BaseException as error:
            agreement.withdraw(error)
            raise
        seconds = self._progress.seconds
        return Capture(call or graph, verification, seconds, comparison, recipe)

    def _make_agreement(self, spread: Spread | None) -> Agreement | None:
        """Returns the agreement of a capture over several devices; lowering alone needs none."""
        if spread is None or not (self.takes_spread and self._is_capturing):
            return None
        return Agreement(self._prepared.options.name, spread.devices)

    # A `LoweredCapture`, or a `LoweredSpread`, of which callers see what both have.
    def run_to_lowered(self) -> Any:
        """Runs the phases that allocate no device memory."""
        return self.lower(self.check(self.trace()))

    def trace(self) -> JaxTrace:
        """Lets JAX run the function once on abstract values."""
        self._progress.enter("trace")
        if self.takes_spread:
            # Once the function is traced, an interrupt may leave JAX in a state that refuses this.
            self._spread = find_call_spread(self._prepared)
        if self._spread is None:
            check_context_mesh(self._prepared.options.name, self._device.jax_device)
        self._outer = read_outer_values(self._prepared.function)
        trace = trace_call(self._prepared)
        self._jaxpr = trace.jaxpr
        return trace

    def check(self, trace: JaxTrace) -> FirstTrace:
        """Makes the graph, optimises it, and checks what one trace shows."""
        self._progress.enter("check")
        first = check_trace(self._prepared, trace)
        graph = first.checked.graph
        if self.takes_spread:
            self._spread = find_call_spread(self._prepared, graph)
            self._agreement = self._make_agreement(self._spread)
        if self._spread is not None:
            check_spread_call(self._prepared, first.checked, self._spread)
            if self._device.takes_kernels:
                check_spread_graphs(self._prepared, first.checked, self._spread)
            return first
        names = functools.partial(name_results, first.checked.out_tree, first.checked.probes)
        violations = check_meshes(graph, self._device.jax_device) + check_host_memory(graph, names)
        if violations:
            raise make_capture_error(violations, graph_name=graph.name, graph=graph)
        return first

    def lower(self, first: FirstTrace) -> LoweredCapture | LoweredSpread | LoweredSpreadGraphs:
        """Compiles, plans and builds; the checks are finished while XLA compiles, or at the end."""
        if self._spread is not None:
            return self._lower_spread(first, self._spread)
        if self._prepared.options.numerics == "equivalent":
            self.variant = self._lower_equivalent(first)
        else:
            self.variant = self._lower_variant(first)
        return self.variant.lowered

    def _lower_equivalent(self, first: FirstTrace) -> Variant:
        """Lowers the fastest variant of a function, see Note [Trials]."""
        if not takes_replacements(first.checked):
            return self._lower_variant(first)
        machine = find_machine(self._device)
        chosen = find_chosen(first, self._find_slot(first, UNTUNED), machine)
        if chosen is not None:
            self._progress.enter("check")
            self.finish_checks(first)
            self._replacements = chosen.replacements
            return self._lower_variant(chosen.first, is_checked=True, tuning=chosen.tuning)
        variant = self._lower_variant(first)
        # The device may have more that no graph holds.
        if not self._is_capturing or not takes_replacements(variant.lowered.checked):
            return variant
        self._progress.enter("compare", "replacements")
        lower = functools.partial(self._lower_variant, is_checked=True)
        variant, self._replacements = choose_variant(self._prepared, variant, lower)
        return variant

    def _lower_variant(
        self,
        first: FirstTrace,
        *,
        is_checked: bool = False,
        tuning: Tuning = UNTUNED,
        compiled: Sequence[CompiledRegion] = (),
    ) -> Variant:
        """Lowers a function, or one with ops replaced, which was checked before that."""
        finish = (
            first.rewritten.verify if is_checked else functools.partial(self.finish_checks, first)
        )
        slot = self._find_slot(first, tuning)
        cached = self._find_cached(first, slot, tuning)
        if cached is not None:
            self._progress.enter("check")
            finish()
            lowered = self._make_lowered(first.checked, cached.lowered)
            return Variant(first, lowered, tuning, slot, cached)
        preparations = list_preparations(self._device, self._prepared.options, first.checked.graph)
        if slot is not None:
            preparations.insert(0, Preparation("lower", slot.find_key))
        overlap = Overlap("check", finish, preparations)
        compiler = Compiler(self._device, self._progress, overlap, tuning=tuning, compiled=compiled)
        self._progress.enter("lower")
        try:
            checked, lowered = lower_checked(
                self._prepared, first, compiler, shares_arguments=self.shares_arguments
            )
        except Exception as error:
            # A difference between the two traces may be the reason: it is reported first.
            overlap.finish()
            translated = translate_compile_error(error, first.checked.graph)
            if translated is None:
                raise
            raise translated from error
        compiler.finish_overlap()
        if slot is not None:
            slot.note_miss()
        return Variant(first, self._make_lowered(checked, lowered), tuning, slot, None)

    def _make_lowered(self, checked: CheckedGraph, lowered: Lowered) -> LoweredCapture:
        return LoweredCapture(
            self._prepared, checked, lowered, self._device, self._pool, self._outer
        )

    def _find_slot(self, first: FirstTrace, tuning: Tuning) -> CacheSlot | None:
        graph = first.checked.graph
        return find_slot(
            self._prepared,
            graph,
            find_embedded(graph),
            self._device,
            shares_arguments=self.shares_arguments,
            tuning=tuning,
        )

    def _find_cached(
        self, first: FirstTrace, slot: CacheSlot | None, tuning: Tuning
    ) -> CachedLowering | None:
        """Returns the lowering that the kernel cache has, see Note [Kernel cache]."""
        if slot is None:
            return None
        self._progress.enter("lower", "kernel cache")
        compile_regions = functools.partial(
            compile_again,
            self._prepared.drop_values(),
            first,
            self._device,
            shares_arguments=self.shares_arguments,
            tuning=tuning,
        )
        return slot.find(self._device, compile_regions)

    def _lower_spread(
        self, first: FirstTrace, spread: Spread
    ) -> LoweredSpread | LoweredSpreadGraphs:
        overlap = Overlap("check", lambda: self.finish_checks(first))
        try:
            found = self._compile_spread(first, spread, overlap)
        except Exception as error:
            # A difference between the two traces may be the reason: it is reported first.
            overlap.finish()
            translated = translate_compile_error(error, first.checked.graph)
            if translated is None:
                raise
            raise translated from error
        overlap.finish()
        return found

    def _compile_spread(
        self, first: FirstTrace, spread: Spread, overlap: Overlap
    ) -> LoweredSpread | LoweredSpreadGraphs:
        prepared, device, progress = self._prepared, self._device, self._progress
        agree = agree_alone if self._agreement is None else self._agreement.confirm_program
        if not device.takes_kernels:
            program = compile_call(prepared, self._jaxpr, spread.devices, progress, overlap, agree)
            return LoweredSpread(prepared, first.checked, program, spread, device)
        lowering = lower_for_gpus(prepared, first, spread, device, progress, overlap, agree)
        return make_lowered(prepared, first, lowering, spread, device, self._pool)

    def finish_checks(self, first: FirstTrace) -> None:
        """Traces a second time, compares the two traces and verifies what the passes made."""
        finish_checks(self._prepared, first)

    # One of the stages that `run_to_lowered` returns; of several devices a `SpreadCall` or a
    # `SpreadGraph` comes back.
    def instantiate(self, lowered: Any) -> Any:
        """Allocates the arena and makes the graph executable."""
        self._progress.enter("instantiate")
        return lowered.instantiate()

    def verify(self, graph: CapturedGraph | SpreadCall) -> VerificationReport:
        """Compares the new graph with its reference."""
        if not self._prepared.options.verify:
            return VerificationReport(skipped="verify=False")
        self._progress.enter("verify")
        if isinstance(graph, SpreadCall):
            return verify_spread(self._prepared, graph)
        if isinstance(graph, SpreadGraph):
            return verify_spread_graph(self._prepared, graph)
        variant = self.variant
        if variant is not None and variant.cached is not None:
            return variant.cached.verification
        report = verify_capture(self._prepared, graph, self._device)
        if variant is not None and variant.slot is not None:
            variant.slot.add(graph.lowered, report)
        return report

    def compare(self, graph: CapturedGraph) -> tuple[JitComparison | None, JitCall | None]:
        """Times a graph with eager parts against `jax.jit`; returns what replaces one that lost."""
        if is_graph_needed(self._prepared, graph):
            return None, None
        self._progress.enter("compare", "with jax.jit")
        make_call = functools.partial(JitCall, self._prepared, self._jaxpr, graph)
        return compare_with_jit(self._prepared, graph, make_call)
