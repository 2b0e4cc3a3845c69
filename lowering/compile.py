"""Compile: CaptureRequest → DeviceProgram. XLA compiles each region; results get their buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from tracegraph.lowering.compiled_region import CompiledRegion, record_region
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.device_program import (
    BufferUse,
    Copy,
    DeviceProgram,
    ExecutableCall,
    Step,
)
from tracegraph.lowering.planning.step_order import find_ancestors
from tracegraph.lowering.request import BufferSpec, CaptureRequest, OutputSpec, Region, Role
from tracegraph.runtime.definition.event_nodes import HostEvent


def compile_request(
    request: CaptureRequest, compiler: Compiler
) -> tuple[DeviceProgram, tuple[CompiledRegion, ...]]:
    """Compiles every captured region and places donated results in their inputs' buffers.

    Args:
        request: what to capture.
        compiler: for the device. Where that gives XLA memory that it may overwrite, a region that
            computes the new value of a donated input gets the old one donated.

    Returns:
        The steps in program order, with the order that the streams declare, and the regions that
        the steps call.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile a region.
    """
    renamed, copies = place_donated_results(request)
    calls: list[Step] = []
    compiled: list[CompiledRegion] = []
    for index, region in enumerate(request.regions):
        if region.point is not None:
            host_event = HostEvent(region.point.event, region.point.is_wait)
            calls.append(make_call(give_inputs(index, request.regions), host_event, renamed))
            continue
        arranged, count = arrange_in_place(region, request.regions, renamed)
        donated = count if compiler.target.updates_in_place else 0
        executable = compiler.compile(arranged, donated, count=len(request.regions))
        calls.append(make_call(arranged, executable, renamed, in_place=donated))
        compiled.append(record_region(arranged, executable, donated))
    frame = frame_program(request, renamed, copies)
    edges = list(declared_edges(request.regions))
    # A copy into a donated input comes after everything that may still read the old value.
    for position in range(len(frame.steps)):
        edges += [(index, len(calls) + position) for index in range(len(calls))]
    program = dataclasses.replace(frame, steps=(*calls, *frame.steps), edges=tuple(edges))
    return program, tuple(compiled)


def frame_program(
    request: CaptureRequest,
    renamed: dict[str, BufferSpec],
    copies: Sequence[tuple[BufferSpec, BufferSpec]],
) -> DeviceProgram:
    """Returns a program without the steps of the regions: buffers, inputs, outputs, last copies.

    Args:
        request: what to capture.
        renamed: as `place_donated_results` returns them.
        copies: the same.
    """
    targets = {spec.buffer.name: spec.buffer for spec in request.inputs}
    return DeviceProgram(
        name=request.name,
        buffers=_collect_buffers(request, renamed),
        steps=tuple(
            Copy(f"update_{target.name}", _use(source), _use(target)) for source, target in copies
        ),
        edges=(),
        inputs=request.inputs,
        outputs=tuple(_place_output(output, targets) for output in request.outputs),
    )


def declared_edges(regions: Sequence[Region]) -> tuple[tuple[int, int], ...]:
    """Returns the order that streams and waits declare, as pairs of region indices.

    A region comes after the previous region on its stream and after every region that it waits for.
    """
    index_of = {region.name: index for index, region in enumerate(regions)}
    last_on_stream: dict[int, int] = {}
    edges = []
    for index, region in enumerate(regions):
        if region.place.stream in last_on_stream:
            edges.append((last_on_stream[region.place.stream], index))
        edges += [(index_of[name], index) for name in region.place.waits]
        last_on_stream[region.place.stream] = index
    return tuple(sorted(set(edges)))


def give_inputs(index: int, regions: Sequence[Region]) -> Region:
    """Returns a point that reads what the regions before it define, so that it comes after them.

    Args:
        index: of the point.
        regions: all regions of the request.
    """
    before = find_before(index, regions)
    outputs = tuple(spec for region in before for spec in region.outputs)
    return dataclasses.replace(regions[index], inputs=outputs)


def find_before(index: int, regions: Sequence[Region]) -> list[Region]:
    """Returns the regions that a region is declared to come after, points among them."""
    ancestors = find_ancestors(len(regions), declared_edges(regions))[index]
    return [region for other, region in enumerate(regions) if ancestors >> other & 1]


def place_donated_results(
    request: CaptureRequest,
) -> tuple[dict[str, BufferSpec], list[tuple[BufferSpec, BufferSpec]]]:
    """Decides where each result that updates a donated input is written.

    The region that computes it writes straight into the input's buffer when nothing can read the
    old value afterwards and no eager region, which may raise, comes later; else the result has a
    buffer of its own and is copied at the very end.

    Returns:
        New buffers by the name of the result that they replace, and the copies (source, target).
    """
    donated = {s.buffer.name: s.buffer for s in request.inputs if s.role is Role.DONATED}
    regions = request.regions
    ancestors = find_ancestors(len(regions), declared_edges(regions))
    reads = [{spec.name for spec in region.inputs} for region in regions]
    # The first of several counts, so the others are put in before it.
    writers = {s.name: index for index, r in reversed([*enumerate(regions)]) for s in r.outputs}
    renamed: dict[str, BufferSpec] = {}
    copies: list[tuple[BufferSpec, BufferSpec]] = []
    for output in request.outputs:
        if output.alias is None or output.alias == output.buffer.name:
            continue
        target, result = donated[output.alias], output.buffer
        if _is_last_use(regions, reads, ancestors, writers[result.name], target):
            renamed[result.name] = target
        else:
            copies.append((result, target))
    return renamed, copies


def _is_last_use(
    regions: Sequence[Region],
    reads: Sequence[Set[str]],
    ancestors: Sequence[int],
    writer: int,
    target: BufferSpec,
) -> bool:
    """True when every reader of the old value is the writer itself or finishes before it."""
    for index, region in enumerate(regions):
        if index > writer and not region.place.is_captured:
            return False
        if target.name in reads[index] and index != writer and not ancestors[writer] >> index & 1:
            return False
    return True


def arrange_in_place(
    region: Region,
    regions: Sequence[Region],
    renamed: dict[str, BufferSpec],
    *,
    is_shared: bool = False,
) -> tuple[Region, int]:
    """Puts the inputs that a region updates in place first, and their new values, in one order.

    Equal order makes JAX pair each donated parameter with its own result.

    Args:
        region: the region to arrange.
        regions: all regions of the request.
        renamed: as `place_donated_results` returns them.
        is_shared: True when an input that other regions read may be updated in place, too: they
            all read it before. A device that may keep the old value elsewhere cannot do so.

    Returns:
        The region with inputs and outputs in their new order, and how many are updated in place.
    """
    others: set[str] = set()
    if not is_shared:
        others = {spec.name for other in regions if other is not region for spec in other.inputs}
    index_of = {spec.name: index for index, spec in enumerate(region.inputs)}
    pairs = [
        (index_of[renamed[spec.name].name], index)
        for index, spec in enumerate(region.outputs)
        if spec.name in renamed
        and renamed[spec.name].name in index_of
        and renamed[spec.name].name not in others
    ]
    if not pairs or not region.place.is_captured:
        return region, 0
    inputs = _move_first([i for i, _ in pairs], len(region.inputs))
    outputs = _move_first([o for _, o in pairs], len(region.outputs))

    @functools.wraps(region.function)
    def run(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(inputs, arrays, strict=True))
        results = region.function(*[given[index] for index in range(len(inputs))])
        return tuple(results[index] for index in outputs)

    arranged = dataclasses.replace(
        region,
        function=run,
        inputs=tuple(region.inputs[index] for index in inputs),
        outputs=tuple(region.outputs[index] for index in outputs),
    )
    return arranged, len(pairs)


def _move_first(first: Sequence[int], count: int) -> list[int]:
    rest = sorted(set(range(count)) - set(first))
    return [*first, *rest]


def make_call(
    region: Region, executable: Any, renamed: dict[str, BufferSpec], *, in_place: int = 0
) -> ExecutableCall:
    """Returns the step that calls a region with the buffers that hold its inputs and results."""
    return ExecutableCall(
        name=region.name,
        executable=executable,
        reads=tuple(_use(renamed.get(spec.name, spec)) for spec in region.inputs),
        writes=tuple(_use(renamed.get(spec.name, spec)) for spec in region.outputs),
        stream=region.place.stream,
        is_captured=region.place.is_captured,
        in_place=in_place,
    )


def _use(spec: BufferSpec) -> BufferUse:
    return BufferUse(spec.name, 0, spec.nbytes)


def _place_output(output: OutputSpec, targets: Mapping[str, BufferSpec]) -> OutputSpec:
    """Returns the output with the buffer that holds it after a replay."""
    if output.alias is None:
        return output
    return dataclasses.replace(output, buffer=targets[output.alias])


def _collect_buffers(
    request: CaptureRequest, renamed: dict[str, BufferSpec]
) -> tuple[BufferSpec, ...]:
    """Returns each buffer once, in order of first appearance."""
    found = {spec.buffer.name: spec.buffer for spec in request.inputs}
    for region in request.regions:
        found |= {spec.name: spec for spec in region.outputs if spec.name not in renamed}
    return tuple(found.values())
