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

Note [Longest chain first]
The driver seems to deal out the nodes of a graph to queues of its own, by the order in which they
were created: that order alone makes up to 12 % of difference. So they are created like this: of the
steps that may come next, one of the longest chain, or else the one that the most work waits for. On
H200s the step of a GPT takes 1 % less time than in the order in which lanes start their steps, and
with a `scan` over its layers 4 to 5 %: see docs/design/gpu_replay.md.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    """Returns steps in lanes, in the order in which they become nodes.

    See Note [Lanes] and Note [Longest chain first].

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
    rest = _measure_rest(times, after, range(count))
    lanes = _Lanes(TWO if has_two else _choose_count(times, rest))
    dealt: list[int] = []
    added: list[tuple[int, int]] = []
    for index in _list_ready(after, [(-each,) for each in rest]):
        previous = lanes.place(index, before[index], times[index])
        dealt.append(index)
        if previous is not None:
            added.append((previous, index))
    order = _put_chain_first(times, [*edges, *added], dealt)
    place = {old: new for new, old in enumerate(order)}
    moved = [(place[first], place[second]) for first, second in edges]
    chained = [(place[first], place[second]) for first, second in added]
    arranged = reduce_edges(count, {*moved, *chained})
    _verify_order(count, moved, arranged)
    return Arrangement(tuple(order), arranged)


def _put_chain_first(
    times: Sequence[float], edges: Sequence[tuple[int, int]], dealt: Sequence[int]
) -> list[int]:
    """Returns the order in which steps become nodes, see Note [Longest chain first].

    Args:
        times: of each step.
        edges: pairs of step indices, those of lanes among them.
        dealt: the steps in an order that the edges allow.
    """
    _, after = _list_neighbours(len(times), edges)
    rest = _measure_rest(times, after, dealt)
    chain: set[int] = set()
    ahead: Sequence[int] = range(len(times))
    while ahead:
        first = max(ahead, key=rest.__getitem__)
        chain.add(first)
        ahead = after[first]
    return list(_list_ready(after, [(i not in chain, -each) for i, each in enumerate(rest)]))


def _list_ready(after: Sequence[Sequence[int]], keys: Sequence[tuple[float, ...]]) -> Iterator[int]:
    """Yields steps behind all that they wait for; of those that may come next, the least key's."""
    missing = Counter(itertools.chain.from_iterable(after))
    ready = [(key, index) for index, key in enumerate(keys) if not missing[index]]
    heapq.heapify(ready)
    while ready:
        _, index = heapq.heappop(ready)
        yield index
        for follower in after[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (keys[follower], follower))


class _Lanes:
    """Lanes that fill.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._ends = [0.0] * count
        self._last: list[int | None] = [None] * count
        self._end_of: dict[int, float] = {}

    def place(self, index: int, before: Sequence[int], time: float) -> int | None:
        """Places a step where it starts earliest, and returns the one before it there."""
        earliest = max((self._end_of[each] for each in before), default=0.0)
        followed = {*before}

        def rate(lane: int) -> tuple[float, bool, bool]:
            last = self._last[lane]
            # Behind what it waits for anyway no edge is added, in an empty lane neither.
            return max(earliest, self._ends[lane]), last not in followed, last is not None

        lane = min(range(len(self._ends)), key=rate)
        self._end_of[index] = self._ends[lane] = max(earliest, self._ends[lane]) + time
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


def _measure_rest(
    times: Sequence[float], after: Sequence[Sequence[int]], order: Sequence[int]
) -> list[float]:
    """Returns for each step the longest time from its start to the end of what waits for it."""
    rest = [0.0] * len(times)
    for index in reversed(order):
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
