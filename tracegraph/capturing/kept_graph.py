"""KeptGraph: a captured graph whose memory may be given back, and taken again when it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.released_results import detach_results
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.user_memory.live_plans import watch_plan


class KeptGraph:
    """A captured graph with what it is made of.

    Args:
        graph: new.
        recipe: makes it again, without tracing or compiling.
    """

    def __init__(self, graph: CapturedGraph, recipe: LoweredCapture) -> None:
        self._graph: CapturedGraph | None = graph
        self._recipe = recipe
        self._lock = threading.Lock()
        watch_plan(recipe.lowered.plan, graph.replay)

    @property
    def lowered(self) -> Lowered:
        """Its program, plan and definition."""
        return self._recipe.lowered

    @property
    def checked(self) -> CheckedGraph:
        """The traced graph that it was captured from."""
        return self._recipe.checked

    def peek(self) -> CapturedGraph | None:
        """Returns the graph; None while it is released."""
        return self._graph

    def find(self) -> CapturedGraph:
        """Returns the graph; one that was released is made again, at other addresses.

        Raises:
            OutOfMemoryError: the pool cannot hold it; it stays released.
        """
        graph = self._graph
        if graph is not None:
            return graph
        with self._lock:
            if self._graph is None:
                self._graph = self._recipe.instantiate()
                watch_plan(self._recipe.lowered.plan, self._graph.replay)
            return self._graph

    def release(self) -> None:
        """Drops the graph; results that are still held get memory of their own first."""
        with self._lock:
            if self._graph is not None:
                detach_results(self._graph)
                self._graph = None


def restore_graphs(graphs: Iterable[KeptGraph]) -> None:
    """Makes all graphs again that were released, those with most scratch first.

    The others have theirs in it.

    Raises:
        OutOfMemoryError: the pool cannot hold them; those that are missing stay released.
    """

    def read_scratch(graph: KeptGraph) -> int:
        return graph.lowered.definition.arena_size.scratch_bytes

    for graph in sorted(graphs, key=read_scratch, reverse=True):
        graph.find()
