"""Assemble: the programs that XLA wrote for the regions → one DeviceProgram over our buffers.

Each of XLA's allocations becomes one of our buffers: a parameter the region's input, a constant a
buffer with content, what a result starts in the result's buffer, everything else temporaries. A
result that cannot lie where XLA puts it (two results in one place, or one in a parameter or in a
constant) is copied by a step of its own after the region.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tracegraph.lowering.byte_ranges import check_ranges
from tracegraph.lowering.device_program import (
    ConditionalStep,
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    GraphStep,
    Step,
    list_device_steps,
)
from tracegraph.lowering.planning.byte_map import ByteMap
from tracegraph.lowering.planning.first_reads import find_first_reads
from tracegraph.lowering.planning.split_temporaries import Part, Split, split_allocations
from tracegraph.lowering.region_steps import PointSteps, RegionSteps, XlaRegion
from tracegraph.lowering.request import BYTE, BufferSpec, Region
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode
from tracegraph.runtime.errors import InternalError, UnsupportedError


def assemble(
    regions: Sequence[RegionSteps],
    order: Iterable[tuple[int, int]],
    *,
    into: DeviceProgram,
    is_whole: bool = False,
) -> DeviceProgram:
    """Returns one program with the steps of all regions.

    Args:
        regions: in program order; an eager region is a call.
        order: pairs of region indices; the first must finish before the second.
        into: name, buffers, inputs and outputs of the program, and in ``steps`` what comes after
            all regions.
        is_whole: True to keep each of XLA's allocations in one buffer; see `split_allocations`.

    Raises:
        UnsupportedError: an argument or a result takes other bytes on the device than its dtype,
            or XLA's program reaches beyond a buffer.
        InternalError: XLA's program contradicts itself.
    """
    buffers = list(into.buffers)
    steps: list[Step] = []
    edges: list[tuple[int, int]] = []
    ends: list[set[int]] = []
    waits: list[set[int]] = [set() for _ in regions]
    for first, second in order:
        waits[second].add(first)
    for index, region in enumerate(regions):
        first = len(steps)
        if isinstance(region, ExecutableCall):
            steps.append(region)
        elif isinstance(region, PointSteps):
            buffers.append(region.buffer)
            steps.append(region.step)
        else:
            more_buffers, more_steps = _place_region(region, is_whole)
            buffers += more_buffers
            steps += more_steps
        before = {end for wait in waits[index] for end in ends[wait]}
        if len(steps) == first:
            # A region without steps passes its waits on.
            ends.append(before)
            continue
        edges += [(end, first) for end in before]
        edges += [(step, step + 1) for step in range(first, len(steps) - 1)]
        ends.append({len(steps) - 1})
    # The chain of a region orders all its steps before what waits for its last one.
    finals = {end for group in ends for end in group}
    for step in into.steps:
        edges += [(end, len(steps)) for end in finals]
        steps.append(step)
    return dataclasses.replace(
        into, buffers=tuple(buffers), steps=tuple(steps), edges=tuple(sorted(set(edges)))
    )


def _place_region(compiled: XlaRegion, is_whole: bool) -> tuple[list[BufferSpec], list[Step]]:
    """Returns the buffers that the region adds, and its steps over our buffers."""
    region, program = compiled.region, compiled.program
    _verify_program(compiled)
    fixed, whole = _name_fixed(region, program)
    loose = {allocation.name for allocation in program.allocations} - fixed.keys()
    results = [
        BufferUse(name, 0, spec.nbytes)
        for name, spec in zip(program.outputs, region.outputs, strict=True)
    ]
    xla_steps = find_first_reads(program.steps, results)
    split = split_allocations(xla_steps, loose, results, is_whole=is_whole)
    part_names, temporaries = _name_parts(region, results, split)
    added = [*whole, *temporaries]
    if any(_has_empty(step) for step in xla_steps):
        added.append(BufferSpec(_name_empty(region), (0,), BYTE))
    steps = [
        _move_step(step, fixed, part_names, split, index, region)
        for index, step in enumerate(xla_steps)
    ]
    copies = _copy_results(region, results, fixed, part_names, split)
    inputs = {spec.name for spec in region.inputs}
    own = [*temporaries, *(spec for spec in region.outputs if spec.name not in inputs)]
    fills = _fill_undefined(own, [*steps, *copies], region)
    placed = [*fills, *steps, *copies]
    return added, [_put_behind(step, compiled.behind) for step in placed]


def _put_behind(step: Step, behind: tuple[BufferUse, ...]) -> Step:
    """Returns the step with the bytes of points among what it reads."""
    if not behind:
        return step
    if isinstance(step, Copy):
        node = CopyNode(step.name, step.source, step.target)
        return DeviceStep(node, (*step.reads, *behind), step.writes, step.stream)
    if isinstance(step, ConditionalStep):
        return dataclasses.replace(step, first_reads=(*step.reads, *behind))
    assert isinstance(step, DeviceStep)
    return dataclasses.replace(step, reads=(*step.reads, *behind))


def _name_fixed(region: Region, program: XlaProgram) -> tuple[dict[str, str], list[BufferSpec]]:
    """Returns our buffer for each allocation that stays whole, and those that are not inputs."""
    fixed: dict[str, str] = {}
    added: list[BufferSpec] = []
    for allocation in program.allocations:
        if allocation.kind is AllocationKind.PARAMETER and allocation.parameter is not None:
            fixed[allocation.name] = region.inputs[allocation.parameter].name
        if allocation.kind is AllocationKind.CONSTANT:
            name = f"{region.name}.constant.{len(added)}"
            fixed[allocation.name] = name
            added.append(BufferSpec(name, (allocation.nbytes,), BYTE, content=allocation.content))
        if allocation.is_host and allocation.kind is AllocationKind.TEMPORARY:
            name = f"{region.name}.host.{len(added)}"
            fixed[allocation.name] = name
            added.append(BufferSpec(name, (allocation.nbytes,), BYTE, is_host=True))
    return fixed, added


def _name_parts(
    region: Region, results: Sequence[BufferUse], split: Split
) -> tuple[list[str], list[BufferSpec]]:
    """Returns our buffer for each part, and the temporaries.

    A part is a result's own buffer when the result fills it and no input lives there.
    """
    inputs = {spec.name for spec in region.inputs}
    names: dict[int, str] = {}
    for spec, result in zip(region.outputs, results, strict=True):
        index = split.results.get(result)
        if index is None or index in names or spec.name in inputs:
            continue
        if split.parts[index] == Part(result.buffer, 0, spec.nbytes):
            names[index] = spec.name
    temporaries: list[BufferSpec] = []
    for index, part in enumerate(split.parts):
        if index not in names:
            names[index] = f"{region.name}.temp.{len(temporaries)}"
            temporaries.append(BufferSpec(names[index], (part.nbytes,), BYTE))
    return [names[index] for index in range(len(split.parts))], temporaries


def _move_step(
    step: GraphStep,
    fixed: Mapping[str, str],
    part_names: Sequence[str],
    split: Split,
    index: int,
    region: Region,
) -> GraphStep:
    part_of = split.steps[index]

    def relocate(use: BufferUse) -> BufferUse:
        if use.buffer in fixed:
            return BufferUse(fixed[use.buffer], use.offset, use.nbytes)
        if not use.nbytes:
            return BufferUse(_name_empty(region), 0, 0)
        part = part_of.get(use)
        if part is None:
            raise _make_assembly_error(
                f"`{step.name}` neither reads nor writes {use}, which its node uses", region
            )
        return BufferUse(part_names[part], use.offset - split.parts[part].offset, use.nbytes)

    found = step.move(relocate)
    stream = region.place.stream
    return found if found.stream == stream else dataclasses.replace(found, stream=stream)


def _name_empty(region: Region) -> str:
    """Returns the buffer for ranges of no bytes: they need an address too."""
    return f"{region.name}.empty"


def _has_empty(step: GraphStep) -> bool:
    return not all(use.nbytes for use in step.ranges)


def _copy_results(
    region: Region,
    results: Sequence[BufferUse],
    fixed: Mapping[str, str],
    part_names: Sequence[str],
    split: Split,
) -> list[Copy]:
    """Returns a copy for every result that XLA leaves elsewhere than in its own buffer."""
    copies: list[Copy] = []
    for spec, result in zip(region.outputs, results, strict=True):
        if not spec.nbytes:
            continue
        if result.buffer in fixed:
            source = BufferUse(fixed[result.buffer], 0, spec.nbytes)
        else:
            part = split.results[result]
            source = BufferUse(part_names[part], -split.parts[part].offset, spec.nbytes)
        target = BufferUse(spec.name, 0, spec.nbytes)
        if source != target:
            copies.append(Copy(f"copy_{spec.name}", source, target, region.place.stream))
    # What is copied out of an input must be read before that input gets its new value.
    inputs = {spec.name for spec in region.inputs}
    copies.sort(key=lambda copy: copy.source.buffer not in inputs)
    written: set[str] = set()
    for copy in copies:
        if copy.source.buffer in written:
            raise _make_assembly_error(f"results are copied in a circle at `{copy.name}`", region)
        written.add(copy.target.buffer)
    return copies


def _fill_undefined(
    buffers: Sequence[BufferSpec], steps: Sequence[Step], region: Region
) -> list[Step]:
    """Returns steps that set to zero what XLA leaves undefined, as `jnp.empty` does."""
    whole = {spec.name: BufferUse(spec.name, 0, spec.nbytes) for spec in buffers if spec.nbytes}
    # Of the buffers that are not written as a whole.
    written = {name: ByteMap(False) for name in whole}
    undefined: set[str] = set()
    for step in steps:
        for use in step.writes:
            if use.buffer not in written:
                continue
            if use == whole[use.buffer]:
                del written[use.buffer]
            else:
                written[use.buffer].replace(use.offset, use.offset + use.nbytes, True)
        # What a step both reads and writes may be written only: XLA does not always tell.
        for use in step.reads:
            held = written.get(use.buffer)
            if held is not None and not all(held.read(use.offset, use.offset + use.nbytes)):
                undefined.add(use.buffer)
    undefined |= {
        name for name, held in written.items() if not any(held.read(0, whole[name].nbytes))
    }
    return [
        DeviceStep(FillNode(f"empty_{name}", use), (), (use,), region.place.stream)
        for name, use in whole.items()
        if name in undefined
    ]


def _verify_program(compiled: XlaRegion) -> None:
    """Checks that parameters, results and byte ranges are those of the region."""
    region, program = compiled.region, compiled.program
    allocations = {allocation.name: allocation for allocation in program.allocations}
    if len(program.outputs) != len(region.outputs):
        raise _make_assembly_error(
            f"XLA's program has {len(program.outputs)} results, not {len(region.outputs)}", region
        )
    numbers = [each.parameter for each in program.allocations if each.parameter is not None]
    if any(not 0 <= number < len(region.inputs) for number in numbers):
        raise _make_assembly_error(
            f"XLA's program has parameters {sorted(numbers)} of {len(region.inputs)}", region
        )
    unknown = {use.buffer for step in program.steps for use in step.ranges}
    unknown = (unknown | {*program.outputs}) - allocations.keys()
    if unknown:
        raise _make_assembly_error(
            f"unknown allocations are used: {', '.join(sorted(unknown))}", region
        )
    for spec, allocation in _pair_specs(region, program, allocations):
        if allocation.nbytes < spec.nbytes:
            raise _make_packed_error(spec, allocation, region)
    check_ranges(region, program)
    fixed, whole = _name_fixed(region, program)
    written = {spec.name for spec in region.inputs[: compiled.in_place]}
    written |= {spec.name for spec in whole if spec.is_host}
    for step in list_device_steps(program.steps):
        for use in step.writes:
            if use.nbytes and use.buffer in fixed and fixed[use.buffer] not in written:
                raise _make_assembly_error(
                    f"`{step.name}` writes `{fixed[use.buffer]}`, which is not donated", region
                )


def _pair_specs(
    region: Region, program: XlaProgram, allocations: Mapping[str, Allocation]
) -> list[tuple[BufferSpec, Allocation]]:
    parameters = [a for a in program.allocations if a.kind is AllocationKind.PARAMETER]
    pairs = [(region.inputs[a.parameter], a) for a in parameters if a.parameter is not None]
    outputs = [allocations[name] for name in program.outputs]
    return [*pairs, *zip(region.outputs, outputs, strict=True)]


def _make_packed_error(
    spec: BufferSpec, allocation: Allocation, region: Region
) -> UnsupportedError:
    return UnsupportedError(
        f"`{spec.name}` takes {spec.nbytes} bytes as {spec.dtype.name}{list(spec.shape)}, but "
        f"{allocation.nbytes} on the device",
        where=f"argument or result of `{region.name}`",
        why="values of less than a byte are packed there, and a graph copies whole bytes",
        fix="convert to a dtype of whole bytes outside of the captured function",
        anchor="unsupported",
    )


def _make_assembly_error(what: str, region: Region) -> InternalError:
    return InternalError(
        what,
        where=f"assembly of `{region.name}`",
        why="every byte that a step touches must have an offset in the arena",
    )
