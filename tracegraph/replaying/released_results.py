"""Results that are still held get memory of their own, so that a graph's memory can go."""

from __future__ import annotations

from tracegraph.replaying.partial_graph import PartialGraph
from tracegraph.replaying.replayable_graph import ReplayableGraph


def detach_results(graph: ReplayableGraph) -> None:
    """Gives results and state of a graph that are still held memory of their own.

    Args:
        graph: with all of its instances.
    """
    graphs = graph.list_instances() if isinstance(graph, PartialGraph) else [graph]
    for each in graphs:
        with each.lock:
            each.replay.home.vacate()
