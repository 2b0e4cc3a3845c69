"""Compile for a GPU: CaptureRequest → DeviceProgram of the kernels that XLA wrote, planned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracegraph.lowering.assemble import BYTE, PointSteps, RegionSteps, XlaRegion, assemble
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.compile import (
    arrange_in_place,
    declared_edges,
    find_before,
    frame_program,
    give_inputs,
    make_call,
    place_donated_results,
)
from tracegraph.lowering.compiled_region import CompiledRegion, record_region
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.cut_collectives import cut_collectives
from tracegraph.lowering.detach_results import detach_results
from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.limit_workspaces import limit_workspaces
from tracegraph.lowering.merge_loops import merge_loops
from tracegraph.lowering.own_kernels import compile_own_kernels
from tracegraph.lowering.pack_elements import pack_elements
from tracegraph.lowering.planning.drop_steps import drop_unread
from tracegraph.lowering.planning.forward_copies import forward_copies
from tracegraph.lowering.planning.lent_inputs import SMALLEST_BYTES
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import (
    MemoryPlan,
    align,
    find_least_bytes,
    plan_memory,
)
from tracegraph.lowering.planning.split_temporaries import find_whole_peak
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.planning.widen import widen
from tracegraph.lowering.request import BufferSpec, CaptureRequest, Region
from tracegraph.lowering.tuning import join_options
from tracegraph.lowering.xla.program import AllocationKind, XlaProgram
from tracegraph.lowering.xla.schema import legal_compile_options
from tracegraph.runtime.code_target import CompileKernel
from tracegraph.runtime.environment import read_cublas_workspace_bytes
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.event_nodes import EventNode
from tracegraph.runtime.graph import ArenaSize
from tracegraph.runtime.late_import import import_late
from tracegraph.runtime.nodes import BufferUse

if TYPE_CHECKING:
    from tracegraph.lowering.xla.origins import Origins

# Note [Late imports]: half of what lowering for a GPU imports, and needed only after XLA.
read_program: Callable[..., XlaProgram] = import_late(
    "tracegraph.lowering.xla.decode", "read_program"
)
read_origins: Callable[[Any], Origins] = import_late(
    "tracegraph.lowering.xla.decode", "read_origins"
)

# By a word of the refusal: the options that make XLA write plain kernels instead.
PLAIN_KERNELS: tuple[tuple[str, tuple[str, bool | str]], ...] = (
    ("ext.cub_sort", ("xla_gpu_enable_cub_radix_sort", False)),
    ("in_process_symbol", ("xla_disable_hlo_passes", "topk-specializer")),
    ("kernels of RAFT", ("xla_disable_hlo_passes", "topk-specializer")),
    ("layer norm of cuDNN", ("xla_gpu_enable_cudnn_layer_norm", False)),
    ("before it went over to cublasLt", ("xla_gpu_enable_cublaslt", True)),
)

# XLA's options of every first compilation, over its defaults. XLA, too, would start kernels early
# that load ahead of their wait, see Note [Loads ahead of the wait]: the reference must not.
# Copies that a look at whole regions finds needless are left out: `benchmarks/copy_analysis.py`
# found 2 and 5 % less time for GPT steps of 2 and 12 layers on an H200. What a `scan` stacks is not
# filled with zeros ahead of it, where XLA proves that the loop writes all of it.
FIRST_OPTIONS: tuple[tuple[str, bool | str], ...] = (
    ("xla_gpu_enable_pdl_launch", False),
    ("xla_gpu_copy_insertion_use_region_analysis", True),
    ("xla_gpu_enable_dus_accumulator_zero_init_elimination", True),
)

# How much memory steps side by side may take. They are put side by side within a budget, of what
# steps one after another take; pieces that do not fit together may add to that, and so may bytes
# that rest. Where that is more than the limit, of what must be held, a smaller budget is tried.
WIDE_BUDGET, ROOMY_BUDGET, TIGHT_BUDGET, WIDE_LIMIT = 1.02, 1.03, 0.95, 1.05


@dataclasses.dataclass(frozen=True)
class CompiledForGpu:
    """A request as kernels over planned buffers.

    Attributes:
        program: the steps of all regions.
        plan: the places of its buffers.
        regions: what the steps were made from.
    """

    program: DeviceProgram
    plan: MemoryPlan
    regions: tuple[CompiledRegion, ...]


def compile_for_gpu(request: CaptureRequest, compiler: Compiler) -> CompiledForGpu:
    """Compiles every captured region, reads the kernels that XLA wrote, and plans their memory.

    Args:
        request: what to capture.
        compiler: for the GPU.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile a region.
        UnsupportedError: XLA's program for a region holds steps that this version cannot lower;
            what the other regions hold is added to it.
    """
    request = pack_elements(request)
    renamed, copies = place_donated_results(request)
    frame = frame_program(request, renamed, copies)
    # XLA's constants are added to it; mostly they fit into what sizes are rounded to.
    compiler.target.prepare_arena(ArenaSize(_count_kept(frame), 0))
    compiled: list[CompiledRegion] = []
    pieces: list[RegionSteps] = []
    refusals: list[UnsupportedError] = []
    for index, region in enumerate(request.regions):
        if region.point is not None:
            pieces.append(_place_point(index, request.regions, renamed))
            continue
        arranged, count = arrange_in_place(region, request.regions, renamed, is_shared=True)
        if not region.place.is_captured:
            function = compiler.compile(arranged)
            compiled.append(record_region(arranged, function))
            pieces.append(make_call(arranged, function, renamed))
            continue
        try:
            executable, program, options = _compile_to_kernels(
                arranged, compiler, in_place=count, count=len(request.regions)
            )
        except UnsupportedError as error:
            if not error.refused:
                raise
            refusals.append(error)
            continue
        record = record_region(arranged, executable, count, options)
        compiled.append(dataclasses.replace(record, float_atomics=program.float_atomics))
        behind = _find_points(index, request.regions)
        pieces.append(XlaRegion(_rename(arranged, renamed), program, count, behind))
    if refusals:
        raise _make_joined_error(refusals)
    compile_kernel = compiler.target.compile_kernel if compiler.tuning.merges else None
    program, plan = plan_program(pieces, declared_edges(request.regions), frame, compile_kernel)
    return CompiledForGpu(program, plan, tuple(compiled))


def _place_point(
    index: int, regions: Sequence[Region], renamed: dict[str, BufferSpec]
) -> PointSteps:
    region = _rename(give_inputs(index, regions), renamed)
    point = region.point
    assert point is not None
    own = _name_point(region)
    reads = [BufferUse(spec.name, 0, spec.nbytes) for spec in region.inputs]
    step = DeviceStep(
        EventNode(region.name, point.event, point.is_wait),
        (*dict.fromkeys(reads), *_find_points(index, regions)),
        (own,),
        region.place.stream,
    )
    return PointSteps(step, BufferSpec(own.buffer, (own.nbytes,), BYTE))


def _find_points(index: int, regions: Sequence[Region]) -> tuple[BufferUse, ...]:
    """Returns the bytes of the points that a region comes after."""
    if not any(region.point for region in regions):
        return ()
    return tuple(_name_point(each) for each in find_before(index, regions) if each.point)


def _name_point(region: Region) -> BufferUse:
    return BufferUse(f"{region.name}.order", 0, 1)


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
    serial, serial_plan = plan_smallest(regions, order, frame, compile_kernel)
    # The levels replace the order of the streams.
    verify_order(serial)
    roomy_bytes = int(ROOMY_BUDGET * serial_plan.arena_bytes)
    most_bytes = max(serial_plan.arena_bytes, int(WIDE_LIMIT * serial_plan.peak_bytes))
    for budget in (WIDE_BUDGET, TIGHT_BUDGET):
        both = widen(serial, int(budget * serial_plan.arena_bytes))
        for wide, limit_bytes in ((both.roomy, roomy_bytes), (both.dense, most_bytes)):
            wide_plan = _plan_within(wide, limit_bytes)
            if wide_plan is not None:
                return wide, wide_plan
    return serial, serial_plan


def _plan_within(program: DeviceProgram, limit_bytes: int) -> MemoryPlan | None:
    """Returns a plan of so many bytes at most, or None where there is none."""
    lifetimes = find_lifetimes(program)
    # A plan takes a while: it is made only where it could fit.
    if find_least_bytes(lifetimes) > limit_bytes:
        return None
    plan = plan_memory(program.name, lifetimes)
    return plan if plan.arena_bytes <= limit_bytes else None


def plan_smallest(
    regions: Sequence[RegionSteps],
    order: Sequence[tuple[int, int]],
    frame: DeviceProgram,
    compile_kernel: CompileKernel | None = None,
) -> tuple[DeviceProgram, MemoryPlan]:
    """Returns the assembled program and its plan, with temporaries split unless XLA packs better.

    Args:
        regions: in program order.
        order: pairs of region indices; the first must finish before the second.
        frame: what comes around the regions; see `assemble`.
        compile_kernel: as for `plan_program`.
    """
    assembled = drop_unread(assemble(regions, order, into=frame))
    assembled = _merge(assembled, compile_kernel)
    forwarded = forward_copies(assembled)
    split = detach_results(forwarded)
    split_plan = plan_memory(frame.name, find_lifetimes(split))
    # A plan takes a while: it is made only where it could win, by what it cannot go below.
    if forwarded is not assembled:
        apart = detach_results(assembled)
        lifetimes = find_lifetimes(apart)
        if split_plan.arena_bytes > WIDE_BUDGET * find_least_bytes(lifetimes):
            apart_plan = plan_memory(frame.name, lifetimes)
            if split_plan.arena_bytes > WIDE_BUDGET * apart_plan.arena_bytes:
                split, split_plan = apart, apart_plan
    # Joined parts live longer, so what is alive at one step is never less than with them apart.
    if split_plan.arena_bytes <= split_plan.peak_bytes:
        return split, split_plan
    if split_plan.arena_bytes <= split_plan.kept_bytes + _find_whole_peak(regions):
        return split, split_plan
    whole = _merge(assemble(regions, order, into=frame, is_whole=True), compile_kernel)
    whole = detach_results(whole)
    whole_plan = plan_memory(frame.name, find_lifetimes(whole))
    # In XLA's own packing a byte holds many values in turn: steps that share it follow one another.
    if WIDE_BUDGET * whole_plan.arena_bytes < split_plan.arena_bytes:
        return whole, whole_plan
    return split, split_plan


def _merge(program: DeviceProgram, compile_kernel: CompileKernel | None) -> DeviceProgram:
    return program if compile_kernel is None else merge_loops(program, compile_kernel)


def _count_kept(frame: DeviceProgram) -> int:
    """Returns the bytes of inputs and results in an arena."""
    specs = {spec.buffer.name: spec.buffer for spec in (*frame.inputs, *frame.outputs)}
    # Most of these will be lent.
    for spec in frame.inputs:
        if spec.may_be_lent and spec.buffer.nbytes >= SMALLEST_BYTES:
            specs.pop(spec.buffer.name)
    return sum(align(spec.nbytes) for spec in specs.values())


def _find_whole_peak(regions: Sequence[RegionSteps]) -> int:
    """Returns the bytes that scratch takes at least where XLA's allocations stay whole."""
    peaks = [
        find_whole_peak(
            region.program.steps,
            {
                each.name
                for each in region.program.allocations
                if each.kind not in (AllocationKind.PARAMETER, AllocationKind.CONSTANT)
            }.difference(region.program.outputs),
        )
        for region in regions
        if isinstance(region, XlaRegion)
    ]
    return max(peaks, default=0)


def _compile_to_kernels(
    region: Region, compiler: Compiler, *, in_place: int, count: int
) -> tuple[Any, XlaProgram, tuple[tuple[str, bool | str], ...]]:
    """Returns the executable, its steps, and the options that it took.

    XLA's defaults first: a sort by the handler that XLA chose is faster than one of plain kernels.
    Where no graph can hold what it calls, which holds for the handlers inside of XLA, and
    there are plain kernels for the same, it compiles once more.
    """
    found = compiler.find_compiled(region)
    if found is not None:
        return found.executable, _read(found.executable, region, compiler), found.options
    wanted = (*FIRST_OPTIONS, *compiler.tuning.list_options())
    compile_with = functools.partial(
        compiler.compile, region, in_place, count=count, keep_known=keep_legal
    )
    executable: Any = compile_with(options=wanted)
    # The schema is needed from here on.
    first = keep_legal(wanted)
    try:
        return executable, _read(executable, region, compiler), first
    except UnsupportedError as refusal:
        plain = find_plain(refusal)
        if not plain:
            raise
    options = join_options(first, plain)
    executable = compile_with(options=options)
    return executable, _read(executable, region, compiler), options


def find_plain(refusal: UnsupportedError) -> tuple[tuple[str, bool | str], ...]:
    """Returns the options for plain kernels in place of what was refused; empty without any."""
    reasons = "; ".join(work.reason for work in refusal.refused)
    return keep_legal([option for word, option in PLAIN_KERNELS if word in reasons])


def keep_legal(
    options: Sequence[tuple[str, bool | str]],
) -> tuple[tuple[str, bool | str], ...]:
    """Returns the options that this plugin knows; without any, its schema is not loaded."""
    return tuple(option for option in options if option[0] in legal_compile_options())


def _make_joined_error(errors: Sequence[UnsupportedError]) -> UnsupportedError:
    """Returns the first error, with what the others say of their regions."""
    first, *others = errors
    for other in others:
        first.add_note(str(other))
        first.refused += other.refused
    return first


@hold_collector
def _read(executable: Any, region: Region, compiler: Compiler) -> XlaProgram:
    program = read_program(
        executable.runtime_executable().serialize(),
        name=region.name,
        check_call=compiler.target.find_call_problem,
        plan_call=compiler.target.plan_library_call,
        reads_loops=compiler.tuning.merges,
        partitions=len(compiler.owners),
        has_choices=compiler.target.target.has_choices,
    )
    program = limit_workspaces(
        program, compiler.target.find_workspace_bytes, read_cublas_workspace_bytes()
    )
    program = cut_collectives(
        program, compiler.owners, region.name, lambda name: read_origins(executable).locate(name)
    )
    compile_kernel = compiler.target.compile_kernel
    if compile_kernel is None:
        return program
    steps = compile_own_kernels(program.steps, compile_kernel)
    return dataclasses.replace(program, steps=steps)


def _rename(region: Region, renamed: dict[str, BufferSpec]) -> Region:
    return dataclasses.replace(
        region,
        inputs=tuple(renamed.get(spec.name, spec) for spec in region.inputs),
        outputs=tuple(renamed.get(spec.name, spec) for spec in region.outputs),
    )
