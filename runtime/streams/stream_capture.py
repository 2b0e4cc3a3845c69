"""The capture that a thread is tracing: its current stream, and the streams that take part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.jax_interop import make_mark
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder

# Of the class in ``stream.py``, which imports this file.
Stream: TypeAlias = Any

_leave_record = make_mark("tg_record")
_leave_wait = make_mark("tg_wait")
# Their parameter ``event`` is the event itself.
_leave_external_record = make_mark("tg_external_record")
_leave_external_wait = make_mark("tg_external_wait")
CAPTURING_STREAM = 0
# The one that JAX computes on, once there are streams.
default_streams: list[Stream] = []


class ThreadState(threading.local):
    """The current stream of a thread, and the capture that is tracing on it."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.tracing: list[str] = []
        self.memos: list[dict[Any, Any]] = []
        self.orders: list[CaptureOrder] = []


thread_state = ThreadState()


@contextlib.contextmanager
def tracing(name: str, capturing_stream: Stream) -> Iterator[None]:
    """Marks this thread as tracing a capture, with its stream as the current one."""
    # Not just popped: what is recorded may end inside another with-block than it began in.
    previous = list(thread_state.streams)
    thread_state.tracing.append(name)
    thread_state.memos.append({})
    thread_state.orders.append(CaptureOrder(capturing_stream.number))
    thread_state.streams.append(capturing_stream)
    try:
        yield
    finally:
        thread_state.streams[:] = previous
        thread_state.orders.pop()
        thread_state.memos.pop()
        thread_state.tracing.pop()


@contextlib.contextmanager
def suspended_tracing() -> Iterator[None]:
    """Marks this thread as tracing nothing for a while, on the default stream."""
    state = vars(thread_state)
    held = dict(state)
    state.update({name: [] for name in held})
    try:
        yield
    finally:
        state.update(held)


def is_tracing() -> bool:
    """True while this thread traces a function for capture."""
    return bool(thread_state.tracing)


def read_trace_memo() -> dict[Any, Any] | None:
    """Returns what is kept until the trace of this thread's capture ends; None outside of one."""
    return thread_state.memos[-1] if thread_state.memos else None


def find_place(stream: int) -> int:
    """Returns the number of a stream in what is traced: 0 for the capturing stream.

    JAX keeps the trace of a function under ``jax.jit``, for captures on other streams, too.
    """
    orders = thread_state.orders
    return CAPTURING_STREAM if orders and stream == orders[-1].streams[0] else stream


def leave_external_record(stream: int, event: Any) -> None:
    """Leaves the mark of a record in the graph."""
    _leave_external_record(find_place(stream), event)


def leave_external_wait(stream: int, event: Any) -> None:
    """Leaves the mark of a wait in the graph."""
    _leave_external_wait(find_place(stream), event)


def leave_record(stream: int, event: int) -> None:
    """Leaves the mark of a record in the traced program."""
    _leave_record(find_place(stream), event)
    order = thread_state.orders[-1]
    # What is missing is told with its line when all is traced: `constraints.streams`.
    if order.has_stream(stream):
        order.record(event, stream)
    else:
        order.forget(event)


def leave_wait(stream: int, event: int) -> None:
    """Leaves the mark of a wait in the traced program."""
    _leave_wait(find_place(stream), event)
    order = thread_state.orders[-1]
    if order.has_event(event):
        order.wait(event, stream)


def is_member(stream: int) -> bool:
    """True for a stream that takes part in the capture that this thread traces."""
    return bool(thread_state.orders) and thread_state.orders[-1].has_stream(stream)


def check_not_in_capture(
    call: str, why: str = "the host cannot wait for work that is only being recorded"
) -> None:
    """Refuses a call while this thread traces a function.

    Args:
        call: as the user wrote it.
        why: it cannot be made there.

    Raises:
        CaptureError: a function is being captured.
    """
    if not is_tracing():
        return
    raise CaptureError(
        f"{call} is called while `{thread_state.tracing[-1]}` is being captured",
        where=f"capture of `{thread_state.tracing[-1]}`",
        why=why,
        fix="call it before or after the captured function",
        anchor="synchronize",
    )
