"""A graph definition → `GraphData`: nodes as the driver gets them, with the user's lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import BufferData, EdgeData, KernelData, NodeData, PartData
from tracegraph.runtime.definition.event_nodes import EventNode, HostEvent
from tracegraph.runtime.definition.graph import BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Node, list_nested
from tracegraph.runtime.definition.library_nodes import (
    CudnnNode,
    FfiCallNode,
    LibraryCallNode,
    MatmulNode,
)
from tracegraph.runtime.definition.nodes import BufferUse, CallNode, CopyNode, FillNode, KernelNode


def read_graph(
    definition: GraphDefinition,
    find_node_lines: Callable[[Node], str],
    buffer_lines: Mapping[str, str],
    find_scope: Callable[[Node], str] = lambda _: "",
) -> GraphData:
    """Returns a definition as records.

    A branch or a loop has the kernel that sets its handle as a node of its own before it, as in
    the driver's graph.

    Args:
        definition: the whole capture.
        find_node_lines: returns the user's lines of a node.
        buffer_lines: the user's line of a buffer, by its name.
        find_scope: returns the scope of a node.
    """
    reader = _Reader({slot.name: slot for slot in definition.slots}, find_node_lines, find_scope)
    for stage in definition.stages:
        reader.add_part(stage, PartData(0, "graph" if stage.is_captured else "eager"))
    buffers = tuple(
        BufferData(
            slot.name,
            slot.shape,
            slot.dtype.name,
            slot.nbytes,
            slot.offset,
            buffer_lines.get(slot.name, ""),
        )
        for slot in sorted(definition.slots, key=lambda slot: slot.offset)
    )
    parts, nodes = tuple(reader.parts), tuple(reader.nodes)
    return GraphData(definition.name, parts, nodes, tuple(reader.edges), buffers)


def list_sources(definition: GraphDefinition) -> list[Node]:
    """Returns the node of the definition behind each node of `read_graph`, in its order.

    Args:
        definition: the whole capture.
    """
    reader = _Reader({slot.name: slot for slot in definition.slots}, lambda _: "", lambda _: "")
    for stage in definition.stages:
        reader.add_part(stage, PartData(0, ""))
    return reader.sources


class _Reader:
    """Collects parts, nodes and edges; numbers follow the order of the parts."""

    def __init__(
        self,
        slots: Mapping[str, BufferSlot],
        find_node_lines: Callable[[Node], str],
        find_scope: Callable[[Node], str],
    ) -> None:
        self._slots, self._find_node_lines = slots, find_node_lines
        self._find_scope = find_scope
        self.parts: list[PartData] = []
        self.nodes: list[NodeData] = []
        self.edges: list[EdgeData] = []
        self.sources: list[Node] = []

    def add_part(self, part: Stage | Body, data: PartData) -> None:
        """Adds a graph with its nodes and edges, then the bodies inside of it."""
        number = len(self.parts)
        self.parts.append(PartData(number, data.kind, data.owner, data.body))
        first: list[int] = []
        last: list[int] = []
        for node in part.nodes:
            first.append(len(self.nodes))
            if isinstance(node, ConditionalNode):
                self._add_node(node.setter, number)
                self.edges.append(EdgeData(len(self.nodes) - 1, len(self.nodes)))
            last.append(len(self.nodes))
            self._add_node(node, number)
        for a, b in part.edges:
            port = "programmatic" if (a, b) in part.programmatic else "complete"
            self.edges.append(EdgeData(last[a], first[b], port))
        for a, b in _list_call_edges(part):
            self.edges.append(EdgeData(last[a], first[b]))
        for index, node in zip(last, part.nodes, strict=True):
            for body_number, body in enumerate(
                node.bodies if isinstance(node, ConditionalNode) else ()
            ):
                self.add_part(body, PartData(0, "body", index, body_number))

    def _add_node(self, node: Node, part: int) -> None:
        written = _list_written(node, self._slots)
        used = node.ranges or [self._take_whole(name) for name in node.arguments]
        reads = tuple(dict.fromkeys(use for use in used if use not in written))
        self.sources.append(node)
        self.nodes.append(
            NodeData(
                len(self.nodes),
                part,
                _name_kind(node),
                node.name,
                self._find_node_lines(node),
                _read_kernel(node),
                reads,
                written,
                self._find_scope(node),
            )
        )

    def _take_whole(self, name: str) -> BufferUse:
        return BufferUse(name, 0, self._slots[name].nbytes)


def _name_kind(node: Node) -> str:
    """Returns the kind of a node; an event is one on both devices."""
    point = node.executable if isinstance(node, CallNode) else None
    if isinstance(point, HostEvent):
        return EventNode(node.name, point.event, point.is_wait).kind
    return node.kind


def _list_written(node: Node, slots: Mapping[str, BufferSlot]) -> tuple[BufferUse, ...]:
    written: list[BufferUse] = []
    if isinstance(node, CallNode):
        written = [BufferUse(name, 0, slots[name].nbytes) for name in node.results]
    if isinstance(node, KernelNode):
        written = [use for use, is_written in node.uses if is_written]
    if isinstance(node, CopyNode | FillNode):
        written = [node.target]
    if isinstance(node, MatmulNode | LibraryCallNode):
        written = [*node.written]
    if isinstance(node, FfiCallNode):
        written = [use for use in node.outputs if use is not None]
    if isinstance(node, CudnnNode):
        written = [*node.written_ranges]
    if isinstance(node, ConditionalNode):
        written = [use for each in _list_inner(node) for use in _list_written(each, slots)]
    return tuple(dict.fromkeys(written))


def _list_inner(node: ConditionalNode) -> list[Node]:
    return [each for body in node.bodies for each in body.nodes]


def _read_kernel(node: Node) -> KernelData | None:
    if not isinstance(node, KernelNode):
        return None
    shape = node.shape
    return KernelData(node.code.symbol, shape.grid, shape.block, shape.cluster, shape.shared_bytes)


def _list_call_edges(part: Stage | Body) -> list[tuple[int, int]]:
    """Returns the edges between calls of handlers, which follow one another: they share memory."""
    calls = [
        index
        for index, node in enumerate(part.nodes)
        if any(isinstance(each, FfiCallNode) for each in list_nested([node]))
    ]
    return [pair for pair in itertools.pairwise(calls) if pair not in part.edges]
