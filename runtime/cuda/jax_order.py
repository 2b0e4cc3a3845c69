"""JaxOrder: how our work and JAX's work on one GPU wait for each other.

Note [One stream]. XLA computes on one stream per device, and enqueues the work of a call before the
call returns. Graphs are launched on that very stream. So a replay comes after all computations of
earlier calls of JAX, JAX's later computations come after the replay, and memory that JAX frees and
uses again is not touched before the replay has read it; no event is needed and the host never
waits. Two things are not ordered by that stream alone. (1) An array that is still on its way to the
device: XLA copies on another stream, so a replay that gets an array which is not ready makes the
stream wait for it, through the DLPack protocol. (2) A read of our results by the host: XLA waits
for the event at which *it* defined the array. So a result becomes a plain array only when the
stream is idle, or by passing through an XLA program that does nothing but define it anew.

Note [Arrays that were never made]. A program that XLA cannot enqueue (no memory, a handler that
returns an error, a callback that raises) returns arrays all the same. They hold the error, and
their address is no address: a graph that reads there loses the GPU's context. XLA enqueues in the
calling thread, so that the error is there when the call returns: such an array is ready at once,
and raises when it is waited for. One that was made is not ready before the stream has made it, and
then there is nothing to wait for. So each array is looked at before its address is used, and the
host never waits. What fails later, on the GPU itself, ends the context in any case.

Note [Late arrays under a lock]. A graph holds its lock while it makes the stream wait for a late
argument. That cannot wait for user code, which might need the lock: XLA returns once the event that
the stream is to wait for is recorded, and of an array on a GPU only a copy from the host may have
none yet, which a thread of XLA's records without Python. Programs, with their callbacks, are
enqueued before their call returns. An array of another platform is read on the host by JAX itself
when it is put on the GPU, so that its callbacks have run when there is an argument.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import buffer_callback

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.jax_interop import ArrayImpl, computing
from tracegraph.runtime.streams.stream import Stream, default_stream
from tracegraph.runtime.streams.stream_backend import check_device

_is_ready = ArrayImpl.is_ready


class _ThreadState(threading.local):
    """The context, of whichever GPU, that we have made this thread's current one; 0 for none."""

    context = 0


# One for all GPUs of a driver.
_thread_states: weakref.WeakKeyDictionary[CudaDriver, _ThreadState] = weakref.WeakKeyDictionary()


class JaxOrder:
    """The stream that JAX computes on, of one device.

    Args:
        driver: the CUDA driver.
        stream: the driver's handle of that stream, see `find_compute_stream`.
        primary: the GPU's context, which JAX uses too.

    Attributes:
        thread: its ``context`` is `primary` unless this thread needs `enter_thread`.
    """

    def __init__(self, driver: CudaDriver, stream: int, primary: int) -> None:
        self.driver, self.stream, self.primary = driver, stream, primary
        self.thread = _thread_states.setdefault(driver, _ThreadState())
        self._side_streams: dict[int, int] = {}
        self._lock = threading.Lock()

    def use_context(self) -> contextlib.AbstractContextManager[None]:
        """Makes the GPU's context current while a block runs: a new thread has none."""
        return self.driver.use_context(self.primary)

    def enter_thread(self) -> None:
        """Makes the GPU's context current in this thread, until that of another GPU is entered.

        The driver crashes where node parameters are set without a context.
        """
        if self.thread.context != self.primary:
            self.driver.set_current(self.primary)
            self.thread.context = self.primary

    def find_stream(self, stream: Stream) -> int:
        """Returns the driver's handle of a user's stream.

        One that is made here lives as long as the process.

        Raises:
            ConfigError: the stream is of another device.
        """
        if stream is default_stream():
            return self.stream
        with self._lock, self.use_context():
            if stream.number not in self._side_streams:
                check_device(stream, self.primary)
                handle = stream.given_handle or self.driver.create_stream(stream.priority)
                self._side_streams[stream.number] = handle
            return self._side_streams[stream.number]

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocators' number of a stream, 0 for JAX's; registers the stream."""
        self.find_stream(stream)
        return 0 if stream is default_stream() else stream.number

    def find_handle(self, number: int) -> int:
        """Returns the driver's handle of a stream's number, in a thread that may use it."""
        self.enter_thread()
        return self._side_streams[number] if number else self.stream

    def make_wait(self, waiting: int, awaited: int) -> None:
        """Makes later work of a stream wait for what another holds now; handles of the driver."""
        with self.use_context():
            event = self.driver.create_event(timing=False, blocking=False)
            try:
                self.driver.record_event(event, awaited)
                self.driver.wait_event(waiting, event)
            finally:
                # The driver keeps a recorded event until its work is done.
                self.driver.destroy_event(event)

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        """Puts what the body enqueues on a side stream between JAX's earlier and later work."""
        fork = self.driver.create_event(timing=False, blocking=False)
        try:
            self.driver.record_event(fork, self.stream)
            self.driver.wait_event(side, fork)
            yield
            self.driver.record_event(fork, side)
            self.driver.wait_event(self.stream, fork)
        finally:
            # The driver keeps a recorded event until its work is done.
            self.driver.destroy_event(fork)

    def await_array(self, array: Any) -> None:
        """Makes the stream wait for a plain array that may still be on its way; not the host.

        Raises:
            jax.errors.JaxRuntimeError: XLA could not make it, see Note [Arrays that were never
                made].
        """
        if _is_ready(array):
            array.block_until_ready()
        else:
            array.__dlpack__(stream=self.stream)

    def is_idle(self) -> bool:
        """True when all work that was enqueued so far is done."""
        return self.driver.query_stream(self.stream)

    def synchronize(self) -> None:
        """Blocks the host until all work that was enqueued so far is done."""
        self.driver.synchronize_stream(self.stream)

    def define(self, array: Any) -> Any:
        """Returns a plain array that others may wait for, see Note [One stream].

        Args:
            array: memory that our work has been writing; it is used up.
        """
        if self.is_idle():
            return array
        with computing():
            return _define_anew(array)


@functools.partial(jax.jit, donate_argnums=0)
def _define_anew(array: Any) -> Any:
    return array


@functools.cache
def find_compute_stream(jax_device: Any) -> int:
    """Returns the driver's handle of the stream that XLA computes on."""
    found: list[int] = []

    def read_stream(context: Any, _result: Any, _operand: Any) -> None:
        found.append(int(context.stream))

    # An operand ties the program to the device.
    operand = jax.device_put(np.zeros((), np.uint8), jax_device)
    ask = buffer_callback.buffer_callback(read_stream, jax.ShapeDtypeStruct((), jnp.uint8))
    jax.block_until_ready(jax.jit(ask)(operand))
    return found[0]
