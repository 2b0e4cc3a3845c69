"""CaptureUnderway: what other threads wait for while a signature is captured."""

from __future__ import annotations

import threading

from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.partial_graph import PartialGraph


class CaptureUnderway:
    """A capture that is not in the cache yet, see Note [Captures at once]."""

    def __init__(self) -> None:
        self._is_decided = threading.Event()
        self._graph: CapturedGraph | None = None
        self._thread = threading.get_ident()

    @property
    def is_abandoned(self) -> bool:
        """True when there is nothing to wait for: an interrupt has ended the capture.

        A thread that asks for a capture of its own, before there is a graph, is not inside it.
        """
        if self._is_decided.is_set():
            return self._graph is None
        return self._thread == threading.get_ident()

    def announce(self, graph: CapturedGraph) -> None:
        """Says that there is a graph, which is not verified.

        Waiting calls take one with eager parts, since its verification may wait for them.
        """
        if isinstance(graph, PartialGraph):
            self._graph = graph
            self._is_decided.set()

    def end(self) -> None:
        """Says that the capture is in the cache, or has failed."""
        self._graph = None
        self._is_decided.set()

    def wait(self) -> CapturedGraph | None:
        """Waits; returns the graph that is being verified, None if the capture has ended."""
        self._is_decided.wait()
        return self._graph
