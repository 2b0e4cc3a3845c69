"""The order of steps, as pairs: which of them come before which, and the fewest pairs that say so.

Sets of steps are bitsets: bit ``i`` of an int stands for step ``i``. Steps are in program order, so
every edge goes from a lower index to a higher one and no graph search is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracegraph.runtime.errors import InternalError


def find_ancestors(count: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Returns for each step the bitset of all steps that are ordered before it.

    Args:
        count: number of steps.
        edges: pairs of step indices; the first must finish before the second.

    Raises:
        InternalError: an edge goes backwards, to itself, or to a step that does not exist.

    Example:
        >>> find_ancestors(3, [(0, 1), (1, 2)])
        (0, 1, 3)
    """
    return _join_predecessors(_group_predecessors(count, edges))


def is_chain(count: int, edges: Sequence[tuple[int, int]]) -> bool:
    """True where the edges are those from each step to the next one, which orders all of them.

    Args:
        count: number of steps.
        edges: pairs of step indices, sorted.

    Example:
        >>> is_chain(3, [(0, 1), (1, 2)]), is_chain(3, [(0, 2)])
        (True, False)
    """
    return tuple(edges) == tuple(zip(range(count), range(1, count), strict=False))


def find_unordered(count: int, edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns for each step the bitset of all steps that are ordered neither before nor after it.

    Args:
        count: number of steps.
        edges: pairs of step indices; the first must finish before the second.

    Raises:
        InternalError: an edge goes backwards, to itself, or to a step that does not exist.

    Example:
        >>> find_unordered(3, [(0, 1), (0, 2)])
        (0, 4, 2)
    """
    ancestors = find_ancestors(count, edges)
    followers: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        followers[first].append(second)
    descendants = [0] * count
    for index in reversed(range(count)):
        for second in followers[index]:
            descendants[index] |= descendants[second] | 1 << second
    everything = (1 << count) - 1
    return tuple(
        everything & ~(before | after | 1 << index)
        for index, (before, after) in enumerate(zip(ancestors, descendants, strict=True))
    )


def reduce_edges(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the fewest edges that declare the same order, sorted (the transitive reduction).

    Args:
        count: number of steps.
        edges: pairs of step indices; the first must finish before the second.

    Raises:
        InternalError: an edge goes backwards, to itself, or to a step that does not exist.

    Example:
        >>> reduce_edges(3, [(0, 1), (1, 2), (0, 2)])
        ((0, 1), (1, 2))
    """
    grouped = _group_predecessors(count, edges)
    ancestors = _join_predecessors(grouped)
    reduced: list[tuple[int, int]] = []
    for index, predecessors in enumerate(grouped):
        covered = 0
        for predecessor in sorted(predecessors, reverse=True):
            if not covered >> predecessor & 1:
                reduced.append((predecessor, index))
            covered |= ancestors[predecessor] | 1 << predecessor
    return tuple(sorted(reduced))


def _group_predecessors(count: int, edges: Iterable[tuple[int, int]]) -> list[set[int]]:
    grouped: list[set[int]] = [set() for _ in range(count)]
    for first, second in edges:
        if not 0 <= first < second < count:
            raise InternalError(
                f"edge {first} -> {second} does not go forward through {count} steps",
                where="order of the steps",
                why="steps are in program order, so a step can only wait for an earlier one",
            )
        grouped[second].add(first)
    return grouped


def _join_predecessors(grouped: Sequence[set[int]]) -> tuple[int, ...]:
    ancestors = [0] * len(grouped)
    for index, predecessors in enumerate(grouped):
        for predecessor in predecessors:
            ancestors[index] |= ancestors[predecessor] | 1 << predecessor
    return tuple(ancestors)
