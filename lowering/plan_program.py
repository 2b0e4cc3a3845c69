"""Plan: steps of all regions → DeviceProgram and MemoryPlan, as wide as memory allows.

Note [Budgets]
What must be held is the most that is alive at one step, when the steps follow one another in XLA's
order. Steps are put side by side within `WIDE_BUDGET` of that. Where bytes rest, and where pieces
do not fit together, the plan takes more: it is accepted up to a limit, of what must be held, too.
Plans take a while, so the serial order gets one only where no wide order fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.assemble import RegionSteps, XlaRegion, assemble
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.detach_results import detach_results
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.merge_loops import merge_loops
from tracegraph.lowering.planning.drop_steps import drop_unread
from tracegraph.lowering.planning.forward_copies import forward_copies
from tracegraph.lowering.planning.lifetimes import Lifetime, find_lifetimes
from tracegraph.lowering.planning.memory_plan import MemoryPlan, find_least_bytes, plan_memory
from tracegraph.lowering.planning.reuse_arguments import reuse_arguments
from tracegraph.lowering.planning.split_temporaries import find_whole_peak
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.planning.widen import widen
from tracegraph.lowering.xla.program import AllocationKind
from tracegraph.runtime.definition.code_target import CompileKernel

# See Note [Budgets]: of what must be held, for levels; a smaller one, tried second; and the limits
# of plans in which bytes rest, and of others.
WIDE_BUDGET, TIGHT_BUDGET, ROOMY_LIMIT, WIDE_LIMIT = 1.02, 0.95, 1.035, 1.05
# The memory that another choice must save, as a share of what it takes.
WORTHWHILE = 1.02


@hold_collector
def plan_program(
    regions: Sequence[RegionSteps],
    order: Sequence[tuple[int, int]],
    frame: DeviceProgram,
    compile_kernel: CompileKernel | None = None,
) -> tuple[DeviceProgram, MemoryPlan]:
    """Returns the assembled program and its plan: as wide as about the same memory allows.

    Args:
        regions: in program order.
        order: pairs of region indices; the first must finish before the second.
        frame: what comes around the regions; see `assemble`.
        compile_kernel: of the device, to merge small kernels; None to leave them.

    Raises:
        CaptureError: the streams leave two steps that touch the same bytes unordered.
        UnsupportedError: kernels are to be merged, and there is no compiler for that.
    """
    serial, lifetimes = _order_serially(regions, order, frame, compile_kernel)
    # The levels replace the order of the streams.
    verify_order(serial)
    least_bytes = find_least_bytes(lifetimes)
    for budget in (WIDE_BUDGET, TIGHT_BUDGET):
        both = widen(serial, int(budget * least_bytes))
        for wide, limit in ((both.roomy, ROOMY_LIMIT), (both.dense, WIDE_LIMIT)):
            plan = _plan_within(wide, int(limit * least_bytes))
            if plan is not None:
                return wide, plan
    serial_plan = plan_memory(serial.name, lifetimes)
    whole = _keep_whole(regions, order, frame, compile_kernel, serial_plan)
    if whole is not None:
        serial, serial_plan = whole
    # Where the pieces of the serial order fit together no better, a wide order may take as much.
    wide = widen(serial, serial_plan.arena_bytes).dense
    plan = _plan_within(wide, serial_plan.arena_bytes)
    return (serial, serial_plan) if plan is None else (wide, plan)


def _order_serially(
    regions: Sequence[RegionSteps],
    order: Sequence[tuple[int, int]],
    frame: DeviceProgram,
    compile_kernel: CompileKernel | None,
) -> tuple[DeviceProgram, Sequence[Lifetime]]:
    """Returns the steps in XLA's order, with copies forwarded unless that takes more memory."""
    assembled = _merge(drop_unread(assemble(regions, order, into=frame)), compile_kernel)
    assembled = reuse_arguments(assembled)
    forwarded = forward_copies(assembled)
    split = detach_results(forwarded.program)
    lifetimes = find_lifetimes(split)
    if not forwarded.may_grow:
        return split, lifetimes
    apart = detach_results(assembled)
    apart_lifetimes = find_lifetimes(apart)
    if find_least_bytes(lifetimes) > WORTHWHILE * find_least_bytes(apart_lifetimes):
        return apart, apart_lifetimes
    return split, lifetimes


def _plan_within(program: DeviceProgram, limit_bytes: int) -> MemoryPlan | None:
    """Returns a plan of so many bytes at most, or None where there is none."""
    lifetimes = find_lifetimes(program)
    if find_least_bytes(lifetimes) > limit_bytes:
        return None
    plan = plan_memory(program.name, lifetimes, wanted_bytes=limit_bytes)
    return plan if plan.arena_bytes <= limit_bytes else None


def _keep_whole(
    regions: Sequence[RegionSteps],
    order: Sequence[tuple[int, int]],
    frame: DeviceProgram,
    compile_kernel: CompileKernel | None,
    plan: MemoryPlan,
) -> tuple[DeviceProgram, MemoryPlan] | None:
    """Returns the steps over XLA's own allocations, if these take less memory than a plan."""
    # Joined parts live longer, so what is alive at one step is never less than with them apart.
    if plan.arena_bytes <= WORTHWHILE * (plan.kept_bytes + _find_whole_peak(regions)):
        return None
    whole = _merge(assemble(regions, order, into=frame, is_whole=True), compile_kernel)
    whole = detach_results(whole)
    whole_plan = plan_memory(frame.name, find_lifetimes(whole))
    # In XLA's own packing a byte holds many values in turn: steps that share it follow one another.
    return (whole, whole_plan) if WORTHWHILE * whole_plan.arena_bytes < plan.arena_bytes else None


def _merge(program: DeviceProgram, compile_kernel: CompileKernel | None) -> DeviceProgram:
    return program if compile_kernel is None else merge_loops(program, compile_kernel)


def _find_whole_peak(regions: Sequence[RegionSteps]) -> int:
    """Returns the bytes that scratch takes at least where XLA's allocations stay whole."""
    peaks = [
        find_whole_peak(
            region.program.steps,
            {
                each.name
                for each in region.program.allocations
                if each.kind not in (AllocationKind.PARAMETER, AllocationKind.CONSTANT)
                and not each.is_host
            }.difference(region.program.outputs),
        )
        for region in regions
        if isinstance(region, XlaRegion)
    ]
    return max(peaks, default=0)
