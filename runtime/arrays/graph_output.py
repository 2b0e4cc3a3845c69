"""GraphOutput: the buffer behind an array that a recorded block made, see Note [Live values]."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array_errors import make_recorded_copy_error, make_unreplayed_error
from tracegraph.runtime.arrays.recorder import Recorder, recorder_state
from tracegraph.runtime.arrays.static_buffer import (
    DeviceContext,
    PendingRead,
    StaticBuffer,
    make_plain,
)
from tracegraph.runtime.definition.graph import ReplayClock


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
        self._plain = None
        self.await_replay()

    def await_replay(self) -> None:
        """Says that the capture succeeded, and that there is no value before a replay."""
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

    def start_read(self) -> PendingRead | None:
        """Begins to copy what the latest replay wrote to the host; None if `read` must.

        Raises:
            ReplayError: the graph was never replayed.
        """
        if recorder_state.recorder is not None:
            return None
        buffer = self._find()
        with buffer.clock.lock:
            is_read = self._plain is not None and self._generation == buffer.clock.generation
            if buffer.context is None or is_read:
                return None
            return buffer.context.start_read(buffer.address, buffer.aval)

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
