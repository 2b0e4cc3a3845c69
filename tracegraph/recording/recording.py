"""Recording: a block of this thread, from the line that opens it to the one that closes it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

from tracegraph.jax_internals import close_trace, make_debug_info, send_ops_to
from tracegraph.randomness.draws import noting
from tracegraph.randomness.recorded_draws import DrawTurns, RecordedDraws
from tracegraph.recording.kept_traces import KeptTraces
from tracegraph.recording.recorded_trace import RecordedTrace
from tracegraph.runtime.arrays.graph_output import GraphOutput
from tracegraph.runtime.arrays.live_buffers import StaticInput
from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.jax_interop import find_sharding
from tracegraph.runtime.streams.stream import Stream
from tracegraph.runtime.streams.stream_capture import tracing


@dataclasses.dataclass(frozen=True)
class RecordedBlock:
    """What a block did.

    Attributes:
        jaxpr: closed; from ``fixed``, ``state`` and ``live`` to ``state`` and ``outputs``.
        fixed: the plain arrays of outside that it reads.
        state: the static inputs that it writes.
        live: the buffers of other LIVE arrays of outside that it reads.
        outputs: what it made and what is still held.
        turns: what a replay does for the generators that it draws from; None without any.
    """

    jaxpr: Any
    fixed: tuple[Any, ...]
    state: tuple[StaticInput, ...]
    live: tuple[Any, ...]
    outputs: tuple[GraphOutput, ...]
    turns: DrawTurns | None


class Recording:
    """A block that is being recorded.

    Args:
        name: of its graph.
        stream: the capturing stream.
        jax_device: that the graph is for.

    Attributes:
        thread: that records.
        stream: as given.
    """

    def __init__(self, name: str, stream: Stream, jax_device: Any) -> None:
        # Outside of the trace: both compute.
        find_sharding(jax_device)
        trace = self._trace = RecordedTrace(make_debug_info(), jax_device)
        self._exits = contextlib.ExitStack()
        self.thread = threading.get_ident()
        self.stream = stream
        kept = KeptTraces()
        self._exits.callback(lambda: kept.leave(has_read=trace.is_kept))
        self._exits.enter_context(tracing(name, stream))
        self._exits.enter_context(send_ops_to(self._trace))
        self._draws = RecordedDraws(name, self._trace, jax_device)
        self._exits.enter_context(noting(self._draws))
        recorder_state.recorder = self._trace

    def leave(self) -> None:
        """Ends the recording: from here on the thread computes again. May be called twice."""
        if recorder_state.recorder is self._trace:
            recorder_state.recorder = None
        self._exits.close()

    def finish(self) -> RecordedBlock:
        """Returns what was recorded; the arrays that the block made have no value yet."""
        trace, made = self._trace, self._trace.take_made()
        outputs = tuple(buffer for array, buffer in made if array() is not None)
        fixed = [*trace.fixed.values()]
        state = [trace.live.pop(key) for key in trace.written]
        live = [*trace.live.values()]
        jaxpr = close_trace(
            trace,
            [tracer for _, tracer in (*fixed, *state, *live)],
            [*trace.written.values(), *(buffer.find_recorded(trace) for buffer in outputs)],
        )
        for buffer in outputs:
            buffer.stop_recording()
        return RecordedBlock(
            jaxpr,
            tuple(array for array, _ in fixed),
            tuple(buffer for buffer, _ in state),
            tuple(buffer for buffer, _ in live),
            outputs,
            self._draws.make_turns(),
        )

    def abandon(self) -> None:
        """Drops what was recorded; the arrays that the block made never get a value."""
        for _, buffer in self._trace.take_made():
            buffer.stop_recording()
            buffer.abandon()
        self._trace.invalidate()
