"""Where the nodes of a part are in a picture: one row per level, one column per lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tracegraph.graph_pictures.graph_data import GraphData


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of the nodes of one part.

    Attributes:
        places: lane and level of each node, by its index; both start at 0.
        lanes: how many lanes there are.
        levels: how many levels there are.
    """

    places: Mapping[int, tuple[int, int]]
    lanes: int
    levels: int


def lay_out(data: GraphData, part: int) -> Layout:
    """Returns the places of a part's nodes.

    The level of a node is the length of the longest chain that leads to it. So nodes of one level
    may run side by side. A node takes the lane of a node that it waits for, if it is free there:
    the critical path is one straight line where it can be.

    Args:
        data: the graph.
        part: its number.
    """
    levels: dict[int, int] = {}
    for node in data.list_nodes(part):
        before = data.dependencies(node.index)
        levels[node.index] = max((levels[index] + 1 for index in before), default=0)
    critical = set(data.critical_path(part))
    places: dict[int, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    for index in sorted(levels, key=lambda index: (levels[index], index not in critical, index)):
        wanted = [places[each][0] for each in data.dependencies(index)]
        lane = 0 if index in critical else _find_lane(wanted, levels[index], taken)
        places[index] = lane, levels[index]
        taken.add(places[index])
    lanes = max((lane + 1 for lane, _ in taken), default=0)
    return Layout(places, lanes, max(levels.values(), default=-1) + 1)


def _find_lane(wanted: list[int], level: int, taken: set[tuple[int, int]]) -> int:
    free = [lane for lane in wanted if (lane, level) not in taken]
    if free:
        return free[0]
    lane = 0
    while (lane, level) in taken:
        lane += 1
    return lane
