"""StreamUses: blocks that were freed while streams other than their own may still use them.

A block is allocated again on its own stream without waiting, since work of one stream runs in
order. Work of another stream is known only by `record_stream`. Such a block waits here after it was
freed: one event per stream is recorded, and the block returns to its pool when all are over.

During a capture events can be neither recorded nor queried on the captured streams. Then the block
waits until no capture is under way, or, where reuse inside of captures is on, until all streams
that used it have joined its own stream.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource


class FreeMarker(NamedTuple):
    """The last nodes that may use a block which was freed inside of a capture."""

    order: CaptureOrder
    nodes: frozenset[int]


class StreamUses:
    """Holds freed blocks back until other streams have finished with them.

    Not locked: every method is called under the lock of the allocator.

    Args:
        events: records events on streams and queries them.
        put_back: called with each block that no stream uses any more.
    """

    def __init__(self, events: EventSource, put_back: Callable[[Block], None]) -> None:
        self._events = events
        self._put_back = put_back
        # One queue per stream, so that a slow stream does not hold up the blocks of another.
        self._pending: dict[int, collections.deque[tuple[Any, Block]]] = {}
        self._deferred: dict[Block, FreeMarker | None] = {}
        self._captures: dict[PoolId, CaptureOrder | None] = {}
        self._uses_in_captures: dict[Block, set[int]] = {}

    @property
    def is_capturing(self) -> bool:
        """True while any capture is under way."""
        return bool(self._captures)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that wait here, each once."""
        pending = (block for queue in self._pending.values() for _, block in queue)
        return tuple(dict.fromkeys((*pending, *self._deferred)))

    def advance(self, stream: int) -> None:
        """Puts back what an allocation on ``stream`` may use again; runs at every allocation."""
        if self._captures:
            self.find_reusable(stream)
        elif self._pending or self._deferred:
            self.poll()

    def record(self, block: Block, stream: int) -> None:
        """Notes that ``stream`` uses ``block``. Its own stream needs no note."""
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)
        if self._captures:
            self._uses_in_captures.setdefault(block, set()).add(stream)

    def defer(self, block: Block) -> None:
        """Holds a freed block with stream uses back until these uses are over.

        Where recording an event fails, the block keeps its uses and waits for the next `poll`.
        """
        if self._captures:
            self._deferred[block] = self._mark(block)
            return
        # Uses of a capture that is over by now count like others: its graph may be replaying.
        self._uses_in_captures.pop(block, None)
        self._deferred[block] = None
        self._record_events(block)

    def poll(self) -> None:
        """Puts back the blocks whose events are over. Does nothing while a capture is under way."""
        if self._captures or not (self._pending or self._deferred):
            return
        self._record_deferred()
        for stream, queue in tuple(self._pending.items()):
            while queue and self._events.is_done(queue[0][0]):
                self._finish(*queue.popleft())
            self._drop_if_empty(stream)

    def synchronize_all(self, pool: Pool | None = None) -> None:
        """Waits on the host for all events and puts their blocks back.

        Args:
            pool: only the events of blocks of this private pool; None for all.

        Raises:
            InternalError: a capture is under way.
        """
        if self._captures:
            raise InternalError(
                "cannot wait for events while a capture is under way",
                where=f"capture into the pools {', '.join(map(str, self._captures))}",
                why="a capture records work without running it, so its events are never over",
            )
        self._record_deferred()
        for stream, queue in tuple(self._pending.items()):
            for entry in tuple(queue):
                event, block = entry
                if pool is None or block.size_class.pool_id == pool.pool_id:
                    self._events.synchronize(event)
                    queue.remove(entry)
                    self._finish(event, block)
            self._drop_if_empty(stream)

    def begin_capture(self, pool_id: PoolId, order: CaptureOrder | None = None) -> None:
        """Starts to defer: from now on no event is recorded or queried.

        Args:
            pool_id: the pool that the capture allocates from; names the capture.
            order: of the capture's nodes, where blocks may be reused inside of it; None otherwise.

        Raises:
            InternalError: a capture into this pool is under way.
        """
        if pool_id in self._captures:
            raise _make_capture_error(pool_id, "a capture into this pool is under way already")
        self._captures[pool_id] = order

    def end_capture(self, pool_id: PoolId) -> None:
        """Ends a capture. What it deferred is handled by the next `poll` after the last capture.

        Raises:
            InternalError: no capture into this pool is under way.
        """
        if pool_id not in self._captures:
            raise _make_capture_error(pool_id, "no capture into this pool is under way")
        del self._captures[pool_id]

    def settle(self, blocks: Iterable[Block]) -> None:
        """Sets right, after an interrupt, which blocks wait here: Note [Interrupts].

        Args:
            blocks: all that were freed and not put back.
        """
        freed = dict.fromkeys(blocks, 0)
        for stream, queue in tuple(self._pending.items()):
            # A block with uses left was interrupted while its events were recorded.
            kept = [entry for entry in queue if entry[1] in freed and not entry[1].stream_uses]
            for _, block in kept:
                freed[block] += 1
            self._pending[stream] = collections.deque(kept)
        for block, event_count in freed.items():
            block.event_count = event_count
        for block in tuple(self._deferred):
            if block not in freed or not block.stream_uses:
                del self._deferred[block]
        for block in freed:
            if block.stream_uses and block not in self._deferred:
                self._deferred[block] = self._mark(block) if self._captures else None

    def find_reusable(self, stream: int) -> None:
        """Puts back the blocks of ``stream`` whose users have all joined it in its capture.

        Does nothing where ``stream`` is not captured, or its capture came without an order.
        """
        order = self._find_order(stream)
        if order is None:
            return
        for block, marker in tuple(self._deferred.items()):
            if block.stream != stream or marker is None or marker.order is not order:
                continue
            if order.has_passed(marker.nodes, stream):
                del self._deferred[block]
                self._uses_in_captures.pop(block, None)
                # The graph itself orders these uses before all that is captured from now on.
                block.stream_uses = None
                self._put_back(block)

    def _find_order(self, stream: int) -> CaptureOrder | None:
        for order in self._captures.values():
            if order is not None and order.has_stream(stream):
                return order
        return None

    def _mark(self, block: Block) -> FreeMarker | None:
        order = self._find_order(block.stream)
        streams = (block.stream, *(block.stream_uses or ()))
        if order is None or not all(order.has_stream(stream) for stream in streams):
            return None
        nodes = frozenset().union(*(order.get_terminals(stream) for stream in streams))
        # Without any node there is nothing by which a join could be seen.
        return FreeMarker(order, nodes) if nodes else None

    def _record_deferred(self) -> None:
        for block in tuple(self._deferred):
            # The graph joins all of its streams, so what was used inside of it is over by then.
            uses_in_captures = self._uses_in_captures.pop(block, None)
            if uses_in_captures and block.stream_uses:
                block.stream_uses -= uses_in_captures
            self._record_events(block)

    def _record_events(self, block: Block) -> None:
        # Sorted, so that equal programs give equal orders of events.
        streams = sorted(block.stream_uses or ())
        events = self._record_all(streams)
        block.event_count = len(events)
        for stream, event in zip(streams, events, strict=True):
            self._pending.setdefault(stream, collections.deque()).append((event, block))
        # Until here it counts as deferred: Note [Interrupts].
        block.stream_uses = None
        del self._deferred[block]
        if not events:
            self._put_back(block)

    def _record_all(self, streams: Iterable[int]) -> list[Any]:
        events: list[Any] = []
        try:
            for stream in streams:
                events.append(self._events.record(stream))
        except BaseException:
            for event in events:
                self._events.release(event)
            raise
        return events

    def _finish(self, event: Any, block: Block) -> None:
        self._events.release(event)
        block.event_count -= 1
        if block.event_count == 0:
            self._put_back(block)

    def _drop_if_empty(self, stream: int) -> None:
        if not self._pending[stream]:
            del self._pending[stream]


def _make_capture_error(pool_id: PoolId, why: str) -> InternalError:
    return InternalError(
        f"cannot begin or end a capture into the pool {pool_id}",
        where="allocator, begin and end of captures",
        why=why,
    )
