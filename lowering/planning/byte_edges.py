"""Which steps must keep their order because they share bytes: one finder, and one check of it.

Both work on addresses, which are all they know of memory: a plan's offsets, where a buffer that
reuses the bytes of another waits for every use of it, too; or addresses at which no two buffers
share a byte, before there is a plan (`lay_apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tracegraph.lowering.device_program import Step
from tracegraph.lowering.planning.byte_map import ByteMap
from tracegraph.lowering.planning.step_order import find_unordered
from tracegraph.lowering.request import BufferSpec
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import InternalError

# The step that wrote a byte last (-1 for none), and the steps that have read it since.
LastUses: TypeAlias = tuple[int, tuple[int, ...]]


def lay_apart(buffers: Iterable[BufferSpec]) -> dict[str, int]:
    """Returns an address for each buffer by its name, such that no two of them share a byte."""
    buffers = tuple(buffers)
    addresses = itertools.accumulate((buffer.nbytes for buffer in buffers), initial=0)
    return dict(zip((buffer.name for buffer in buffers), addresses, strict=False))


def find_edges(steps: Sequence[Step], addresses: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Returns pairs of step indices that order every two steps which share bytes.

    Read after write, write after read and write after write are ordered, directly or through
    steps in between. The pairs are not the fewest; see `reduce_edges`.

    Args:
        steps: in an order that gives the right result.
        addresses: of the first byte of each buffer.

    Returns:
        The pairs, sorted; the first comes first in ``steps``.
    """
    memory: ByteMap[LastUses] = ByteMap((-1, ()))
    edges: set[tuple[int, int]] = set()
    index = -1

    # One function for all steps, which takes the index of the step at hand: called most of all.
    def add_reader(last: LastUses) -> LastUses:
        return last[0], (*last[1], index)

    for index, step in enumerate(steps):
        firsts: set[int] = set()
        for start, end in _list_ranges(step.reads, addresses):
            firsts.update([writer for writer, _ in memory.change(start, end, add_reader)])
        for start, end in _list_ranges(step.writes, addresses):
            for writer, readers in memory.replace(start, end, (index, ())):
                # What was read since it was written waits through its readers.
                firsts.update(readers or (writer,))
        # A step that meets itself has met what came before it at the same bytes.
        edges.update([(first, index) for first in firsts if 0 <= first < index])
    return tuple(sorted(edges))


def find_unordered_pair(
    steps: Sequence[Step], edges: Sequence[tuple[int, int]], addresses: Mapping[str, int]
) -> tuple[int, int] | None:
    """Returns two steps that share bytes, at least one writing, and are not ordered; or None.

    Independent of `find_edges`, whose result it checks: it goes through the addresses once, where
    that one goes through the steps.

    Args:
        steps: in an order that gives the right result.
        edges: pairs of step indices; the first must finish before the second.
        addresses: of the first byte of each buffer.

    Returns:
        Their indices; the first comes first in ``steps``.
    """
    unordered = find_unordered(len(steps), edges)
    # Ranges that reach over the address of the one at hand: end, steps that touch, that write it.
    above: list[tuple[int, int, int]] = []
    for (start, end), (readers, writers) in sorted(_group_ranges(steps, addresses).items()):
        writing = _make_set(writers)
        touching = writing | _make_set(readers)
        above = [other for other in above if other[0] > start]
        near, near_writing = touching, writing
        for _, other_touching, other_writing in above:
            near |= other_touching
            near_writing |= other_writing
        for index in writers:
            if near & unordered[index]:
                return _make_pair(index, near & unordered[index])
        for index in readers:
            if near_writing & unordered[index]:
                return _make_pair(index, near_writing & unordered[index])
        above.append((end, touching, writing))
    return None


def verify_edges(
    steps: Sequence[Step],
    edges: Sequence[tuple[int, int]],
    addresses: Mapping[str, int],
    *,
    name: str,
) -> None:
    """Checks that every two steps that share bytes, at least one writing, are ordered.

    Args:
        steps: in an order that gives the right result.
        edges: pairs of step indices; the first must finish before the second.
        addresses: of the first byte of each buffer.
        name: the captured function's name.

    Raises:
        InternalError: two such steps are not ordered.
    """
    pair = find_unordered_pair(steps, edges, addresses)
    if pair is None:
        return
    first, second = pair
    raise InternalError(
        f"`{steps[second].name}` shares bytes with `{steps[first].name}` and does not wait for it",
        where=f"graph of `{name}`, steps {first} and {second}",
        why="without an edge the two run in any order, and one would read or keep wrong bytes",
    )


def _list_ranges(
    uses: Sequence[BufferUse], addresses: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    for name, offset, nbytes in uses:
        if nbytes:
            start = addresses[name] + offset
            yield start, start + nbytes


def _group_ranges(
    steps: Sequence[Step], addresses: Mapping[str, int]
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Returns for each range the steps that read it and those that write it."""
    groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for index, step in enumerate(steps):
        for each in _list_ranges(step.reads, addresses):
            groups.setdefault(each, ([], []))[0].append(index)
        for each in _list_ranges(step.writes, addresses):
            groups.setdefault(each, ([], []))[1].append(index)
    return groups


def _make_pair(index: int, others: int) -> tuple[int, int]:
    other = others.bit_length() - 1
    return min(index, other), max(index, other)


def _make_set(indices: Iterable[int]) -> int:
    """Returns the bitset of some steps."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits
