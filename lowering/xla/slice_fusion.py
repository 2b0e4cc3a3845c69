"""Slice fusions: thunks that work on pieces of arrays, at offsets that loops may move."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import DecodeSequence, Iteration, Scope
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode


@dataclasses.dataclass(frozen=True)
class _MovingView:
    """A piece that moves with the turns of a loop.

    Attributes:
        piece: where it is.
        counter: of the turns.
        is_result: True when it is written.
    """

    piece: MovingUse
    counter: BufferUse
    is_result: bool


def decode_slice_fusion(
    message: Any, name: str, scope: Scope, decode: DecodeSequence
) -> list[GraphStep]:
    """Returns the steps of a ``DynamicSliceFusionThunkProto``, over views of the real buffers.

    Its allocations are one for each listed parameter, then one for each listed result. A piece that
    moves with the turns of a WHILE node is copied by a kernel; where the fusion is more than that
    copy, the piece passes through a temporary.

    Args:
        message: the thunk.
        name: of its instruction.
        scope: what it refers to.
        decode: returns the steps of the embedded sequence.
    """
    parts = [
        (_pick(message.parameter_buffers, part.parameter_number), part, "slice")
        for part in message.parameters
    ] + [
        (_pick(message.result_buffers, part.result_number), part, "update")
        for part in message.results
    ]
    if len(parts) != len(message.slice_allocations):
        raise Refusal(f"has {len(parts)} slices and {len(message.slice_allocations)} places")
    views: list[BufferUse] = []
    moving: dict[BufferUse, _MovingView] = {}
    for (whole, part, prefix), allocation in zip(parts, message.slice_allocations, strict=True):
        use = scope.find_use(whole)
        found = find_view(use, part, prefix, allocation.size, scope.iterations)
        if isinstance(found, BufferUse):
            views.append(found)
            continue
        stand_in = BufferUse(f"{name}.{len(views)}", 0, allocation.size)
        moving[stand_in] = _MovingView(*found, prefix == "update")
        views.append(stand_in)
    # Instructions in there have names of their own computation.
    inner = dataclasses.replace(scope, views=tuple(views), instructions={})
    steps = decode(message.embedded_thunks.thunks, inner)
    return _copy_moving(steps, name, moving, scope) if moving else steps


def _copy_moving(
    steps: Sequence[GraphStep],
    name: str,
    moving: dict[BufferUse, _MovingView],
    scope: Scope,
) -> list[GraphStep]:
    """Returns the steps with what moves copied by kernels."""
    copied = _merge_copy(steps, moving)
    if copied is not None:
        return [copied]
    places = {view: scope.add_temporary(view.nbytes) for view in moving}
    wholes = {view.buffer: place for view, place in places.items()}

    def relocate(use: BufferUse) -> BufferUse:
        place = wholes.get(use.buffer)
        return use if place is None else use._replace(buffer=place.buffer)

    # What a result keeps of its old bytes is read as well.
    before = [
        copy_slice(f"{name}@slice", each.piece, _hold(places[view]), each.counter)
        for view, each in moving.items()
    ]
    after = [
        copy_slice(f"{name}@update", _hold(places[view]), each.piece, each.counter)
        for view, each in moving.items()
        if each.is_result
    ]
    return [*before, *(step.move(relocate) for step in steps), *after]


def _merge_copy(
    steps: Sequence[GraphStep], moving: dict[BufferUse, _MovingView]
) -> DeviceStep | None:
    """Returns the one kernel for a fusion that only copies a piece; None for any other."""
    node = steps[0].node if len(steps) == 1 and isinstance(steps[0], DeviceStep) else None
    if not isinstance(node, CopyNode):
        return None
    source, target = moving.get(node.source), moving.get(node.target)
    counters = {each.counter for each in (source, target) if each is not None}
    if len(counters) != 1 or len(moving) != sum(each is not None for each in (source, target)):
        return None
    reads = _hold(node.source) if source is None else source.piece
    writes = _hold(node.target) if target is None else target.piece
    if reads.whole.overlaps(writes.whole):
        raise Refusal("copies bytes to a place that may overlap theirs")
    return copy_slice(node.name, reads, writes, counters.pop())


def _hold(use: BufferUse) -> MovingUse:
    """Returns a piece that does not move."""
    return MovingUse(use, use.nbytes, 0)


def _pick(pieces: Sequence[Any], index: int) -> Any:
    if not 0 <= index < len(pieces):
        raise Refusal(f"names buffer {index} of {len(pieces)}")
    return pieces[index]


def find_view(
    whole: BufferUse,
    part: Any,
    prefix: str,
    size: int,
    iterations: Sequence[Iteration | None] = (),
) -> BufferUse | tuple[MovingUse, BufferUse]:
    """Returns the part of a buffer that starts at an offset, moved inside its bounds.

    Args:
        whole: the buffer.
        part: a ``ParameterProto`` or ``ResultProto`` of a ``DynamicSliceFusionThunkProto``.
        prefix: of the names of its fields: ``slice`` or ``update``.
        size: bytes of the part.
        iterations: those of the loops around it, the innermost first.

    Returns:
        Its bytes; where they differ from turn to turn of a loop what they are in each, and the
        counter of the turns.

    Raises:
        Refusal: the offset is neither a constant nor moved by a loop that counts its iterations.
    """
    if not 0 <= size <= whole.nbytes:
        raise Refusal(f"takes {size} bytes of {whole.nbytes}")
    if not part.HasField(f"{prefix}_config"):
        if getattr(part, f"{prefix}_offsets") or size != whole.nbytes:
            raise Refusal("slices at an offset that is known on the device only")
        return whole
    config = getattr(part, f"{prefix}_config")
    first, stride = _read_offset(config)
    if not stride:
        return MovingUse(whole, size, first).find(0)
    loop = config.loop_index
    iteration = iterations[loop] if 0 <= loop < len(iterations) else None
    if iteration is None:
        raise Refusal("slices at an offset that a loop moves which does not count its iterations")
    piece = MovingUse(whole, size, first + iteration.first * stride, iteration.per_turn * stride)
    return piece.find(0) if iteration.counter is None else (piece, iteration.counter)


def _read_offset(config: Any) -> tuple[int, int]:
    """Returns the offset in the first iteration and what each adds to it, in bytes."""
    offsets = {(config.byte_offset, config.byte_stride)}
    if "linear" in config.DESCRIPTOR.fields_by_name and config.HasField("linear"):
        offsets.add((config.linear.byte_offset, config.linear.byte_stride))
    if len(offsets) > 1:
        raise Refusal("slices at two different offsets")
    return offsets.pop()
