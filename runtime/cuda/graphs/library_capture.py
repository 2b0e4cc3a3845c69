"""Calls of libraries, captured on a stream: each becomes a child graph, see Note [Child graphs]."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.graphs.library_moves import DISTANCE_BYTES, Move, find_moves
from tracegraph.runtime.cuda.graphs.node_actions import LibraryNode
from tracegraph.runtime.definition.nodes import BufferUse, Locate
from tracegraph.runtime.errors import InternalError


class Library(Protocol):
    """Enqueues the calls of a library that a graph holds as child graphs.

    A graph holds the libraries of its calls.
    """

    @property
    def stream(self) -> int:
        """The stream that its calls are captured on; 0 for any."""
        ...

    def enqueue(self, node: Any, locate: Locate, stream: int) -> None:
        """Enqueues one call on a stream that is being captured."""
        ...


class LibraryCapture:
    """Captures library calls, all on one stream that is made for the first of them."""

    def __init__(
        self, driver: CudaDriver, scratch: contextlib.ExitStack, libraries: Mapping[str, Library]
    ) -> None:
        self._driver, self._scratch, self._libraries = driver, scratch, libraries
        self._stream = 0

    @contextlib.contextmanager
    def run(self, node: LibraryNode, locate: Locate) -> Iterator[int]:
        """Yields the graph of one library call."""
        graph = self._capture(self.find_library(node), node, locate)
        try:
            yield graph
        finally:
            self._driver.destroy_graph(graph)

    def find_library(self, node: LibraryNode) -> Library:
        """Returns the library that computes a node."""
        library = self._libraries.get(node.kind)
        if library is None:
            raise InternalError(
                f"no library computes nodes of kind `{node.kind}`",
                where=f"{node.kind} {node.name}, libraries: {', '.join(self._libraries) or 'none'}",
                why="such a node becomes a call of a library",
            )
        return library

    def find_moves(
        self, node: LibraryNode, child: int, locate: Locate, movable: Collection[str]
    ) -> Mapping[str, tuple[Move, ...]]:
        """Returns where a library's nodes have the addresses of buffers that are to move.

        Args:
            node: of the call.
            child: handle of the child node that holds it.
            locate: returns the address of a byte range, as when it was captured.
            movable: names of the buffers.
        """
        named = dict.fromkeys(use.buffer for use in node.ranges)
        moved = [name for name in named if name in movable]
        distances = {name: (index + 1) * DISTANCE_BYTES for index, name in enumerate(moved)}
        if not distances:
            return {}

        def locate_further(use: BufferUse) -> int:
            return locate(use) + distances.get(use.buffer, 0)

        starts = {name: locate(BufferUse(name, 0, 0)) for name in distances}
        first = self._driver.list_captured(self._driver.find_child(child))
        with self.run(node, locate_further) as graph:
            second = self._driver.list_captured(graph)
        return find_moves(first, second, starts, distances)

    def _capture(self, library: Library, node: LibraryNode, locate: Locate) -> int:
        stream = library.stream
        if not stream:
            stream = self._stream = self._stream or self._create_stream()
        self._driver.begin_capture(stream)
        try:
            library.enqueue(node, locate, stream)
        except BaseException:
            self._driver.abort_capture(stream)
            raise
        return self._driver.end_capture(stream)

    def _create_stream(self) -> int:
        stream = self._driver.create_stream()
        self._scratch.callback(self._driver.destroy_stream, stream)
        return stream
