"""CudaStreams: the user's streams and events as those of the driver.

Note [Handles from outside]. The driver reads what a handle points at, and a wrong one ends the
process. So the address is looked at first, by a system call that fails where there is no memory.
What does point into memory is the driver's to judge; a handle of a destroyed stream may pass.
"""

from __future__ import annotations

import ctypes
import os

from tracegraph.runtime.cuda.events import make_event
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.streams.event import Event
from tracegraph.runtime.streams.stream import Stream
from tracegraph.runtime.streams.stream_errors import make_handle_error

# The driver's own names of default streams are 0, 1 and 2.
FIRST_HANDLE = 3
_HANDLE_BYTES = 8


class CudaStreams:
    """The streams and events of one GPU.

    Args:
        order: knows the stream that JAX computes on, and those of users.
    """

    def __init__(self, order: JaxOrder) -> None:
        self._order, self._driver = order, order.driver

    @property
    def context(self) -> int:
        """The driver's context of this GPU."""
        return self._order.primary

    def find_handle(self, stream: Stream) -> int:
        """Returns the driver's handle of a stream, which is made at its first use."""
        return self._order.find_stream(stream)

    def check_handle(self, handle: int) -> None:
        """Refuses what is no stream of this GPU, see Note [Handles from outside]."""
        if 0 <= handle < FIRST_HANDLE:
            why = "CUDA's default streams wait for streams of others; a graph's work must not"
            raise make_handle_error(handle, why)
        if not is_readable(handle):
            raise make_handle_error(handle, "there is no memory of this process at its address")
        try:
            with self._order.use_context():
                context = self._driver.find_context(handle)
        except CudaError as error:
            raise make_handle_error(handle, f"the driver says: {error.what}") from error
        if context != self._order.primary:
            why = "it is a stream of another GPU, or of a context that JAX does not use"
            raise make_handle_error(handle, why)

    def read_priority_range(self) -> tuple[int, int]:
        """Returns the least and the greatest priority."""
        with self._order.use_context():
            return self._driver.read_priority_range()

    def synchronize(self, stream: Stream) -> None:
        """Blocks the host until the stream's work is done."""
        self._driver.synchronize_stream(self._order.find_stream(stream))

    def query(self, stream: Stream) -> bool:
        """True when the stream's work is done."""
        return self._driver.query_stream(self._order.find_stream(stream))

    def record(self, event: Event, stream: Stream) -> None:
        """Marks the end of the stream's work so far."""
        handle = self._order.find_stream(stream)
        with self._order.use_context():
            self._driver.record_event(make_event(self._driver, event), handle)

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
        self._driver.synchronize_event(start.handle)
        self._driver.synchronize_event(end.handle)
        return self._driver.elapsed_ms(start.handle, end.handle)

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the GPU is done."""
        with self._order.use_context():
            self._driver.synchronize_context()


def is_readable(address: int) -> bool:
    """True when there is readable memory at an address of this process."""
    if not 0 < address < 1 << 63 or address % _HANDLE_BYTES:
        return False
    reader, writer = os.pipe()
    try:
        # The kernel refuses to read where there is nothing; the process goes on.
        os.write(writer, (ctypes.c_char * _HANDLE_BYTES).from_address(address))
    except OSError:
        return False
    finally:
        os.close(reader)
        os.close(writer)
    return True
