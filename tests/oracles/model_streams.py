"""The part of the slow model that knows which streams use a piece, and when they are done."""

from __future__ import annotations

import abc
from collections.abc import Callable

from tests.oracles.model_records import Piece
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.pool_id import PoolId


class ModelStreams(abc.ABC):
    """Holds freed pieces back for as long as another stream uses them.

    Attributes:
        captures: the captures under way, with the order of their nodes if that is heeded.
        queues: per stream (piece, number of its event), in the order of the events.
        recorded: how many events each stream has had.
        finished: how many of them are over.
        deferred: pieces that were freed during a capture.
    """

    def __init__(self) -> None:
        self.captures: dict[PoolId, CaptureOrder | None] = {}
        self.queues: dict[int, list[tuple[Piece, int]]] = {}
        self.recorded: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.deferred: list[Piece] = []

    @property
    def is_busy(self) -> bool:
        """No event may be recorded or asked."""
        return bool(self.captures)

    @abc.abstractmethod
    def put_back(self, piece: Piece) -> None:
        """Takes a piece that is not used any more."""

    def record_stream(self, piece: Piece, stream: int) -> None:
        if stream == piece.segment.stream:
            return
        piece.uses.add(stream)
        if self.is_busy:
            piece.uses_in_captures.add(stream)

    def defer(self, piece: Piece) -> None:
        """Takes a freed piece that other streams use."""
        if self.is_busy:
            piece.marker = self.mark(piece)
            self.deferred.append(piece)
        else:
            piece.uses_in_captures = set()
            self.record_events(piece)

    def record_events(self, piece: Piece) -> None:
        streams = sorted(piece.uses - piece.uses_in_captures)
        piece.uses, piece.uses_in_captures = set(), set()
        piece.events = len(streams)
        for stream in streams:
            self.recorded[stream] = self.recorded.get(stream, 0) + 1
            self.queues.setdefault(stream, []).append((piece, self.recorded[stream]))
        if not streams:
            self.put_back(piece)

    def record_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for piece in deferred:
            self.record_events(piece)

    def poll(self) -> None:
        self.record_deferred()
        self.finish(lambda _, stream, number: number <= self.finished.get(stream, 0))

    def synchronize(self, pool: PoolId | None) -> None:
        self.record_deferred()
        for stream, queue in self.queues.items():
            mine = [number for piece, number in queue if pool in (None, piece.segment.pool)]
            self.finished[stream] = max([self.finished.get(stream, 0), *mine])
        self.finish(lambda piece, *_: pool in (None, piece.segment.pool))

    def finish(self, is_over: Callable[[Piece, int, int], bool]) -> None:
        for stream, queue in tuple(self.queues.items()):
            for entry in tuple(queue):
                if is_over(entry[0], stream, entry[1]):
                    queue.remove(entry)
                    entry[0].events -= 1
                    if entry[0].events == 0:
                        self.put_back(entry[0])
            if not queue:
                del self.queues[stream]

    def mark(self, piece: Piece) -> tuple[CaptureOrder, frozenset[int]] | None:
        streams = {piece.segment.stream, *piece.uses}
        for order in self.captures.values():
            if order is not None and all(order.has_stream(stream) for stream in streams):
                nodes = frozenset().union(*(order.get_terminals(one) for one in streams))
                return (order, nodes) if nodes else None
        return None

    def reuse_joined(self, stream: int) -> None:
        for piece in tuple(self.deferred):
            if piece.marker is None or piece.segment.stream != stream:
                continue
            order, nodes = piece.marker
            is_open = any(order is one for one in self.captures.values())
            if is_open and order.has_passed(nodes, stream):
                self.deferred.remove(piece)
                piece.uses, piece.uses_in_captures = set(), set()
                self.put_back(piece)
