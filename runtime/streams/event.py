"""Events: points in a stream that another stream, or the host, can wait for.

Inside a captured function `Event.record` and `Event.wait` leave marks in the traced program. They
become its edges, and those of an external event nodes of the graph. Outside, on a GPU, an event is
the driver's. The host device runs everything in program order, so there a record only takes the
time, and a wait does nothing.
"""

from __future__ import annotations

import itertools
import time

from tracegraph.runtime.streams.handles import Handle
from tracegraph.runtime.streams.stream_backend import StreamBackend, find_backend
from tracegraph.runtime.streams.stream_capture import (
    Stream,
    check_not_in_capture,
    default_streams,
    is_tracing,
    leave_external_record,
    leave_external_wait,
    leave_record,
    leave_wait,
    thread_state,
)
from tracegraph.runtime.streams.stream_errors import (
    check_flags,
    check_handle,
    make_captured_event_error,
    make_interprocess_error,
    make_no_time_error,
    make_two_clocks_error,
)

_numbers = itertools.count(1)


class Event(Handle):
    """A point in a stream that another stream, or the host, can wait for.

    Args:
        enable_timing: record the time, for `elapsed_time`.
        blocking: whether a waiting host thread sleeps; the host device never waits.
        interprocess: must be False.
        external: inside a capture, `record` and `wait` become nodes of the graph: each replay
            records the event, or waits for what was recorded last. Otherwise they order streams of
            the capture, and the event means nothing outside of it.

    Attributes:
        external: as given.
        handle: of the driver's event, 0 before it is recorded on a GPU.

    Raises:
        ConfigError: an argument is neither True nor False.
        UnsupportedError: ``interprocess`` is True.

    Example:
        >>> start, end = (tg.Event(enable_timing=True, external=True) for _ in range(2))
        >>> @tg.capture
        ... def step(x):
        ...     start.record()
        ...     y = x * 2
        ...     end.record()
        ...     return y
        >>> y = step(jnp.ones(3))
        >>> end.synchronize()
        >>> start.elapsed_time(end) > 0
        True
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        check_flags(
            "tg.Event",
            enable_timing=enable_timing,
            blocking=blocking,
            interprocess=interprocess,
            external=external,
        )
        if interprocess:
            raise make_interprocess_error()
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.external = external
        self.number = next(_numbers)
        self.handle = 0
        # Where it was recorded last; None for the host.
        self._backend: StreamBackend | None = None
        self._recorded_at: float | None = None
        # The capture in which it was recorded last, where it is not external.
        self._captured_in = ""

    def __repr__(self) -> str:
        external = ", external=True" if self.external else ""
        return f"Event(number={self.number}, enable_timing={self.enable_timing}{external})"

    def record(self, stream: Stream | None = None) -> None:
        """Records this event behind the work enqueued on a stream so far.

        Args:
            stream: None for the current one.

        Raises:
            ConfigError: ``stream`` is no tg.Stream.
        """
        target = _find_target(stream, "Event.record")
        if is_tracing():
            self._record_in_capture(target)
            return
        backend = self._adopt(target)
        if backend is not None:
            backend.record(self, target)
        self._captured_in = ""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Makes later work of a stream wait for this event.

        Args:
            stream: None for the current one.

        Raises:
            ConfigError: ``stream`` is no tg.Stream.
            CaptureError: outside of a capture, the event was recorded in one.
        """
        target = _find_target(stream, "Event.wait")
        if is_tracing():
            self._wait_in_capture(target)
            return
        self._check_not_captured("Event.wait")
        backend = find_backend(target.device)
        if backend is not None and self._backend is not None:
            backend.wait(self, target)

    def query(self) -> bool:
        """Returns True when the work before the event is done.

        Raises:
            CaptureError: a function is being captured on this thread, or the event was recorded in
                a capture.
        """
        check_not_in_capture("Event.query")
        self._check_not_captured("Event.query")
        return self._backend is None or self._backend.query_event(self)

    def synchronize(self) -> None:
        """Blocks the host until the work before the event is done.

        Raises:
            CaptureError: a function is being captured on this thread, or the event was recorded in
                a capture.
        """
        check_not_in_capture("Event.synchronize")
        self._check_not_captured("Event.synchronize")
        if self._backend is not None:
            self._backend.synchronize_event(self)

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds between this event and a later one.

        Args:
            end: the later event.

        Raises:
            ConfigError: ``end`` is no tg.Event.
            ReplayError: one of the two has no time: not recorded, or without ``enable_timing``; or
                they were recorded on two devices.
            CaptureError: a function is being captured on this thread, or an event was recorded in
                a capture.
        """
        check_handle(Event, end, "Event.elapsed_time", "end")
        check_not_in_capture("Event.elapsed_time")
        for name, event in (("start", self), ("end", end)):
            event._check_not_captured("Event.elapsed_time")
            if event._recorded_at is None or not event.enable_timing:
                raise make_no_time_error(name)
        if self._backend is not end._backend:
            raise make_two_clocks_error()
        if self._backend is not None:
            return self._backend.measure(self, end)
        assert self._recorded_at is not None
        assert end._recorded_at is not None
        return (end._recorded_at - self._recorded_at) * 1e3

    def pass_by(self) -> None:
        """Notes that a graph records this event: on the host now, on a GPU at each launch."""
        self._recorded_at = time.perf_counter()

    def _record_in_capture(self, target: Stream) -> None:
        if self.external:
            leave_external_record(target.number, self)
            self._adopt(target)
            return
        leave_record(target.number, self.number)
        self._captured_in = thread_state.tracing[-1]

    def _wait_in_capture(self, target: Stream) -> None:
        if self.external:
            leave_external_wait(target.number, self)
            self._adopt(target)
            return
        leave_wait(target.number, self.number)

    def _adopt(self, target: Stream) -> StreamBackend | None:
        """Makes this an event of a stream's device: the driver's events are of one device."""
        backend = find_backend(target.device)
        if backend is not self._backend:
            self.handle = 0
        self._backend = backend
        return backend

    def _check_not_captured(self, call: str) -> None:
        if self._captured_in:
            raise make_captured_event_error(call, self._captured_in)


def _find_target(stream: Stream | None, call: str) -> Stream:
    (default,) = default_streams
    if stream is None:
        return thread_state.streams[-1] if thread_state.streams else default
    # The class is made above this module.
    check_handle(type(default), stream, call, "stream")
    return stream
