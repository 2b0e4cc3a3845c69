"""GraphTimes: all that was measured of a captured graph, as records."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from typing import Any

from tracegraph.graph_pictures.records import EdgeData
from tracegraph.profiling.peaks import Peaks
from tracegraph.profiling.records import LineProfile, NodeProfile, PartProfile


@dataclasses.dataclass(frozen=True)
class GraphTimes:
    """The times of a captured graph.

    More than six fields because it is all that was measured.

    Attributes:
        name: of the captured function.
        device: what it was measured on, as ``cuda:0, NVIDIA H200``.
        peaks: what the device can do at most.
        floor_us: what a node that does nothing takes in a chain; None on the host device.
        parts: graphs, eager parts and bodies, in the order of `get_graph_data`.
        nodes: in the order of `get_graph_data`.
        edges: the same.
        notes: what to know of these times.
    """

    name: str
    device: str
    peaks: Peaks
    floor_us: float | None
    parts: tuple[PartProfile, ...]
    nodes: tuple[NodeProfile, ...] = dataclasses.field(repr=False)
    edges: tuple[EdgeData, ...] = dataclasses.field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def whole_us(self) -> float:
        """Microseconds of one replay: of its graphs and eager parts, one after another."""
        return sum(part.whole_us for part in self.parts if part.whole_us is not None)

    @property
    def path_us(self) -> float:
        """Microseconds of the critical paths of its graphs and eager parts, one after another."""
        return sum(part.path_us for part in self.parts if part.kind != "body")

    def critical_path(self, part: int = 0) -> tuple[int, ...]:
        """Returns the indices of the nodes of the longest chain of a part, by warm times."""
        return self.parts[part].path

    def by_node(self) -> tuple[NodeProfile, ...]:
        """Returns the nodes, those with most time first; those that were not timed come last."""
        return tuple(sorted(self.nodes, key=lambda node: (-(node.warm_us or 0.0), node.index)))

    def by_line(self) -> tuple[LineProfile, ...]:
        """Returns the user's lines, those with most time on a critical path first.

        The nodes inside of branches and loops are not counted: the branch or loop is.
        """
        bodies = {part.number for part in self.parts if part.kind == "body"}
        groups: defaultdict[str, list[NodeProfile]] = defaultdict(list)
        for node in self.nodes:
            if node.part not in bodies:
                groups[node.where].append(node)
        lines = [_sum_line(where, nodes, self.peaks) for where, nodes in groups.items()]
        return tuple(sorted(lines, key=lambda line: (-line.path_us, -line.warm_us, line.where)))

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts, lists, numbers and texts, which JSON takes."""
        fields = dataclasses.asdict(self)
        totals = {"whole_us": self.whole_us, "path_us": self.path_us}
        lines = [dataclasses.asdict(line) for line in self.by_line()]
        return json.loads(json.dumps({**fields, **totals, "lines": lines}))


def _sum_line(where: str, nodes: list[NodeProfile], peaks: Peaks) -> LineProfile:
    critical = [node for node in nodes if node.is_critical]
    is_cold = any(node.cold_us is not None for node in nodes)
    cold_us = sum(node.cold_us or node.warm_us or 0.0 for node in nodes)
    nbytes = sum(node.nbytes for node in nodes)
    share = None
    if is_cold and cold_us and peaks.memory_rate:
        # What was not timed moves its bytes in no time.
        timed = sum(node.nbytes for node in nodes if node.cold_us is not None)
        share = timed / (1e-6 * cold_us) / peaks.memory_rate
    return LineProfile(
        where,
        len(nodes),
        len(critical),
        sum(node.warm_us or 0.0 for node in nodes),
        sum(node.warm_us or 0.0 for node in critical),
        cold_us if is_cold else None,
        nbytes,
        share,
    )
