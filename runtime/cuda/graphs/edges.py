"""Edges of a graph as they were asked for, against those that the driver has.

Note [Ports of edges]
    Drivers from 580.126 to 610.57 give all edges of one call of ``cuGraphAddDependencies`` the
    data of the first. A kernel that may start too early reads what is not written yet, and no call
    fails. So each call adds edges of one port only, and once a graph is built its edges are read
    back: one call per graph, before it is instantiated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.edge_calls import Edge
from tracegraph.runtime.errors import CudaError

_SHOWN = 3


def check_edges(
    driver: CudaDriver, graph: int, added: Collection[Edge], label: str, names: Mapping[int, str]
) -> None:
    """Checks that a graph has the edges that were added to it, and no others.

    Args:
        driver: the CUDA driver.
        graph: its handle.
        added: its edges, each once.
        label: what errors call the graph.
        names: what errors call its nodes, by handle.

    Raises:
        CudaError: the driver has given an edge another port, or has others.
    """
    if not added:
        return
    wanted = frozenset(added)
    # With room for one more, so that an edge too many is seen.
    found = driver.list_edges(graph, len(wanted) + 1)
    if found == wanted:
        return
    version = driver.read_version()
    raise CudaError(
        "the CUDA driver has other edges in a graph than were added to it",
        where=f"{label}: added {_format_edges(wanted - found, names)}; "
        f"found {_format_edges(found - wanted, names)}",
        why="a kernel could start before its inputs are written; the driver serves "
        f"CUDA {version // 1000}.{version % 1000 // 10}",
        fix="install another NVIDIA driver, and report this text with the output of nvidia-smi",
        anchor="cuda-driver",
    )


def _format_edges(edges: Set[Edge], names: Mapping[int, str]) -> str:
    shown = [_format_edge(edge, names) for edge in sorted(edges)[:_SHOWN]]
    more = [f"{len(edges) - _SHOWN} more"] if len(edges) > _SHOWN else []
    return ", ".join([*shown, *more]) or "nothing else"


def _format_edge(edge: Edge, names: Mapping[int, str]) -> str:
    first, second = (names.get(each, hex(each)) for each in (edge.first, edge.second))
    kind = "programmatic" if edge.is_programmatic else "full"
    return f"a {kind} edge of port {edge.port} from {first} to {second}"
