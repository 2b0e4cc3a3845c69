"""Gather slices: adjacent pieces of an array that the iterations of a turn read are copied at once.

Note [Gathered slices]
In a WHILE node a slice that moves is copied by a kernel, one for each iteration. Where the
iterations of a turn read pieces side by side, as a `scan` does of its inputs, one kernel at the
beginning of the turn copies them all, and each iteration reads its own. A turn of ten iterations
has eight kernels less for each slice.

That is right where the slice alone writes the place of the copy, nothing touches this place before
the slice, nothing in the loop writes the array, and no piece is moved inside its bounds. Pieces are
multiples of what addresses are aligned to, which kernels may rely on. The last iteration keeps its
own kernel and place, so after each turn memory is as it was without this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tracegraph.lowering.device_program import DeviceStep, GraphStep, list_uses
from tracegraph.lowering.kernels.loops.slices import MovingUse, Slice, copy_slice, read_slice
from tracegraph.lowering.planning.memory_plan import ALIGNMENT, align
from tracegraph.runtime.definition.nodes import BufferUse

# What all copies of a loop take at most.
GATHERED_BYTES = 1 << 20


def gather_slices(
    iterations: Sequence[Sequence[GraphStep]],
    turns: int,
    add_temporary: Callable[[int], BufferUse],
) -> list[list[GraphStep]]:
    """Returns the steps of each iteration of a turn; the first begins with what all of them read.

    See Note [Gathered slices].

    Args:
        iterations: the steps of each, in program order.
        turns: how many turns the loop has.
        add_temporary: returns so many new bytes.
    """
    gathered = [list(steps) for steps in iterations]
    if len(iterations) < 3 or len({len(steps) for steps in iterations}) > 1:
        return gathered
    before: list[GraphStep] = []
    left_out: set[int] = set()
    room = GATHERED_BYTES
    for position in range(len(iterations[0])):
        slices = _find_slices(iterations, position, turns)
        nbytes = align(sum(each.source.nbytes for each in slices[:-1]))
        if not slices or nbytes > room:
            continue
        room -= nbytes
        left_out.add(position)
        before.append(_gather(gathered, slices, add_temporary(nbytes)))
    kept = [
        [step for index, step in enumerate(steps) if index not in left_out]
        for steps in gathered[:-1]
    ]
    return [[*before, *kept[0]], *kept[1:], gathered[-1]]


def _find_slices(
    iterations: Sequence[Sequence[GraphStep]], position: int, turns: int
) -> list[Slice]:
    """Returns the slice at one position of each iteration, or none where they must stay."""
    found = [read_slice(steps[position]) for steps in iterations]
    slices = [each for each in found if each is not None and each.is_read]
    if len(slices) < len(iterations):
        return []
    first = slices[0]
    distance = slices[1].source.first - first.source.first
    wanted = [
        dataclasses.replace(first.source, first=first.source.first + index * distance)
        for index in range(len(slices))
    ]
    if [each.source for each in slices] != wanted or abs(distance) != first.source.nbytes:
        return []
    if any((each.source.nbytes | each.target.whole.offset) % ALIGNMENT for each in slices):
        return []
    # The pieces of a turn follow those of the one before, so two of them say where all are.
    ends = [slices[0].source.first, slices[-1].source.first]
    ends += [end + (turns - 1) * first.source.step for end in ends]
    if min(ends) < 0 or max(ends) > first.source.last:
        return []
    if any(
        use.overlaps(first.source.whole)
        for steps in iterations
        for step in steps
        for use in step.writes
    ):
        return []
    is_alone = all(
        _is_alone(steps, position, each.target.whole)
        for steps, each in zip(iterations, slices, strict=True)
    )
    return slices if is_alone else []


def _is_alone(steps: Sequence[GraphStep], position: int, place: BufferUse) -> bool:
    """True where a step alone writes a place, none before it uses it, and all are within it."""
    for index, step in enumerate(steps):
        uses = [use for use in list_uses(step) if use.overlaps(place)]
        if index == position or not uses:
            continue
        is_within = isinstance(step, DeviceStep) and all(
            place.offset <= use.offset and use.offset + use.nbytes <= place.offset + place.nbytes
            for use in uses
        )
        if index < position or not is_within or any(map(place.overlaps, step.writes)):
            return False
    return True


def _gather(
    iterations: list[list[GraphStep]], slices: Sequence[Slice], copy: BufferUse
) -> DeviceStep:
    """Returns the step that copies all pieces but the last, and lets iterations read its copy."""
    first, last = slices[0].source, slices[-2].source
    nbytes = first.nbytes
    begin = min(first, last, key=lambda each: each.first)
    for index, each in enumerate(slices[:-1]):
        offset = each.source.first - begin.first
        steps = iterations[index]
        iterations[index] = [_move(step, each.target.whole, copy, offset) for step in steps]
    count = len(slices) - 1
    whole = copy._replace(nbytes=count * nbytes)
    source = MovingUse(first.whole, count * nbytes, begin.first, first.step)
    name = slices[0].name.partition("@")[0]
    target = MovingUse(whole, whole.nbytes, 0)
    return copy_slice(f"{name}@gathered", source, target, slices[0].counter)


def _move(step: GraphStep, place: BufferUse, copy: BufferUse, offset: int) -> GraphStep:
    def relocate(use: BufferUse) -> BufferUse:
        if not use.overlaps(place):
            return use
        moved = copy.offset + offset + use.offset - place.offset
        return BufferUse(copy.buffer, moved, use.nbytes)

    return step.move(relocate)
