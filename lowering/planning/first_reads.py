"""First reads: which old bytes a branch or a loop may need, found backwards from the results.

To the steps around it a branch or a loop is one step. What it writes on one way it may leave on
another: then the old bytes are needed if the new ones would be. And what its body writes before it
reads is no input, however often the body runs. Both follow from what is live: bytes that some later
step may read before they are written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.planning.byte_map import ByteMap
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse


def find_first_reads(
    steps: Sequence[GraphStep], results: Iterable[BufferUse]
) -> tuple[GraphStep, ...]:
    """Returns the steps with `ConditionalStep.first_reads` in each branch and loop.

    Args:
        steps: in program order.
        results: the byte ranges that are read after the last step.
    """
    # Nothing is asked of the steps before the first branch or loop.
    first = next(
        (i for i, each in enumerate(steps) if not isinstance(each, DeviceStep)), len(steps)
    )
    if first == len(steps):
        return tuple(steps)
    return *steps[:first], *follow_back(steps[first:], ByteSet(results))[0]


def find_needed(steps: Sequence[GraphStep]) -> list[BufferUse]:
    """Returns the byte ranges that steps may read before they write them.

    Args:
        steps: in program order; nothing is read after the last one.
    """
    return follow_back(steps, ByteSet())[1].list_ranges()


def follow_back(steps: Sequence[GraphStep], live: ByteSet) -> tuple[tuple[GraphStep, ...], ByteSet]:
    """Returns the steps, and the bytes that are live before them.

    Args:
        steps: in program order.
        live: the bytes that are live after them.
    """
    live = live.copy()
    found: list[GraphStep] = []
    for step in reversed(steps):
        if isinstance(step, DeviceStep):
            live.remove(step.writes)
            live.add(step.reads)
            found.append(step)
            continue
        bodies, live = _follow_bodies(step, live)
        live.remove(step.setter.writes)
        live.add(step.setter.reads)
        whole = dataclasses.replace(step, bodies=bodies, first_reads=None)
        first_reads = tuple(use for use in whole.touched if live.meets(use))
        found.append(dataclasses.replace(whole, first_reads=first_reads))
    return tuple(reversed(found)), live


def _follow_bodies(
    step: ConditionalStep, after: ByteSet
) -> tuple[tuple[tuple[GraphStep, ...], ...], ByteSet]:
    """Returns the bodies, and the bytes that are live before one of them is chosen."""
    if step.construct is not Construct.WHILE:
        ways = [follow_back(body, after) for body in step.bodies]
        live = ByteSet()
        # Without a second body nothing may happen at all.
        is_open = step.construct is Construct.IF and len(step.bodies) == 1
        for before in [*(before for _, before in ways), *([after] if is_open else [])]:
            live.join(before)
        return tuple(body for body, _ in ways), live
    # What another turn reads first, the first turn reads first too: one pass finds it.
    body, before = follow_back(step.bodies[0], after)
    # There may be no turn at all.
    before.join(after)
    return (body,), before


class ByteSet:
    """Some bytes of some buffers."""

    def __init__(self, uses: Iterable[BufferUse] = ()) -> None:
        self._maps: dict[str, ByteMap[bool]] = {}
        self.add(uses)

    def copy(self) -> ByteSet:
        """Returns an equal set of its own."""
        copied = ByteSet()
        copied._maps = {name: held.copy() for name, held in self._maps.items()}
        return copied

    def add(self, uses: Iterable[BufferUse]) -> None:
        """Adds the bytes of ranges."""
        self._set(uses, True)

    def remove(self, uses: Iterable[BufferUse]) -> None:
        """Takes the bytes of ranges out."""
        self._set(uses, False)

    def meets(self, use: BufferUse) -> bool:
        """True when one of the bytes of a range is among them."""
        held = self._maps.get(use.buffer)
        return held is not None and any(held.read(use.offset, use.offset + use.nbytes))

    def find_common(self, use: BufferUse) -> list[BufferUse]:
        """Returns the bytes of a range that are among them, as ranges in ascending order."""
        held = self._maps.get(use.buffer)
        ends = (use.offset, use.offset + use.nbytes)
        cut = [
            (max(start, ends[0]), min(end, ends[1]), is_in)
            for start, end, is_in in (held.list_pieces() if held is not None else ())
        ]
        return _join([BufferUse(use.buffer, a, b - a) for a, b, is_in in cut if is_in and a < b])

    def join(self, other: ByteSet) -> None:
        """Adds the bytes of another set."""
        self.add(other.list_ranges())

    def list_ranges(self) -> list[BufferUse]:
        """Returns them as ranges, those of a buffer in ascending order."""
        return [
            BufferUse(name, start, end - start)
            for name, held in self._maps.items()
            for start, end, is_in in held.list_pieces()
            if is_in
        ]

    def _set(self, uses: Iterable[BufferUse], value: bool) -> None:
        for name, offset, nbytes in uses:
            self._maps.setdefault(name, ByteMap(False)).replace(offset, offset + nbytes, value)


def _join(pieces: Iterable[BufferUse]) -> list[BufferUse]:
    """Returns ascending ranges of one buffer, those that touch as one."""
    joined: list[BufferUse] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.offset + last.nbytes == piece.offset:
            joined[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return joined
