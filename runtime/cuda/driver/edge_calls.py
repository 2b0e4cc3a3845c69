"""Edges of graphs: adding those with a port of their own, and reading all of them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tracegraph.runtime.cuda.driver.calls import Dependency, DriverCalls, Port


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


def make_edge(dependency: Dependency, node: int) -> Edge:
    """Returns the edge that a dependency of a node asks for.

    Example:
        >>> make_edge((64, Port.LAUNCH_ORDER), 65)
        Edge(first=64, second=65, port=2, is_programmatic=True)
    """
    first, port = dependency
    return Edge(first, node, int(port), port is not Port.COMPLETE)


class EdgeCalls(DriverCalls):
    """Calls on the edges of graphs."""

    def list_edges(self, graph: int, room: int) -> frozenset[Edge]:
        """Returns the edges of a graph.

        Args:
            graph: it may be inside of a conditional node.
            room: how many edges are read at most.
        """
        # CUDA 12 has edges with data under a name of their own.
        has_second = hasattr(self._api, "cuGraphGetEdges_v2")
        name = "cuGraphGetEdges_v2" if has_second else "cuGraphGetEdges"
        firsts, seconds, data, count = self._call(name, graph, room)
        programmatic = self._find_programmatic_type()
        found = zip(firsts, seconds, data, range(int(count)), strict=False)
        return frozenset(
            Edge(int(first), int(second), int(each.from_port), int(each.type) == programmatic)
            for first, second, each, _ in found
        )

    def _add_programmatic(self, graph: int, dependencies: Sequence[Dependency], node: int) -> None:
        """Adds the edges with a port: one call per port, see Note [Ports of edges]."""
        ports = {port for _, port in dependencies}
        for port in (Port.PROGRAMMATIC, Port.LAUNCH_ORDER):
            if port not in ports:
                continue
            firsts = [self._api.CUgraphNode(each) for each, own in dependencies if own is port]
            has_second = hasattr(self._api, "cuGraphAddDependencies_v2")
            name = "cuGraphAddDependencies_v2" if has_second else "cuGraphAddDependencies"
            seconds = [self._api.CUgraphNode(node)] * len(firsts)
            data = [self._make_data(port)] * len(firsts)
            self._call(name, graph, firsts, seconds, data, len(firsts))

    def _make_data(self, port: Port) -> Any:
        data = self._api.CUgraphEdgeData()
        data.from_port = port.value
        data.type = self._find_programmatic_type()
        return data

    def _find_programmatic_type(self) -> int:
        types = self._api.CUgraphDependencyType
        return int(types.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value)
