"""GraphData: the nodes, edges and buffers of a captured graph, as records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from tracegraph.graph_pictures.records import BufferData, EdgeData, NodeData, PartData

# What reading a node takes beside its work, in bytes that an H200 moves in that time.
NODE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class GraphData:
    """A captured graph.

    Attributes:
        name: of the captured function.
        parts: graphs and eager parts in the order in which they run, each followed by the bodies
            of its branches and loops.
        nodes: in program order, part by part.
        edges: of all parts.
        buffers: by place in the arena.
    """

    name: str
    parts: tuple[PartData, ...]
    nodes: tuple[NodeData, ...]
    edges: tuple[EdgeData, ...]
    buffers: tuple[BufferData, ...]

    def list_nodes(self, part: int) -> list[NodeData]:
        """Returns the nodes of a part."""
        return [node for node in self.nodes if node.part == part]

    def dependencies(self, index: int) -> tuple[int, ...]:
        """Returns the indices of the nodes that a node waits for."""
        return tuple(edge.first for edge in self._into[index])

    def dependents(self, index: int) -> tuple[int, ...]:
        """Returns the indices of the nodes that wait for a node."""
        return tuple(edge.second for edge in self.edges if edge.first == index)

    def edges_into(self, index: int) -> tuple[EdgeData, ...]:
        """Returns the edges that end at a node."""
        return tuple(self._into[index])

    def critical_path(self, part: int = 0) -> tuple[int, ...]:
        """Returns the chain of nodes that takes longest, by an estimate.

        A node counts as its bytes and four MiB, which is what an H200 moves in the time that a
        node costs at least. Loops count as one node.

        Args:
            part: its number.
        """
        best: dict[int, tuple[int, int | None]] = {}
        for node in self.list_nodes(part):
            before = max(self.dependencies(node.index), key=lambda i: best[i][0], default=None)
            so_far = 0 if before is None else best[before][0]
            best[node.index] = so_far + node.nbytes + NODE_BYTES, before
        last = max(best, key=lambda index: best[index][0], default=None)
        path: list[int] = []
        while last is not None:
            path.append(last)
            last = best[last][1]
        return tuple(reversed(path))

    @functools.cached_property
    def _into(self) -> list[list[EdgeData]]:
        into: list[list[EdgeData]] = [[] for _ in self.nodes]
        for edge in self.edges:
            into[edge.second].append(edge)
        return into

    def describe_part(self, part: PartData) -> str:
        """Returns what a picture calls a part, as ``body 0 of 5: while loop``."""
        if part.owner is None:
            return f"{part.kind} of `{self.name}`"
        owner = self.nodes[part.owner]
        return f"body {part.body} of {owner.index}: {owner.kind} {owner.name}"

    def __str__(self) -> str:
        return "\n".join(self._list_lines())

    def _list_lines(self) -> Iterator[str]:
        yield f"`{self.name}`: {len(self.nodes)} nodes, {len(self.edges)} edges"
        for part in self.parts:
            yield self.describe_part(part)
            for node in self.list_nodes(part.number):
                waits = [
                    f"{edge.first}{'~' if edge.port == 'programmatic' else ''}"
                    for edge in self._into[node.index]
                ]
                after = f"  after {', '.join(waits)}" if waits else ""
                where = f"  # {node.where}" if node.where else ""
                yield f"  {node}{after}{where}"
