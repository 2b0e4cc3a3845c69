"""Edges of graphs: adding all of them at once, and reading them back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from tracegraph.runtime.cuda.driver.calls import DriverCalls, Port


class Edge(NamedTuple):
    """An edge as a graph has it.

    Attributes:
        first: handle of the node that the second one waits for.
        second: handle of the node that waits.
        port: of the first node, see `Port`.
        is_programmatic: the second node's kernel waits by itself.
    """

    first: int
    second: int
    port: int
    is_programmatic: bool


def make_edge(first: int, second: int, port: Port = Port.COMPLETE) -> Edge:
    """Returns the edge from one node to another that may start at a port of the first.

    Example:
        >>> make_edge(64, 65, Port.LAUNCH_ORDER)
        Edge(first=64, second=65, port=2, is_programmatic=True)
    """
    return Edge(first, second, int(port), port is not Port.COMPLETE)


class EdgeCalls(DriverCalls):
    """Calls on the edges of graphs."""

    def add_edges(self, graph: int, edges: Collection[Edge]) -> None:
        """Adds edges to a graph: one call per port, see Note [Ports of edges].

        Args:
            graph: it may be inside of a conditional node.
            edges: between its nodes; no two of them join the same nodes.
        """
        name = self._name_with_data("cuGraphAddDependencies")
        for port in Port:
            added = [each for each in edges if each.port == port]
            if not added:
                continue
            firsts = [self._api.CUgraphNode(each.first) for each in added]
            seconds = [self._api.CUgraphNode(each.second) for each in added]
            # Without data an edge is a full one.
            data = [self._make_data(port)] * len(added) if port else None
            shown = f"graph={graph:#x}, {len(added)} edges of port {port}"
            self._call(name, graph, firsts, seconds, data, len(added), shown=shown)

    def list_edges(self, graph: int, room: int) -> frozenset[Edge]:
        """Returns the edges of a graph.

        Args:
            graph: it may be inside of a conditional node.
            room: how many edges are read at most.
        """
        name = self._name_with_data("cuGraphGetEdges")
        firsts, seconds, data, count = self._call(name, graph, room)
        programmatic = self._find_programmatic_type()
        found = zip(firsts, seconds, data, range(int(count)), strict=False)
        return frozenset(
            Edge(int(first), int(second), int(each.from_port), int(each.type) == programmatic)
            for first, second, each, _ in found
        )

    def _name_with_data(self, name: str) -> str:
        """Returns the function for edges with data, which CUDA 12 has under a name of its own."""
        return f"{name}_v2" if hasattr(self._api, f"{name}_v2") else name

    def _make_data(self, port: Port) -> Any:
        data = self._api.CUgraphEdgeData()
        data.from_port = port.value
        data.type = self._find_programmatic_type()
        return data

    def _find_programmatic_type(self) -> int:
        types = self._api.CUgraphDependencyType
        return int(types.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value)
