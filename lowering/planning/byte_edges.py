"""Edges of a planned program: which steps must keep their order because they share bytes.

The order is found on the bytes of the arena, not on buffers, so that a buffer which reuses the
bytes of another waits for every use of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from tracegraph.lowering.device_program import Step
from tracegraph.lowering.planning.byte_map import ByteMap
from tracegraph.lowering.planning.stream_order import find_ancestors
from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.nodes import BufferUse

Locate: TypeAlias = Callable[[BufferUse], int]

# The step that wrote a byte last (-1 for none), and the steps that have read it since.
LastUses: TypeAlias = tuple[int, tuple[int, ...]]


def find_edges(steps: Sequence[Step], locate: Locate) -> tuple[tuple[int, int], ...]:
    """Returns pairs of step indices that order every two steps which share bytes.

    Read after write, write after read and write after write are ordered, directly or through
    steps in between. The pairs are not the fewest; see `reduce_edges`.

    Args:
        steps: in an order that gives the right result.
        locate: the place of the first byte of a range, in bytes from the start of the arena.

    Returns:
        The pairs, sorted; the first comes first in ``steps``.
    """
    arena: ByteMap[LastUses] = ByteMap((-1, ()))
    edges: set[tuple[int, int]] = set()
    for index, step in enumerate(steps):
        firsts: set[int] = set()
        for start, end in _locate_ranges(step.reads, locate):
            before = arena.change(start, end, lambda last, i=index: (last[0], (*last[1], i)))
            firsts.update([writer for writer, _ in before])
        for start, end in _locate_ranges(step.writes, locate):
            for writer, readers in arena.replace(start, end, (index, ())):
                # What was read since it was written waits through its readers.
                firsts.update(readers or (writer,))
        # A step that meets itself has met what came before it at the same bytes.
        edges.update([(first, index) for first in firsts if 0 <= first < index])
    return tuple(sorted(edges))


def verify_edges(
    steps: Sequence[Step], edges: Sequence[tuple[int, int]], locate: Locate, *, name: str
) -> None:
    """Checks that every two steps that share bytes, at least one writing, are ordered.

    It sweeps over the addresses once, where `find_edges` walks through the steps.

    Args:
        steps: in an order that gives the right result.
        edges: pairs of step indices; the first must finish before the second.
        locate: the place of the first byte of a range.
        name: the captured function's name.

    Raises:
        CaptureError: two such steps are not ordered; it is an error of ours.
    """
    ordered = _find_ordered(len(steps), edges)
    readers, writers = _Active(), _Active()
    for _, is_start, index, is_write in sorted(_list_borders(steps, locate)):
        active = writers if is_write else readers
        if not is_start:
            active.remove(index)
            continue
        others = writers.bits | readers.bits if is_write else writers.bits
        unordered = others & ~ordered[index]
        if unordered:
            raise _report(steps, index, unordered.bit_length() - 1, name)
        active.add(index)


class _Active:
    """The steps with a range over the present address: counted, since ranges may overlap."""

    def __init__(self) -> None:
        self.bits = 0
        self._counts: dict[int, int] = {}

    def add(self, index: int) -> None:
        self._counts[index] = self._counts.get(index, 0) + 1
        self.bits |= 1 << index

    def remove(self, index: int) -> None:
        self._counts[index] -= 1
        if not self._counts[index]:
            self.bits &= ~(1 << index)


def _locate_ranges(uses: Sequence[BufferUse], locate: Locate) -> Iterator[tuple[int, int]]:
    for use in uses:
        if use.nbytes:
            start = locate(use)
            yield start, start + use.nbytes


def _list_borders(steps: Sequence[Step], locate: Locate) -> Iterator[tuple[int, bool, int, bool]]:
    """Yields address, whether a range starts there, its step and whether it is written.

    Sorted, ends come before starts: neighbours do not share a byte.
    """
    for index, step in enumerate(steps):
        for is_write, uses in ((False, step.reads), (True, step.writes)):
            for start, end in _locate_ranges(uses, locate):
                yield start, True, index, is_write
                yield end, False, index, is_write


def _find_ordered(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns for each step the bitset of itself, its ancestors and its descendants."""
    ancestors = find_ancestors(count, edges)
    followers: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        followers[first].append(second)
    descendants = [0] * count
    for index in reversed(range(count)):
        for second in followers[index]:
            descendants[index] |= descendants[second] | 1 << second
    return [ancestors[i] | descendants[i] | 1 << i for i in range(count)]


def _report(steps: Sequence[Step], one: int, other: int, name: str) -> CaptureError:
    first, second = sorted((one, other))
    return CaptureError(
        f"`{steps[second].name}` shares bytes with `{steps[first].name}` and does not wait for it",
        where=f"graph of `{name}`, steps {first} and {second}",
        why="without an edge the two run in any order, and one would read or keep wrong bytes",
        fix="internal error in tracegraph: please report this text",
        anchor="internal",
    )
