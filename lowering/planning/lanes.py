"""Lanes: edges that keep a graph from being wider than a device launches well.

Note [Lanes]
What a launch of a graph costs the host grows with its branches, and where they are many a launch
hardly overlaps with the one before: the driver seems to have a queue for each. So the steps are
dealt out to a few lanes, each of which is a chain: a step gets an edge from the one before it in
its lane. The steps that the most work waits for are dealt out first, each to the lane in which it
can start earliest: list scheduling, as in R. L. Graham, Bounds on multiprocessing timing anomalies,
1969. There are twice as many lanes as the steps keep busy on average; more gained nothing. Where
steps fill the device by themselves, two lanes may be better: what runs beside a step takes places
from it. That depends on what is not known here, so it is tried: `Tuning.has_two_lanes`.

An edge that is added only orders more than before, so the graph computes the same. But where a
graph waits for an event of the user's, such an edge could close a circle through what records it:
graphs with events keep their edges. Over several devices all have the same edges, so that what
comes first on one comes first on all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tracegraph.lowering.planning.step_order import find_ancestors, reduce_edges
from tracegraph.runtime.errors import InternalError

# Between 3 and 16, little depends on how many: see docs/design/gpu_replay.md.
FEWEST, MOST = 4, 16
TWO = 2


class Arrangement(NamedTuple):
    """Steps in an order, with edges.

    Attributes:
        order: by new place the old one.
        edges: pairs of new places; the first must finish before the second.
    """

    order: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]


def arrange_in_lanes(
    times: Sequence[float], edges: Sequence[tuple[int, int]], *, has_two: bool = False
) -> Arrangement:
    """Returns steps in lanes, see Note [Lanes]; as they are where that adds no edge.

    Args:
        times: of each step, in any unit; none is 0.
        edges: pairs of step indices; the first must finish before the second.
        has_two: two lanes, not as many as the steps keep busy.

    Raises:
        InternalError: an edge goes backwards, or the result orders less than the edges did.

    Example:
        >>> arrange_in_lanes([1.0] * 3, [(0, 1)])
        Arrangement(order=(0, 1, 2), edges=((0, 1),))
        >>> len(arrange_in_lanes([1.0] * 40, []).edges)
        24
    """
    count = len(times)
    before, after = _list_neighbours(count, edges)
    rest = _measure_rest(times, after)
    lanes = _Lanes(TWO if has_two else _choose_count(times, rest))
    missing = [len(each) for each in before]
    ready = [(-rest[index], index) for index in range(count) if not missing[index]]
    heapq.heapify(ready)
    order: list[int] = []
    added: list[tuple[int, int]] = []
    while ready:
        _, index = heapq.heappop(ready)
        previous = lanes.place(index, before[index], times[index])
        order.append(index)
        if previous is not None:
            added.append((previous, index))
        for follower in after[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (-rest[follower], follower))
    # What starts first comes first, so that the driver meets the steps in their order.
    order.sort(key=lambda index: lanes.starts[index])
    place = {old: new for new, old in enumerate(order)}
    moved = [(place[first], place[second]) for first, second in edges]
    chained = [(place[first], place[second]) for first, second in added]
    arranged = reduce_edges(count, {*moved, *chained})
    if len(arranged) == len(edges) and {*arranged} == {*moved}:
        return Arrangement(tuple(range(count)), tuple(edges))
    _verify_order(count, moved, arranged)
    return Arrangement(tuple(order), arranged)


class _Lanes:
    """Lanes that fill.

    Attributes:
        starts: when each step that was placed starts.
    """

    def __init__(self, count: int) -> None:
        self._ends = [0.0] * count
        self._last: list[int | None] = [None] * count
        self._end_of: dict[int, float] = {}
        self.starts: dict[int, float] = {}

    def place(self, index: int, before: Sequence[int], time: float) -> int | None:
        """Places a step where it starts earliest, and returns the one before it there."""
        earliest = max((self._end_of[each] for each in before), default=0.0)
        followed = {*before}

        def rate(lane: int) -> tuple[float, bool, bool]:
            last = self._last[lane]
            # Behind what it waits for anyway no edge is added, in an empty lane neither.
            return max(earliest, self._ends[lane]), last not in followed, last is not None

        lane = min(range(len(self._ends)), key=rate)
        self.starts[index] = max(earliest, self._ends[lane])
        self._end_of[index] = self._ends[lane] = self.starts[index] + time
        previous, self._last[lane] = self._last[lane], index
        return previous


def _list_neighbours(
    count: int, edges: Iterable[tuple[int, int]]
) -> tuple[list[list[int]], list[list[int]]]:
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        before[second].append(first)
        after[first].append(second)
    return before, after


def _measure_rest(times: Sequence[float], after: Sequence[Sequence[int]]) -> list[float]:
    """Returns for each step the longest time from its start to the end of what waits for it."""
    rest = [0.0] * len(times)
    for index in reversed(range(len(times))):
        rest[index] = times[index] + max((rest[each] for each in after[index]), default=0.0)
    return rest


def _choose_count(times: Sequence[float], rest: Sequence[float]) -> int:
    if not times:
        return FEWEST
    busy = sum(times) / max(rest)
    return min(max(2 * math.ceil(busy), FEWEST), MOST)


def _verify_order(
    count: int, needed: Iterable[tuple[int, int]], arranged: Sequence[tuple[int, int]]
) -> None:
    ancestors = find_ancestors(count, arranged)
    for first, second in needed:
        if not ancestors[second] >> first & 1:
            raise InternalError(
                f"step {second} does not wait for step {first} any more",
                where="lanes of a graph",
                why="lanes may only order more than the edges do",
            )
