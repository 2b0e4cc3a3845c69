"""Loop state: what an iteration of a loop of unknown length leaves to others, and how it may move.

See Note [Guarded iterations] in `lowering/xla/guard_loops.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.planning.first_reads import ByteSet, find_needed
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.lowering.planning.rename_turn import join_ranges
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode

STATE_BYTES, STATE_PIECES = 1 << 16, 16


@dataclasses.dataclass(frozen=True)
class NewValue:
    """How an iteration writes a piece of the state anew.

    Attributes:
        first: the first step that finds the piece in the place of this iteration, and writes it.
        source: what that step, a memcpy, copies, where it can be left out.
        begin: the step that writes the source.
    """

    first: int
    source: BufferUse | None = None
    begin: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that may be guarded.

    Attributes:
        step: one iteration per turn.
        flag: whether another iteration follows.
        state: the pieces of memory that are kept, the flag among them.
        restored: those of them that a step after the loop may read.
        anew: by piece how an iteration writes it anew, for those that a step does.
        passed: the pieces that an iteration reads as the one before has left them.
    """

    step: ConditionalStep
    flag: BufferUse
    state: tuple[BufferUse, ...]
    restored: tuple[BufferUse, ...]
    anew: Mapping[BufferUse, NewValue]
    passed: frozenset[BufferUse]

    @property
    def iteration(self) -> tuple[DeviceStep, ...]:
        """The steps of an iteration and of the condition after it."""
        return tuple(each for each in self.step.bodies[0][:-1] if isinstance(each, DeviceStep))

    @property
    def copied(self) -> list[BufferUse]:
        """The pieces that are copied after each iteration."""
        return [piece for piece in self.state if piece not in self.anew]

    @property
    def left_out(self) -> set[int]:
        """The steps of an iteration that are left out."""
        return {value.first for value in self.anew.values() if value.source is not None}


def read_loop(step: ConditionalStep, live: ByteSet) -> Loop | None:
    """Returns a loop of unknown length with its state, or None where that cannot be kept.

    Args:
        step: with one iteration per turn, which consists of device steps.
        live: the bytes that may be read after it.
    """
    steps = [each for each in step.bodies[0][:-1] if isinstance(each, DeviceStep)]
    (flag,) = step.setter.reads
    written = join_ranges(use for each in steps for use in each.writes)
    state = [piece for use in written for piece in live.find_common(use)]
    if not any(use.overlaps(flag) for use in written):
        return None
    restored = tuple(state)
    if flag not in state:
        if any(piece.overlaps(flag) for piece in state):
            return None
        state.append(flag)
    if len(state) > STATE_PIECES or sum(piece.nbytes for piece in state) > STATE_BYTES:
        return None
    needed = join_ranges(find_needed(steps))
    passed = frozenset(piece for piece in state if any(map(piece.overlaps, needed)))
    found = {piece: _find_new_value(steps, piece, piece in passed) for piece in state}
    firsts = {piece: index for piece, index in found.items() if index is not None}
    anew = _find_sources(steps, firsts, [*needed, *state], passed)
    return Loop(step, flag, tuple(state), restored, anew, passed)


def move_iteration(
    loop: Loop, before: Mapping[BufferUse, BufferUse], after: Mapping[BufferUse, BufferUse]
) -> list[GraphStep]:
    """Returns the steps of an iteration whose state is in other places before and after it.

    Args:
        loop: the iteration is of.
        before: the place of each piece of the state after the iteration before.
        after: after this one.
    """

    def move(step: DeviceStep, index: int) -> DeviceStep:
        places: dict[BufferUse, BufferUse] = {}
        for piece, value in loop.anew.items():
            if index >= value.first:
                places[piece] = after[piece]
            elif piece in loop.passed:
                places[piece] = before[piece]
            if value.source is not None and value.begin <= index < value.first:
                places[value.source] = after[piece]

        def relocate(use: BufferUse) -> BufferUse:
            for piece, place in places.items():
                if piece.contains(use):
                    offset = place.offset + use.offset - piece.offset
                    return BufferUse(place.buffer, offset, use.nbytes)
            return use

        return step.move(relocate)

    left_out = loop.left_out
    return [move(step, i) for i, step in enumerate(loop.iteration) if i not in left_out]


def _find_new_value(steps: Sequence[DeviceStep], piece: BufferUse, is_passed: bool) -> int | None:
    """Returns the step of an iteration from which on a piece may have another place, or None.

    That step writes all of it and reads none of it. What comes later reads and writes it alone,
    not together with bytes around it; so does what comes earlier and reads the value that the
    iteration before has left.
    """
    index = max(
        (
            index
            for index, step in enumerate(steps)
            if piece in step.writes and not any(use.overlaps(piece) for use in step.reads)
        ),
        default=None,
    )
    if index is None or not all(_is_apart(step, piece) for step in steps[index:]):
        return None
    if not is_passed:
        return index
    before = steps[:index]
    if any(use.overlaps(piece) for step in before for use in step.writes):
        return None
    return index if all(_is_apart(step, piece) for step in before) else None


def _find_sources(
    steps: Sequence[DeviceStep],
    firsts: Mapping[BufferUse, int],
    kept: Iterable[BufferUse],
    passed: Collection[BufferUse],
) -> dict[BufferUse, NewValue]:
    """Returns how each piece is written anew, with the source where its memcpy can be left out.

    Args:
        steps: of an iteration.
        firsts: by piece the step that writes it anew.
        kept: the bytes that other iterations or steps after the loop read.
        passed: the pieces that an iteration reads as the one before has left them.
    """
    found: dict[BufferUse, NewValue] = {}
    taken: list[BufferUse] = []
    for piece, first in firsts.items():
        found[piece] = NewValue(first)
        node = steps[first].node
        if not isinstance(node, CopyNode):
            continue
        source = node.source
        # The place of what is written anew later is free until then.
        later = {each for each, index in firsts.items() if index > first} - {*passed}
        fixed = [*taken, *(use for use in kept if use not in later)]
        begin = _find_new_value(steps[: first + 1], source, is_passed=False)
        if begin is None or any(map(source.overlaps, fixed)):
            continue
        between = steps[begin:first]
        # In between, its place has the value of the iteration before, if any, and nothing else.
        uses = [
            use for step in between for use in (step.writes if piece in passed else step.ranges)
        ]
        if any(map(piece.overlaps, uses)) or _is_read_first(source, steps[first + 1 :]):
            continue
        if source.offset % ALIGNMENT != piece.offset % ALIGNMENT:
            continue
        found[piece] = NewValue(first, source, begin)
        taken.append(source)
    return found


def _is_read_first(piece: BufferUse, steps: Sequence[DeviceStep]) -> bool:
    """True where one of the steps may read bytes of a piece before they are written."""
    return any(map(piece.overlaps, find_needed(steps)))


def _is_apart(step: DeviceStep, piece: BufferUse) -> bool:
    """True where each range that a step names is in the piece or shares no byte with it."""
    return all(piece.contains(use) or not use.overlaps(piece) for use in step.ranges)
