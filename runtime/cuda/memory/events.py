"""CudaEvents: the events of a GPU for its allocators, recycled."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable

from tracegraph.runtime.cuda.driver.driver import CudaDriver


class CudaEvents:
    """Records events on streams and keeps those that were released. Safe from several threads.

    The driver records an event only on streams of the context that it was made in; the allocator of
    page-locked memory serves the streams of all GPUs.

    Args:
        driver: the CUDA driver. The thread that records an event needs a current context.
        find_stream: returns the driver's handle of a stream as it is named here.
    """

    def __init__(self, driver: CudaDriver, find_stream: Callable[[int], int] = int) -> None:
        self._driver, self._find_stream = driver, find_stream
        # Free events by context, found by the stream, and the place of each event among them.
        self._free: dict[int, collections.deque[int]] = {}
        self._free_of_stream: dict[int, collections.deque[int]] = {}
        self._homes: dict[int, collections.deque[int]] = {}
        # At interpreter exit the driver frees all events by itself.
        weakref.finalize(self, _destroy, driver, self._free).atexit = False

    def record(self, stream: int) -> int:
        """Returns an event that is done when all work enqueued on ``stream`` so far is.

        Raises:
            CudaError: the driver refused.
        """
        handle = self._find_stream(stream)
        event = self._take(handle)
        try:
            self._driver.record_event(event, handle)
        except BaseException:
            self.release(event)
            raise
        return event

    def _take(self, handle: int) -> int:
        free = self._free_of_stream.get(handle)
        if free is None:
            free = self._free.setdefault(self._driver.get_current(), collections.deque())
            self._free_of_stream[handle] = free
        try:
            return free.popleft()
        except IndexError:
            event = self._driver.create_event(timing=False, blocking=False)
            self._homes[event] = free
            return event

    def is_done(self, event: int) -> bool:
        """Says whether the work before the event is over, without waiting."""
        return self._driver.query_event(event)

    def synchronize(self, event: int) -> None:
        """Blocks the host until the event is done."""
        self._driver.synchronize_event(event)

    def release(self, event: int) -> None:
        """Recycles an event that is not needed any more; it may still be pending."""
        self._homes[event].append(event)


def _destroy(driver: CudaDriver, free: dict[int, collections.deque[int]]) -> None:
    for events in free.values():
        while events:
            driver.destroy_event(events.popleft())
