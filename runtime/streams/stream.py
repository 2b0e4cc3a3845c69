"""Streams: the order that the user declares, inside a capture and outside; see ``event.py``, too.

Inside a captured function, `with stream(s)` labels the ops traced in it through JAX's name scopes.
Outside, on a GPU, a stream is the driver's. The host device runs everything in program order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.streams.event import Event
from tracegraph.runtime.streams.handles import Handle
from tracegraph.runtime.streams.stream_backend import find_backend, require_backend
from tracegraph.runtime.streams.stream_capture import (
    check_not_in_capture,
    default_streams,
    find_place,
    is_member,
    is_tracing,
    thread_state,
)
from tracegraph.runtime.streams.stream_errors import check_handle, make_priority_error

SCOPE_PREFIX = "tg_stream_"

_numbers = itertools.count(1)


class Stream(Handle):
    """A queue of device work that runs in order, concurrently with other streams.

    Args:
        device: a JAX device or the index of a local one; None is the one that captures use.
        priority: lower numbers are served first, see `priority_range`; one outside of the range
            counts as the nearest inside.

    Raises:
        ConfigError: there is no such device, or the priority is no int.

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
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise make_priority_error(priority)
        if device is not None:
            find_backend(device)
        self.device = device
        self.priority = priority
        self.number = next(_numbers)
        # Of a stream that the user brought.
        self.given_handle = 0

    def __repr__(self) -> str:
        return f"Stream(number={self.number}, priority={self.priority})"

    @staticmethod
    def priority_range(device: Any = None) -> tuple[int, int]:
        """Returns the least and the greatest priority; the greatest is the lower number.

        Args:
            device: a JAX device, an index, or None for the one that captures use.

        Example:
            >>> tg.Stream.priority_range()  # the host has no priorities
            (0, 0)
        """
        backend = find_backend(device)
        return (0, 0) if backend is None else backend.read_priority_range()

    @property
    def cuda_stream(self) -> int:
        """The driver's handle of this stream, as an int; it lives as long as the process.

        Raises:
            ConfigError: the device is the host, which has no driver's streams.
            CaptureError: a function is being captured on this thread.
        """
        check_not_in_capture(
            "Stream.cuda_stream", "work enqueued on a handle runs now and would not be in the graph"
        )
        return require_backend(self.device, "Stream.cuda_stream").find_handle(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Returns the version of the protocol, 0, and `cuda_stream`, for other libraries."""
        return 0, self.cuda_stream

    def is_capturing(self) -> bool:
        """Returns True where this thread captures a function, and this stream takes part.

        The capturing stream does, and every stream that has waited for one that does.

        Example:
            >>> side, seen = tg.Stream(), []
            >>> @tg.capture
            ... def step(x):
            ...     seen.append(side.is_capturing())
            ...     side.wait_stream(tg.current_stream())
            ...     seen.append(side.is_capturing())
            ...     return x + 1
            >>> print(step(jnp.ones(2)))
            [2. 2.]
            >>> seen[:2], side.is_capturing()
            ([False, True], False)
        """
        return is_member(self.number)

    def wait_stream(self, other: Stream) -> None:
        """Makes later work of this stream wait for all work enqueued on another so far.

        Args:
            other: the stream to wait for.

        Raises:
            ConfigError: ``other`` is no tg.Stream.
        """
        check_handle(Stream, other, "Stream.wait_stream", "other")
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Makes later work of this stream wait for the event.

        Args:
            event: recorded on another stream.

        Raises:
            ConfigError: ``event`` is no tg.Event.
        """
        check_handle(Event, event, "Stream.wait_event", "event")
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event behind the work enqueued on this stream so far.

        Args:
            event: what to record; None for a new one.

        Returns:
            The event.

        Raises:
            ConfigError: ``event`` is no tg.Event.
        """
        event = event if event is not None else Event()
        check_handle(Event, event, "Stream.record_event", "event")
        event.record(self)
        return event

    def query(self) -> bool:
        """Returns True when all work is done; on the host device it always is.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        check_not_in_capture("Stream.query")
        backend = find_backend(self.device)
        return backend is None or backend.query(self)

    def synchronize(self) -> None:
        """Blocks the host until all work is done; on the host device it already is.

        Raises:
            CaptureError: a function is being captured on this thread.
        """
        check_not_in_capture("Stream.synchronize")
        backend = find_backend(self.device)
        if backend is not None:
            backend.synchronize(self)


_default_stream = Stream()
default_streams[:] = [_default_stream]


def default_stream() -> Stream:
    """Returns the stream that JAX itself computes on."""
    return _default_stream


def current_stream() -> Stream:
    """Returns this thread's current stream.

    Inside a captured function that is the capturing stream, outside `default_stream` unless
    `stream` or `set_stream` has chosen another.
    """
    return thread_state.streams[-1] if thread_state.streams else _default_stream


def is_current_stream_capturing() -> bool:
    """Returns True inside of a function that this thread captures; touches no device."""
    return current_stream().is_capturing()


def set_stream(s: Stream) -> None:
    """Makes a stream this thread's current one until the next call; prefer `with tg.stream(s)`.

    Args:
        s: the stream.

    Raises:
        ConfigError: ``s`` is no tg.Stream.
        CaptureError: a function is being captured on this thread.
    """
    check_handle(Stream, s, "tg.set_stream", "s")
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
        ConfigError: ``s`` is neither a tg.Stream nor None.
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
    check_handle(Stream, s, "tg.stream", "s")
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
        with jax.named_scope(f"{SCOPE_PREFIX}{find_place(s.number)}"):
            yield
    finally:
        thread_state.streams[:] = previous


def synchronize() -> None:
    """Blocks the host until all work on the device is done.

    Raises:
        CaptureError: a function is being captured on this thread.
    """
    check_not_in_capture("synchronize")
    try:
        # Raises the error of a callback that failed, again at each call, as JAX does it.
        jax.effects_barrier()
    finally:
        backend = find_backend()
        if backend is not None:
            backend.synchronize_device()
