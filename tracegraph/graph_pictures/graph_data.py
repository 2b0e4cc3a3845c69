"""GraphData: the nodes, edges and buffers of a captured graph, as records."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.graph_pictures.records import BufferData, EdgeData, NodeData, PartData
from tracegraph.graph_pictures.trace_executions import LaunchedGraph
from tracegraph.graph_pictures.trace_labels import TraceLabels, label_graphs

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

    @hides_own_frames
    def label_trace(
        self,
        path: str | os.PathLike[str],
        output: str | os.PathLike[str] | None = None,
        *,
        graph_id: int | Sequence[int] | None = None,
    ) -> TraceLabels:
        """Writes the user's lines and scopes into a trace of `jax.profiler`, at the graph's events.

        Each event of a node gets the node's line, scope, number and bytes. For each row with such
        events there is a further one, with the scopes as nested slices over the events.

        Args:
            path: of a ``.trace.json.gz`` or ``.trace.json``, or of the folder that was given to
                `jax.profiler.trace`, if one trace is in it.
            output: of the file to write, compressed if it ends in ``.gz``; None to replace the
                trace.
            graph_id: the number of the executable graph, where several of the trace have the same
                kernels; for a capture in several graphs a list, with one for each in their order.

        Returns:
            Which file was written, and how many replays and events of this graph are in it.

        Raises:
            ConfigError: there is no trace at the path, no replay of this graph is in it, or it
                cannot be told from others without `graph_id`.

        Example:
            >>> with jax.profiler.trace("profile"):  # doctest: +SKIP
            ...     y = jax.block_until_ready(step(x))
            >>> step.get_graph_data(x).label_trace("profile")  # doctest: +SKIP
            TraceLabels(path='profile/.../host.trace.json.gz', graph_ids=(4,), replays=1, ...)
        """
        return label_graphs(self.name, self._list_launched(), path, output, graph_id)

    def _list_launched(self) -> list[LaunchedGraph]:
        bodies: dict[int, tuple[NodeData, ...]] = {}
        for part in self.parts:
            if part.owner is not None:
                found = bodies.get(part.owner, ())
                bodies[part.owner] = (*found, *self.list_nodes(part.number))
        parts = {node.index: node.part for node in self.nodes}
        return [
            LaunchedGraph(
                tuple(self.list_nodes(part.number)),
                tuple(edge for edge in self.edges if parts[edge.first] == part.number),
                bodies,
            )
            for part in self.parts
            if part.kind == "graph"
        ]

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
