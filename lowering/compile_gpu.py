"""Compile for a GPU: CaptureRequest → DeviceProgram of the kernels that XLA wrote, planned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.pack_elements import pack_elements
from tracegraph.lowering.planning.memory_plan import MemoryPlan
from tracegraph.lowering.region_steps import PointSteps, RegionSteps, XlaRegion
from tracegraph.lowering.request import BYTE, BufferSpec, CaptureRequest, Region
from tracegraph.lowering.tuning import join_options
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.late_import import import_late

if TYPE_CHECKING:
    from tracegraph.lowering.xla.program import XlaProgram

# Note [Late imports]: most of what lowering for a GPU imports, and needed only after XLA.
read_region: Callable[[Any, Region, Compiler], XlaProgram] = import_late(
    "tracegraph.lowering.read_region", "read_region"
)
plan_program: Callable[..., tuple[DeviceProgram, MemoryPlan]] = import_late(
    "tracegraph.lowering.plan_program", "plan_program"
)
legal_compile_options: Callable[[], frozenset[str]] = import_late(
    "tracegraph.lowering.xla.schema", "legal_compile_options"
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
        return found.executable, read_region(found.executable, region, compiler), found.options
    wanted = (*FIRST_OPTIONS, *compiler.tuning.list_options())
    compile_with = functools.partial(
        compiler.compile, region, in_place, count=count, keep_known=keep_legal
    )
    executable: Any = compile_with(options=wanted)
    # The schema is needed from here on.
    first = keep_legal(wanted)
    try:
        return executable, read_region(executable, region, compiler), first
    except UnsupportedError as refusal:
        plain = find_plain(refusal)
        if not plain:
            raise
    options = join_options(first, plain)
    executable = compile_with(options=options)
    return executable, read_region(executable, region, compiler), options


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


def _rename(region: Region, renamed: dict[str, BufferSpec]) -> Region:
    return dataclasses.replace(
        region,
        inputs=tuple(renamed.get(spec.name, spec) for spec in region.inputs),
        outputs=tuple(renamed.get(spec.name, spec) for spec in region.outputs),
    )
