"""The buffers behind LIVE arrays: static inputs, and what a recorded block made.

Note [Live values]. A LIVE array has no value of its own: it shows what its buffer holds when it is
read. In a block that is recorded nothing is read at all: the array stands for its buffer in the
program, and a replay reads the buffer as it is by then. So a graph takes such an array by
reference, and `copy_` into a static input reaches every graph that reads it.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.array_errors import make_recorded_copy_error, make_unreplayed_error
from tracegraph.runtime.graph import ReplayClock
from tracegraph.runtime.jax_interop import is_default_device, make_aval
from tracegraph.runtime.recorder import Recorder, recorder_state
from tracegraph.runtime.static_buffer import (
    DeviceContext,
    ReadableBuffer,
    StaticBuffer,
    make_plain,
)


class LiveBuffer(ReadableBuffer, Protocol):
    """What a LIVE array shows, see Note [Live values]."""

    def read(self) -> Any:
        """Returns the value as a plain array; what stands for it where this thread records."""
        ...

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype into the buffer."""
        ...


def place(array: jax.Array, jax_device: Any) -> jax.Array:
    """Returns a plain array on a device, committed to it only where `Array` would be."""
    return array if is_default_device(jax_device) else jax.device_put(array, jax_device)


class StaticInput:
    """An input that is filled between replays; it belongs to no graph.

    The value is a plain immutable array, another one after each write: a graph reads it where it
    is, without a copy of its own.

    Args:
        value: the first value, which no one else holds.
        jax_device: where it is.
    """

    __slots__ = ("_value", "aval", "clock", "jax_device", "name")
    arena: Arena | None = None
    context: DeviceContext | None = None

    def __init__(self, value: jax.Array, jax_device: Any) -> None:
        self._value, self.jax_device = value, jax_device
        self.aval = make_aval(value.shape, value.dtype)
        self.name = "static input"
        self.clock = ReplayClock()

    @property
    def address(self) -> int:
        """Address of the first byte, until the next write."""
        return self._value.unsafe_buffer_pointer()

    @property
    def memory(self) -> jax.Array:
        """The plain array that holds the value."""
        return self._value

    @property
    def view(self) -> Any:
        """The value, to be copied."""
        return np.asarray(self._value) if self.jax_device.platform == "cpu" else self._value

    def snapshot(self) -> np.ndarray[Any, Any]:
        """Returns a private copy of the value."""
        return np.array(self._value)

    def read(self) -> Any:
        """Returns the value, or what stands for it where this thread records."""
        recorder = recorder_state.recorder
        return self._value if recorder is None else recorder.read_live(self)

    def write(self, value: Any) -> None:
        """Takes a copy of an array of the same shape and dtype.

        Raises:
            CaptureError: this thread records.
        """
        if recorder_state.recorder is not None:
            raise make_recorded_copy_error()
        self._value = place(jnp.array(value, self.aval.dtype), self.jax_device)


class GraphOutput:
    """A value that a recorded block made: first an op's result, then a static output of its graph.

    Args:
        recorder: of the block.
        value: what stands for it in the block.
        aval: JAX's abstract value of it, in the block.
        jax_device: that the graph is for.
        name: what messages call it.
    """

    __slots__ = (
        "_buffer",
        "_first",
        "_generation",
        "_plain",
        "_problem",
        "_recorder",
        "_value",
        "aval",
        "jax_device",
        "name",
    )
    memory = None

    # Constructed for every op that is recorded.
    def __init__(
        self, recorder: Recorder, value: Any, aval: Any, jax_device: Any, name: str
    ) -> None:
        self._recorder: Recorder | None = recorder
        self._value, self.aval, self.jax_device, self.name = value, aval, jax_device, name
        self._buffer: StaticBuffer | None = None
        self._problem = "its graph is still being captured"
        self._plain: Any = None
        self._first = self._generation = 0

    def bind(self, buffer: StaticBuffer) -> None:
        """Makes it show a buffer of the new graph, from the next replay on."""
        self._buffer, self._first, self.aval = buffer, buffer.clock.generation, buffer.aval
        self._problem = "its graph has not been replayed yet"

    def abandon(self) -> None:
        """Says that the capture failed, so that there never is a value."""
        self._problem = "the capture of its graph failed"

    def stop_recording(self) -> None:
        """Drops what stands for it in the block, which has ended."""
        self._recorder = self._value = None

    def find_recorded(self, recorder: Recorder) -> Any:
        """Returns what stands for it in a block; None in every other block than its own."""
        return self._value if self._recorder is recorder else None

    @property
    def clock(self) -> ReplayClock:
        """Counts the replays of its graph."""
        return ReplayClock() if self._buffer is None else self._buffer.clock

    @property
    def context(self) -> DeviceContext | None:
        """The device's work; None where all work is done when a call returns."""
        return None if self._buffer is None else self._buffer.context

    @property
    def arena(self) -> Arena | None:
        """The arena of its graph."""
        return None if self._buffer is None else self._buffer.arena

    @property
    def address(self) -> int:
        """Address of the first byte, the same for all replays."""
        if self._buffer is None:
            raise make_unreplayed_error(self.aval.str_short(), self._problem)
        return self._buffer.address

    @property
    def view(self) -> Any:
        """The bytes of the latest replay, to be copied."""
        return self._find().view

    def snapshot(self) -> Any:
        """Returns a private copy of what the latest replay wrote."""
        return self._find().snapshot()

    def read(self) -> Any:
        """Returns what the latest replay wrote, or what stands for it where this thread records.

        Raises:
            ReplayError: the graph was never replayed.
        """
        recorder = recorder_state.recorder
        if recorder is not None:
            return recorder.read_live(self)
        buffer = self._find()
        buffer.clock.wait()
        with buffer.clock.lock:
            # Several reads of one replay share a copy.
            if self._plain is None or self._generation != buffer.clock.generation:
                self._plain = make_plain(buffer.snapshot(), buffer.aval, self.jax_device)
                self._generation = buffer.clock.generation
            return self._plain

    def write(self, value: Any) -> None:
        """Copies an array into the buffer, which the next replay overwrites."""
        if recorder_state.recorder is not None:
            raise make_recorded_copy_error()
        self._find().write(value)
        self._plain = None

    def _find(self) -> StaticBuffer:
        buffer = self._buffer
        if buffer is None or buffer.clock.generation == self._first:
            raise make_unreplayed_error(self.aval.str_short(), self._problem)
        return buffer
