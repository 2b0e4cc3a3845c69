"""Array: a `jax.Array` whose value is in a static buffer until it is needed.

Making a JAX array costs microseconds, so an Array makes it on the first read only, and keeps it. A
SETTLED array owns a private copy and no longer refers to its buffer: it does not keep a pool alive.
What the states of an Array promise is in Note [States of an Array].

This file is past 400 lines because one type has every method that users, JAX and owners call.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, TypeAlias, cast

import jax
import jax.core
import numpy as np

from tracegraph.runtime.arrays.array_errors import (
    describe_array,
    make_donated_error,
    make_immutable_error,
    make_mismatch_error,
    make_stale_error,
    make_stream_error,
    make_traced_copy_error,
    make_unsettled_error,
)
from tracegraph.runtime.arrays.array_forwarding import forward_names
from tracegraph.runtime.arrays.array_state import ArrayState
from tracegraph.runtime.arrays.free_lock import ask_if_free
from tracegraph.runtime.arrays.live_buffers import LiveBuffer
from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.arrays.residence import Donation, Residence
from tracegraph.runtime.arrays.static_buffer import (
    DeviceContext,
    PendingRead,
    ReadableBuffer,
    StaticBuffer,
    make_plain,
)
from tracegraph.runtime.jax_interop import (
    ArrayImpl,
    find_sharding,
    is_default_device,
    is_host_place,
    is_read_guarded,
    register_array_type,
    to_plain,
)
from tracegraph.runtime.source_lines import locate_stack
from tracegraph.runtime.streams.stream import Stream

# Inside the class, `jax` is the method.
PlainArray: TypeAlias = jax.Array


# A class attribute of an Enum is slow to look up, and `settle` runs once per result and replay.
_FRESH, _RESIDENT = ArrayState.FRESH, ArrayState.RESIDENT
_SETTLED, _DELETED = ArrayState.SETTLED, ArrayState.DELETED
_LIVE = ArrayState.LIVE


class Array(jax.Array):
    """A value in a captured graph's pool, as its calls return it; used like any `jax.Array`.

    Args:
        buffer: holds the value.
        generation: number of the replay that made it.
        state: FRESH, RESIDENT, STATIC, or LIVE for a `LiveBuffer`.
        residence: what a RESIDENT array shares with the other leaves of its set; without it the
            array is a set of its own.
    """

    __slots__ = (
        "__weakref__",
        "_aval",
        "_buffer",
        "_context",
        "_device",
        "_generation",
        "_host",
        "_lock",
        "_plain",
        "_residence",
        "_snapshot",
        "_state",
    )
    __hash__ = None  # type: ignore[assignment]
    # NumPy's operators defer to those of the type with the higher priority.
    __array_priority__ = 100

    _buffer: ReadableBuffer | None
    _context: DeviceContext | None
    # Of an immutable value that the host has read, or begins to; not there before.
    _host: np.ndarray[Any, Any] | PendingRead | None
    _plain: Any
    _snapshot: Any
    _lock: threading.RLock
    _residence: Residence

    def __init__(
        self,
        buffer: ReadableBuffer,
        generation: int,
        state: ArrayState,
        residence: Residence | None = None,
    ) -> None:
        self._buffer = buffer
        self._generation = generation
        self._state = state
        self._plain = None
        if state is _RESIDENT:
            self._residence = Residence(generation, {}) if residence is None else residence

    # What the owner of the buffer calls.

    def settle(self) -> None:
        """Takes a private copy if the array is FRESH; the owner calls this before overwriting."""
        buffer = self._buffer
        if self._state is not _FRESH or buffer is None:
            return
        if buffer.clock.generation != self._generation:
            raise make_unsettled_error(buffer.name, self._generation, buffer.clock.generation)
        self._leave(buffer, buffer.snapshot(), _SETTLED)

    def detach(self) -> None:
        """Turns a RESIDENT array into an immutable value: its slot gets another owner."""
        buffer = self._buffer
        if self._state is not _RESIDENT or buffer is None:
            return
        with buffer.clock.lock:
            if self._is_taken():
                return
            if self._generation != buffer.clock.generation:
                self._plain = None
            self._leave(buffer, buffer.snapshot() if self._plain is None else None, _SETTLED)

    def consume(self, donation: Donation | None = None) -> None:
        """Marks the array as deleted, as donation to `jax.jit` does to its argument.

        Args:
            donation: to which captured function; None for any other reason. The first one counts.
        """
        if self._state is _DELETED:
            return
        buffer = self._buffer
        if buffer is not None:
            if self._state is _RESIDENT:
                buffer.clock.dropped_leaves += 1
                donation = self.find_donation() or donation
            self._leave(buffer, donation, _DELETED)
        self._state, self._plain, self._snapshot = _DELETED, None, donation
        self._host = None

    def drop_value(self) -> None:
        """Drops the copy that a RESIDENT array keeps of the value that was read."""
        self._plain = None

    def find_donation(self) -> Donation | None:
        """Returns to which call of a captured function the array was donated; None if to none."""
        buffer = self._buffer
        if self._state is _RESIDENT and buffer is not None:
            return self._residence.donations.get(buffer.name) if self._is_taken() else None
        return self._snapshot if self._state is _DELETED else None

    def is_in(self, arena: Any) -> bool:
        """True while the value is in this arena."""
        buffer = self._buffer
        return buffer is not None and buffer.arena is arena

    def peek(self) -> Any:
        """Returns the current value as something to copy from, which must not be written.

        On the host it is NumPy memory, on another device whatever its buffers take. No copy is
        made: for a value in a buffer, hold the buffer's lock meanwhile.
        """
        buffer = self._buffer
        if buffer is None:
            if self._state is _SETTLED and self._plain is None:
                return self._snapshot
            return np.asarray(self.jax()) if is_host_place(self._device) else self.jax()
        _check_generation(buffer, self)
        return buffer.view

    def find_memory(self) -> Any:
        """Returns a plain array over the value's own memory; None for one that has none.

        The value stays in it for as long as this array is held. Work on the stream that replays run
        on may still be writing it.
        """
        buffer = self._buffer
        if buffer is not None:
            return buffer.memory
        return self._plain if self._state is _SETTLED else None

    def find_input(self) -> Any:
        """Returns the buffer that a LIVE array shows; None for every other array."""
        return self._buffer if self._state is _LIVE else None

    # What users call.

    @property
    def state(self) -> ArrayState:
        """State of the array, see Note [States of an Array]."""
        return self._state

    def jax(self) -> PlainArray:
        """Returns the current value as a plain immutable `jax.Array`.

        Raises:
            StaleOutputError: a later replay has overwritten a static output.
            ReplayError: the array was donated to a captured function, or its graph was never
                replayed.
            RuntimeError: the array was donated to `jax.jit`, or deleted.
        """
        buffer = self._buffer
        if buffer is None:
            return self._read_settled()
        if self._state is _LIVE:
            return cast(LiveBuffer, buffer).read()
        if self._is_taken():
            self._check_if_deleted()
        self.wait()
        with buffer.clock.lock:
            if self._buffer is None:
                return self._read_settled()
            return self._read_buffer(buffer)

    def read_host(self) -> np.ndarray[Any, Any] | None:
        """Returns the value on the host, read-only; None if a plain array is the better way.

        Raises:
            StaleOutputError: a later replay has overwritten a static output.
            ReplayError: the array was donated to a captured function, or its graph was never
                replayed.
        """
        host = getattr(self, "_host", None)
        if isinstance(host, np.ndarray) and not self.is_deleted():
            return host
        buffer = self._buffer
        if buffer is None or is_read_guarded():
            return None
        if self._state is _LIVE:
            begun = cast(LiveBuffer, buffer).start_read()
            return None if begun is None else begun.finish()
        if buffer.context is None:
            return None
        if self._is_taken():
            self._check_if_deleted()
        with buffer.clock.lock:
            host = self._start_read(buffer)
            if host is None or isinstance(host, np.ndarray):
                return host
            # Another thread begins a read of its own.
            self._host = None
        # Without the lock: the work may hold a callback that reads an array of the graph.
        value = host.finish()
        if self._state in (_FRESH, _SETTLED):
            self._host = value
        return value

    def copy_to_host_async(self) -> None:
        """Begins to copy the value to the host, as `jax.Array.copy_to_host_async`."""
        buffer = self._buffer
        if buffer is not None and self._state is _FRESH and not is_read_guarded():
            with buffer.clock.lock:
                self._host = self._start_read(buffer)
                if self._host is not None:
                    return
        self.jax().copy_to_host_async()

    def wait(self) -> None:
        """Waits for the replay that the value is of; the caller does not hold the lock."""
        if self._buffer is not None:
            self._buffer.clock.wait()

    @property
    def lock(self) -> threading.RLock:
        """Held while the array's value is read or written."""
        buffer = self._buffer
        return self._lock if buffer is None else buffer.clock.lock

    def data_ptr(self) -> int:
        """Returns the address of the static buffer, or of an immutable value's private copy."""
        self._check_if_deleted()
        buffer = self._buffer
        return self.jax().unsafe_buffer_pointer() if buffer is None else buffer.address

    def copy_(self, src: Any) -> Array:
        """Writes an array into the static buffer; in a block that is recorded, at each replay.

        Args:
            src: a JAX or NumPy array of the same shape and dtype.

        Returns:
            This array.

        Raises:
            ReplayError: the value is immutable, or shape or dtype differ.
            CaptureError: it was made in the block that is recorded, or ``src`` in a trace.
        """
        if self._state is not _LIVE:
            self._check_if_deleted()
        buffer = self._buffer
        if buffer is None or self._state is _FRESH:
            raise make_immutable_error(self.aval.str_short())
        aval = buffer.aval
        if getattr(src, "shape", None) != aval.shape or getattr(src, "dtype", None) != aval.dtype:
            raise make_mismatch_error(buffer.name, describe_array(self), describe_array(src))
        value = src if type(src) is ArrayImpl else to_plain(src)
        if isinstance(value, jax.core.Tracer) and recorder_state.recorder is None:
            raise make_traced_copy_error(aval.str_short())
        with buffer.clock.lock:
            _check_generation(buffer, self)
            # Only FRESH values are in memory that nothing writes.
            cast(StaticBuffer, buffer).write(value)
            if self._state is _RESIDENT:
                self._residence.forget(self._plain)
            self._plain = None
        return self

    def record_stream(self, stream: Stream) -> None:
        """Keeps the memory at `data_ptr` for the work of a stream, as in PyTorch.

        When the array is gone, its memory is not used again before the work that the stream has by
        then is done. A graph that is replayed writes its own static buffers all the same.

        Raises:
            ConfigError: ``stream`` is no tg.Stream.
            ReplayError: the array was donated to a captured function.
            RuntimeError: the array was donated to `jax.jit`, or deleted.
        """
        if not isinstance(stream, Stream):
            raise make_stream_error(stream)
        self._check_if_deleted()
        buffer = self._buffer
        context = self._context if buffer is None else buffer.context
        if context is None:
            return  # No work is left when a call returns.
        if buffer is not None and buffer.arena is not None:
            buffer.arena.record_stream(buffer.address, context.number_stream(stream))
            return
        context.hold(self, self.jax(), stream)

    def delete(self) -> None:
        """Deletes the value, as `jax.Array.delete`."""
        self.consume()

    def is_deleted(self) -> bool:
        """True after deletion or donation, also of the plain array that `jax` returned."""
        if self._state is _DELETED or self._is_taken():
            return True
        value, buffer = self._plain, self._buffer
        is_present = buffer is None or self._generation == buffer.clock.generation
        return value is not None and is_present and value.is_deleted()

    def block_until_ready(self) -> Array:
        """Waits until the value is there; makes no copy of it."""
        self._check_if_deleted()
        buffer = self._buffer
        if buffer is None:
            waiting = self._snapshot if self._plain is None else self._plain
            if waiting is not None and not isinstance(waiting, np.ndarray):
                waiting.block_until_ready()
            return self
        with buffer.clock.lock:
            _check_generation(buffer, self)
            context = buffer.context
        # Without the lock: the work may hold a callback that reads an array of the graph.
        if context is not None:
            context.synchronize()
        return self

    def is_ready(self) -> bool:
        """True when a read would not wait for a replay."""
        self._check_if_deleted()
        buffer = self._buffer
        if buffer is None:
            waiting = self._snapshot if self._plain is None else self._plain
            return waiting is None or isinstance(waiting, np.ndarray) or waiting.is_ready()
        context = buffer.context
        return ask_if_free(buffer.clock.lock, lambda: context is None or context.is_idle())

    def __buffer__(self, flags: int) -> memoryview:
        """Returns the memory of a value on the host; NumPy reads any other by `__array__`."""
        buffer = self._buffer
        if buffer is not None and buffer.context is not None:
            raise BufferError("only an array on the CPU has Python's buffer protocol")
        return cast(Any, self.jax()).__buffer__(flags)

    # What is known without reading.

    @property
    def aval(self) -> Any:
        """JAX's abstract value."""
        buffer = self._buffer
        return self._aval if buffer is None else buffer.aval

    @property
    def sharding(self) -> Any:
        """One device, as JAX names it, or where each part is."""
        return find_sharding(self._jax_device)

    @property
    def device(self) -> Any:
        """The JAX device that reads the memory; of several the sharding, as JAX says it."""
        self._check_if_deleted()
        return self._jax_device

    def devices(self) -> set[Any]:
        """Returns the one device, or all that have a part."""
        self._check_if_deleted()
        return {*self.sharding.device_set}

    @property
    def committed(self) -> bool:
        """False on the default device, as for results of `jax.jit`."""
        return not is_default_device(self._jax_device)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    # What JAX itself looks at.

    _committed = committed

    @property
    def _jax_device(self) -> Any:
        buffer = self._buffer
        return self._device if buffer is None else buffer.jax_device

    def _is_taken(self) -> bool:
        """True for a leaf of a set that a later replay has taken, see Note [Leaf sets]."""
        buffer = self._buffer
        return (
            self._state is _RESIDENT
            and buffer is not None
            and self._residence.generation != buffer.clock.generation
        )

    def _check_if_deleted(self) -> None:
        if not self.is_deleted():
            return
        donation = self.find_donation()
        if donation is not None:
            where = f"used at {locate_stack(sys._getframe())}"
            raise make_donated_error(self.aval.str_short(), donation, where=where)
        raise RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}.")

    def _leave(self, buffer: ReadableBuffer, snapshot: Any, state: ArrayState) -> None:
        """Releases the buffer; keeps what is needed later."""
        self._aval, self._device, self._lock = buffer.aval, buffer.jax_device, buffer.clock.lock
        self._snapshot, self._state, self._context = snapshot, state, buffer.context
        # Last: another thread that finds no buffer finds all the rest.
        self._buffer = None

    def _read_settled(self) -> PlainArray:
        value = self._plain
        if value is not None:
            return value
        if self._state is _DELETED:
            self._check_if_deleted()
        with self._lock:
            if self._plain is None:
                self._plain = make_plain(self._snapshot, self._aval, self._device)
                self._snapshot = None
            return self._plain

    def _start_read(self, buffer: ReadableBuffer) -> np.ndarray[Any, Any] | PendingRead | None:
        """Begins to read on the host, if that was not begun; the caller holds the lock."""
        begun = getattr(self, "_host", None)
        if begun is not None:
            return begun
        if self._buffer is None or buffer.context is None:
            return None
        _check_generation(buffer, self)
        if self._plain is not None and self._generation == buffer.clock.generation:
            return None
        pending = buffer.context.start_read(buffer.address, buffer.aval)
        if pending is not None and buffer.arena is not None:
            # As after any other read, it keeps no memory of the graph.
            self.settle()
        return pending

    def _read_buffer(self, buffer: ReadableBuffer) -> PlainArray:
        """Returns the value of an array in a buffer; the caller holds the lock."""
        _check_generation(buffer, self)
        if self._plain is None or self._generation != buffer.clock.generation:
            self._plain = make_plain(buffer.snapshot(), buffer.aval, buffer.jax_device)
            self._generation = buffer.clock.generation
            if self._state is _RESIDENT:
                self._residence.values.append(self._plain)
        value = self._plain
        if self._state is _FRESH:
            self._leave(buffer, None, _SETTLED)
        return value


# Everything else is forwarded to the plain value.
forward_names(Array, Array.jax, Array.read_host)
Array.__module__ = "tracegraph"


def _offer(array: Array) -> Any:
    """Returns the value; of a LIVE array what the block that is recorded offers for it."""
    value, recorder = array.jax(), recorder_state.recorder
    if recorder is None or array._state is not _LIVE:
        return value
    return recorder.offer_value(value)


register_array_type(Array, Array.jax, _offer)


def _check_generation(buffer: ReadableBuffer, array: Array) -> None:
    """Raises when a later replay has overwritten the array's value."""
    made, now = array._generation, buffer.clock.generation
    if array._state is _LIVE:
        return
    if array._state is _RESIDENT:
        if array._is_taken():
            array._check_if_deleted()
        return
    if made == now:
        return
    if array._state is _FRESH:
        raise make_unsettled_error(buffer.name, made, now)
    raise make_stale_error(buffer.name, made, now)
