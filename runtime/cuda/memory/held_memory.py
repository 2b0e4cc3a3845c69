"""HeldMemory: memory of JAX's own whose array is gone while a stream of the user may read it."""

from __future__ import annotations

import collections
import weakref
from typing import Any

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.streams.stream import Stream


class HeldMemory:
    """Keeps plain arrays until streams are done with them. Safe from several threads.

    JAX reuses the memory of a dropped array for the next one, and knows only its own stream. So
    what another stream uses is kept here: when the tg.Array over it dies, an event is
    recorded on each of its streams, and `poll` drops it when all of them are over.

    Args:
        order: of the streams of one GPU.
    """

    def __init__(self, order: JaxOrder) -> None:
        self._order = order
        self._events = CudaEvents(order.driver, order.find_handle)
        # By the identity of each array that lives.
        self._streams: dict[int, set[int]] = {}
        self._held: collections.deque[tuple[list[int], Any]] = collections.deque()

    def __len__(self) -> int:
        return len(self._held)

    def record(self, array: Any, memory: Any, stream: Stream) -> None:
        """Notes that a stream uses the memory of an array.

        Args:
            array: its memory is kept after its death.
            memory: a plain array that keeps its bytes.
            stream: which; JAX's own needs no note.
        """
        self.poll()
        number = self._order.number_stream(stream)
        if not number:
            return
        streams = self._streams.setdefault(id(array), set())
        if not streams:
            # At interpreter exit the system frees all memory by itself.
            weakref.finalize(array, self._keep, id(array), memory, streams).atexit = False
        streams.add(number)

    def poll(self) -> None:
        """Drops what no stream uses any more; never waits, and is not for finalisers."""
        for _ in range(len(self._held)):
            try:
                events, memory = self._held.popleft()
            except IndexError:
                # Another thread was faster.
                return
            if not all(map(self._events.is_done, events)):
                self._held.append((events, memory))
                continue
            for event in events:
                self._events.release(event)

    def _keep(self, identity: int, memory: Any, streams: set[int]) -> None:
        # A finaliser: it calls the driver, and never JAX.
        self._streams.pop(identity, None)
        self._held.append(([self._events.record(stream) for stream in sorted(streams)], memory))
