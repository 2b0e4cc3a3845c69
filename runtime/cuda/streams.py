"""CudaStreams: the user's streams and events as those of the driver."""

from __future__ import annotations

import weakref

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.stream import Event, Stream


class CudaStreams:
    """The streams and events of one GPU.

    Args:
        order: knows the stream that JAX computes on, and those of users.
    """

    def __init__(self, order: JaxOrder) -> None:
        self._order, self._driver = order, order.driver

    def synchronize(self, stream: Stream) -> None:
        """Blocks the host until the stream's work is done."""
        self._driver.synchronize_stream(self._order.find_stream(stream))

    def query(self, stream: Stream) -> bool:
        """True when the stream's work is done."""
        return self._driver.query_stream(self._order.find_stream(stream))

    def record(self, event: Event, stream: Stream) -> None:
        """Marks the end of the stream's work so far."""
        if not event.handle:
            with self._order.use_context():
                event.handle = self._driver.create_event(
                    timing=event.enable_timing, blocking=event.blocking
                )
            weakref.finalize(event, self._driver.destroy_event, event.handle).atexit = False
        self._driver.record_event(event.handle, self._order.find_stream(stream))

    def wait(self, event: Event, stream: Stream) -> None:
        """Makes later work of the stream wait for the event; one never recorded is over."""
        if event.handle:
            self._driver.wait_event(self._order.find_stream(stream), event.handle)

    def query_event(self, event: Event) -> bool:
        """True when the work before the event is done."""
        return not event.handle or self._driver.query_event(event.handle)

    def synchronize_event(self, event: Event) -> None:
        """Blocks the host until the work before the event is done."""
        if event.handle:
            self._driver.synchronize_event(event.handle)

    def measure(self, start: Event, end: Event) -> float:
        """Returns the milliseconds between two recorded events, when both are over."""
        self._driver.synchronize_event(end.handle)
        return self._driver.elapsed_ms(start.handle, end.handle)

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the GPU is done."""
        with self._order.use_context():
            self._driver.synchronize_context()
