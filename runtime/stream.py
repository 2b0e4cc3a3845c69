"""Streams and events: the order that the user declares, inside a capture and outside.

Inside a captured function, `with stream(s)` labels the ops traced in it through JAX's name scopes,
and `Event.record` and `Event.wait` leave marks in the traced program. Outside, on a GPU, they are
the driver's streams and events. The host device runs everything in program order, so there a
record only takes the time, and a wait does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from tracegraph.runtime.errors import CaptureError, ReplayError
from tracegraph.runtime.handles import Handle
from tracegraph.runtime.jax_interop import make_mark

SCOPE_PREFIX = "tg_stream_"

_leave_record = make_mark("tg_record")
_leave_wait = make_mark("tg_wait")
_numbers = itertools.count(1)
_event_numbers = itertools.count(1)


class StreamBackend(Protocol):
    """The streams and events of a device that runs work asynchronously."""

    def synchronize(self, stream: Stream) -> None:
        """Blocks the host until the stream's work is done."""
        ...

    def query(self, stream: Stream) -> bool:
        """True when the stream's work is done."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Records the event behind the stream's current work."""
        ...

    def wait(self, event: Event, stream: Stream) -> None:
        """Makes later work of the stream wait for the event."""
        ...

    def query_event(self, event: Event) -> bool:
        """True when the work before the event is done."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Blocks the host until the work before the event is done."""
        ...

    def measure(self, start: Event, end: Event) -> float:
        """Returns the milliseconds between two recorded events, once both are done."""
        ...

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the device is done."""
        ...


_finders: list[Callable[[], StreamBackend | None]] = []


def register_backend(find: Callable[[], StreamBackend | None]) -> None:
    """Sets how the backend of the device in use is found; None is the host."""
    _finders[:] = [find]


def _find_backend() -> StreamBackend | None:
    return _finders[0]() if _finders else None


class Stream(Handle):
    """A queue of device work that runs in order, concurrently with other streams.

    Args:
        device: the JAX device; None is the default one.
        priority: lower numbers are served first on a device with priorities.

    Example:
        >>> side = tg.Stream()
        >>> @tg.capture
        ... def step(x):
        ...     main = tg.current_stream()
        ...     side.wait_stream(main)
        ...     with tg.stream(side):
        ...         doubled = x * 2
        ...     main.wait_stream(side)
        ...     return doubled + 1
        >>> print(step(jnp.ones(2)))
        [3. 3.]
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.number = next(_numbers)

    def __repr__(self) -> str:
        return f"Stream(number={self.number}, priority={self.priority})"

    def wait_stream(self, other: Stream) -> None:
        """Makes later work of this stream wait for all work enqueued on another so far.

        Args:
            other: the stream to wait for.
        """
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Makes later work of this stream wait for the event.

        Args:
            event: recorded on another stream.
        """
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event behind the work enqueued on this stream so far.

        Args:
            event: what to record; None for a new one.

        Returns:
            The event.
        """
        event = event if event is not None else Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Returns True when all work is done; on the host device it always is.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        _check_not_in_capture("Stream.query")
        backend = _find_backend()
        return backend is None or backend.query(self)

    def synchronize(self) -> None:
        """Blocks the host until all work is done; on the host device it already is.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        _check_not_in_capture("Stream.synchronize")
        backend = _find_backend()
        if backend is not None:
            backend.synchronize(self)


class Event(Handle):
    """A point in a stream that another stream, or the host, can wait for.

    Args:
        enable_timing: record the time, for `elapsed_time`.
        blocking: whether a waiting host thread sleeps; the host device never waits.

    Attributes:
        handle: of the driver's event, 0 before it is recorded on a GPU.

    Example:
        >>> start, end = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
        >>> start.record()
        >>> y = jnp.ones(3) * 2
        >>> end.record()
        >>> end.synchronize()
        >>> start.elapsed_time(end) > 0
        True
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.number = next(_event_numbers)
        self.handle = 0
        self._recorded_at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Records this event behind the work enqueued on a stream so far.

        Args:
            stream: None for the current one.
        """
        target = stream if stream is not None else current_stream()
        if is_tracing():
            _leave_record(target.number, self.number)
            return
        backend = _find_backend()
        if backend is not None:
            backend.record(self, target)
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Makes later work of a stream wait for this event.

        Args:
            stream: None for the current one.
        """
        target = stream if stream is not None else current_stream()
        if is_tracing():
            _leave_wait(target.number, self.number)
            return
        backend = _find_backend()
        if backend is not None:
            backend.wait(self, target)

    def query(self) -> bool:
        """Returns True when the work before the event is done.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        _check_not_in_capture("Event.query")
        backend = _find_backend()
        return backend is None or backend.query_event(self)

    def synchronize(self) -> None:
        """Blocks the host until the work before the event is done.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        _check_not_in_capture("Event.synchronize")
        backend = _find_backend()
        if backend is not None:
            backend.synchronize_event(self)

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds between this event and a later one.

        Args:
            end: the later event.

        Raises:
            ReplayError: one of the two has no time: not recorded, or without ``enable_timing``.
            CaptureError: a function is being captured on this thread.
        """
        _check_not_in_capture("Event.elapsed_time")
        for name, event in (("start", self), ("end", end)):
            if event._recorded_at is None or not event.enable_timing:
                raise ReplayError(
                    f"the {name} event has no time",
                    where="Event.elapsed_time",
                    why="an event takes the time only with enable_timing=True and once recorded",
                    fix="create it as Event(enable_timing=True) and call record()",
                    anchor="event-time",
                )
        backend = _find_backend()
        if backend is not None:
            return backend.measure(self, end)
        assert self._recorded_at is not None
        assert end._recorded_at is not None
        return (end._recorded_at - self._recorded_at) * 1e3


class ThreadState(threading.local):
    """The current stream of a thread, and the capture that is tracing on it."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.tracing: list[str] = []
        self.memos: list[dict[Any, Any]] = []


_default_stream = Stream()
thread_state = ThreadState()


def default_stream() -> Stream:
    """Returns the stream that JAX itself computes on."""
    return _default_stream


def current_stream() -> Stream:
    """Returns this thread's current stream.

    Inside a captured function that is the capturing stream, outside `default_stream` unless
    `stream` or `set_stream` has chosen another.
    """
    return thread_state.streams[-1] if thread_state.streams else _default_stream


def set_stream(s: Stream) -> None:
    """Makes a stream this thread's current one until the next call; prefer `with tg.stream(s)`.

    Args:
        s: the stream.

    Raises:
        CaptureError: a function is being captured on this thread.
    """
    if is_tracing():
        raise CaptureError(
            "set_stream is called while a function is being captured",
            where=f"capture of `{thread_state.tracing[-1]}`",
            why="only a with-block says where the work of a stream ends in the traced program",
            fix="write `with tg.stream(s):` around the work",
            anchor="set-stream",
        )
    thread_state.streams[:] = [s]


@contextlib.contextmanager
def stream(s: Stream | None) -> Iterator[None]:
    """Runs the body of a with-block with a stream as the current one.

    Args:
        s: the stream; None changes nothing.

    Raises:
        CaptureError: the default stream is chosen inside a capture.

    Example:
        >>> side = tg.Stream()
        >>> with tg.stream(side):
        ...     print(tg.current_stream() is side)
        True
    """
    if s is None:
        yield
        return
    if is_tracing() and s is _default_stream:
        raise CaptureError(
            "the default stream is used inside a capture",
            where=f"capture of `{thread_state.tracing[-1]}`",
            why="JAX's own work is on the default stream and would be captured with it",
            fix="use a stream made by tg.Stream()",
            anchor="default-stream",
        )
    # Not just popped: the body may call `set_stream`.
    previous = list(thread_state.streams)
    thread_state.streams.append(s)
    try:
        with jax.named_scope(f"{SCOPE_PREFIX}{s.number}"):
            yield
    finally:
        thread_state.streams[:] = previous


def synchronize() -> None:
    """Blocks the host until all work on the device is done.

    Raises:
        CaptureError: a function is being captured on this thread.
    """
    _check_not_in_capture("synchronize")
    jax.effects_barrier()
    backend = _find_backend()
    if backend is not None:
        backend.synchronize_device()


@contextlib.contextmanager
def tracing(name: str, capturing_stream: Stream) -> Iterator[None]:
    """Marks this thread as tracing a capture, with its stream as the current one."""
    thread_state.tracing.append(name)
    thread_state.memos.append({})
    thread_state.streams.append(capturing_stream)
    try:
        yield
    finally:
        thread_state.streams.pop()
        thread_state.memos.pop()
        thread_state.tracing.pop()


def is_tracing() -> bool:
    """True while this thread traces a function for capture."""
    return bool(thread_state.tracing)


def read_trace_memo() -> dict[Any, Any] | None:
    """Returns what is kept until the trace of this thread's capture ends; None outside of one."""
    return thread_state.memos[-1] if thread_state.memos else None


def _check_not_in_capture(call: str) -> None:
    if not is_tracing():
        return
    raise CaptureError(
        f"{call} is called while `{thread_state.tracing[-1]}` is being captured",
        where=f"capture of `{thread_state.tracing[-1]}`",
        why="the host cannot wait for work that is only being recorded",
        fix="call it before or after the captured function",
        anchor="synchronize",
    )
