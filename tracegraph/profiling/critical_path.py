"""Times of nodes and edges between them → when each may start, the longest chain, lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each node of a part may start, if there is room for all at the same time.

    Attributes:
        starts: microseconds from the start of the part, by node.
        path: the longest chain of nodes that wait for one another.
        length_us: of that chain.
    """

    starts: Mapping[int, float]
    path: tuple[int, ...]
    length_us: float


def schedule(
    nodes: Sequence[int], waits: Mapping[int, Sequence[int]], times: Mapping[int, float]
) -> Schedule:
    """Returns the earliest starts and the critical path.

    Args:
        nodes: in an order in which each comes after those that it waits for.
        waits: the nodes that each waits for.
        times: microseconds of each; one that is missing takes no time.

    Example:
        >>> schedule([0, 1, 2, 3], {2: [0, 1], 3: [1]}, {0: 1.0, 1: 5.0, 2: 2.0, 3: 1.0}).path
        (1, 2)
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for node in nodes:
        last = max(waits.get(node, ()), key=lambda each: ends[each], default=None)
        before[node] = last
        starts[node] = 0.0 if last is None else ends[last]
        ends[node] = starts[node] + times.get(node, 0.0)
    at = max(ends, key=lambda each: ends[each], default=None)
    length_us = 0.0 if at is None else ends[at]
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = before[at]
    return Schedule(starts, tuple(reversed(path)), length_us)


def assign_lanes(found: Schedule, times: Mapping[int, float]) -> dict[int, int]:
    """Returns a lane for each node, so that no two nodes of a lane run at the same time.

    The critical path has lane 0 for itself.

    Args:
        found: the schedule.
        times: microseconds of each node.

    Example:
        >>> times = {0: 1.0, 1: 5.0, 2: 2.0, 3: 1.0}
        >>> found = schedule([0, 1, 2, 3], {2: [0, 1], 3: [1]}, times)
        >>> assign_lanes(found, times)
        {1: 0, 2: 0, 0: 1, 3: 1}
    """
    lanes = dict.fromkeys(found.path, 0)
    free_at: list[float] = []
    for node in sorted(found.starts, key=lambda each: (found.starts[each], each)):
        if node in lanes:
            continue
        start = found.starts[node]
        lane = next((i for i, end in enumerate(free_at) if end <= start), len(free_at))
        end = start + times.get(node, 0.0)
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        lanes[node] = lane + 1
    return lanes
