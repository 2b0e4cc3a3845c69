"""CudaEvents: the events of a GPU as the allocators ask for them, used again and again."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable

from tracegraph.runtime.cuda.driver.driver import CudaDriver


class CudaEvents:
    """Records events on streams and keeps those that were given back. Safe from several threads.

    Args:
        driver: the CUDA driver. The thread that records an event needs a current context.
        find_stream: returns the driver's handle of a stream as it is named here.
    """

    def __init__(self, driver: CudaDriver, find_stream: Callable[[int], int] = int) -> None:
        self._driver, self._find_stream = driver, find_stream
        self._free: collections.deque[int] = collections.deque()
        # At interpreter exit the process gives all events back by itself.
        weakref.finalize(self, _destroy, driver, self._free).atexit = False

    def record(self, stream: int) -> int:
        """Returns an event that is done when all work given to ``stream`` so far is.

        Raises:
            CudaError: the driver refused.
        """
        handle, event = self._find_stream(stream), self._take()
        try:
            self._driver.record_event(event, handle)
        except BaseException:
            self._free.append(event)
            raise
        return event

    def _take(self) -> int:
        try:
            return self._free.popleft()
        except IndexError:
            return self._driver.create_event(timing=False, blocking=False)

    def is_done(self, event: int) -> bool:
        """Says whether the work before the event is over, without waiting."""
        return self._driver.query_event(event)

    def synchronize(self, event: int) -> None:
        """Blocks the host until the event is done."""
        self._driver.synchronize_event(event)

    def release(self, event: int) -> None:
        """Takes back an event that nobody asks for any more; it may still be pending."""
        self._free.append(event)


def _destroy(driver: CudaDriver, events: collections.deque[int]) -> None:
    while events:
        driver.destroy_event(events.popleft())
