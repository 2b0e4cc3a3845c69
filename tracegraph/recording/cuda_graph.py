"""CUDAGraph: a graph that is captured from a with-block and replayed by hand, as in PyTorch."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames, locate_caller
from tracegraph.constraints.trace_errors import translate_trace_error
from tracegraph.jax_internals import eval_trace, trace_state
from tracegraph.options import Options, make_block_options
from tracegraph.recording.graph_errors import (
    check_error_mode,
    make_captured_error,
    make_deleted_error,
    make_empty_error,
    make_nested_error,
    make_other_end_error,
    make_unbegun_error,
    make_underway_error,
)
from tracegraph.recording.recorded_pipeline import capture_block
from tracegraph.recording.recording import RecordedBlock, Recording
from tracegraph.replaying.captured_graph import MISS
from tracegraph.runtime.array import Array, ArrayState
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.live_buffers import StaticInput
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.stream import Stream, current_stream
from tracegraph.runtime.stream_capture import is_tracing
from tracegraph.user_memory.mem_pool import MemPool

_NO_KEYWORDS: dict[str, Any] = {}


class CUDAGraph:
    """A graph of what a with-block does, replayed by hand; the block is `tg.graph`.

    What the block computes is recorded, not run. Arrays of outside that it reads are static inputs:
    a replay reads them where they are. Arrays that it makes, and that are still held when it ends,
    are static outputs: they show what the latest replay wrote. Several threads may capture at once,
    each into a graph of its own.

    Example:
        >>> x = tg.static_input(jnp.zeros(3))
        >>> g = tg.CUDAGraph()
        >>> with tg.graph(g):
        ...     y = x * 2
        >>> g.replay()
        >>> print(y)
        [0. 0. 0.]
        >>> x.copy_(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
        >>> g.replay()
        >>> print(y)
        [2. 2. 2.]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._options: Options | None = None
        self._where = ""
        self._device: Device | None = None
        self._pool: FunctionPool | None = None
        self._captured: Any = None
        # One tuple of the plain arrays, one of the state, then each other live array.
        self._arguments: tuple[Any, ...] | None = None
        self._state: tuple[StaticInput, ...] = ()

    def __repr__(self) -> str:
        state = "recording" if self._recording is not None else "empty"
        return f"<CUDAGraph {'captured' if self._arguments is not None else state}>"

    @hides_own_frames
    def capture_begin(
        self, pool: PoolId | MemPool | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Starts to record on the current stream; prefer `with tg.graph(g)`.

        Args:
            pool: a private pool to share, as of `tg.capture`; None for one of its own.
            capture_error_mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``, as in CUDA.
                Nothing that other threads do can spoil a capture: all three mean the same.

        Raises:
            CaptureError: the current stream is the default stream, the graph holds a capture
                already, or this thread is capturing or tracing.
            ConfigError: an argument has a value that is not allowed.

        Example:
            >>> g = tg.CUDAGraph()
            >>> with tg.stream(tg.Stream()):
            ...     g.capture_begin()
            ...     y = jnp.arange(3) + 1
            ...     g.capture_end()
            >>> g.replay()
            >>> print(y)
            [1 2 3]
        """
        self.begin(pool, None if is_tracing() else current_stream(), capture_error_mode)

    def begin(
        self, pool: PoolId | MemPool | None, stream: Stream | None, capture_error_mode: str
    ) -> None:
        """Starts to record on a stream; None is a new one. What `tg.graph` calls."""
        check_error_mode(capture_error_mode)
        if is_tracing() or trace_state.value is not eval_trace:
            raise make_nested_error("a capture")
        where = locate_caller()
        options = make_block_options(where, pool=pool, stream=stream)
        with self._lock:
            if self._recording is not None:
                raise make_underway_error("a capture")
            if self._arguments is not None:
                raise make_captured_error()
            self._device = device = find_device(is_checking=read_check_replay())
            self._pool = FunctionPool(options.pool)
            self._options, self._where = options, where
            self._recording = Recording(options.name, options.stream, device.jax_device)

    @hides_own_frames
    def capture_end(self) -> None:
        """Ends the recording and captures what was recorded.

        Raises:
            CaptureError: nothing was begun here, or the block cannot be captured; all reasons are
                named.
            UnsupportedError: XLA's program holds what no graph holds.
            VerificationError: the new graph differs from its reference.
            OutOfMemoryError: the pool cannot hold the graph.
        """
        recording = self._recording
        if recording is None:
            raise make_unbegun_error()
        if recording.thread != threading.get_ident():
            raise make_other_end_error("thread")
        if current_stream() is not recording.stream:
            raise make_other_end_error("stream")
        recording.leave()
        try:
            self._capture(recording.finish())
        finally:
            self._recording = None

    def abandon(self, error: BaseException) -> BaseException | None:
        """Ends the recording of a block that has raised.

        Args:
            error: what was raised, with its traceback.

        Returns:
            What to raise instead; None for an exception of the user's own.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        recording.leave()
        recording.abandon()
        if not isinstance(error, Exception) or self._options is None:
            return None
        return translate_trace_error(error, function=_block, name=self._options.name)

    def _capture(self, block: RecordedBlock) -> None:
        options, device, pool = self._options, self._device, self._pool
        assert options is not None
        assert device is not None
        assert pool is not None
        if not block.outputs and not block.state:
            warnings.warn(
                "the CUDA graph is empty: its block made no array that is still held "
                f"(at {self._where})",
                UserWarning,
                stacklevel=5,
            )
            self._arguments = ()
            return
        try:
            self._captured = capture_block(block, options, self._where, device, pool)
        except BaseException:
            for output in block.outputs:
                output.abandon()
            raise
        live = [Array(buffer, 0, ArrayState.LIVE) for buffer in block.live]
        self._state = block.state
        self._arguments = (block.fixed, (), *live)

    def replay(self) -> None:
        """Runs everything that was recorded, on what the static inputs hold now.

        Raises:
            ReplayError: nothing was captured, the graph was reset, or an array that it reads was
                deleted.
            CaptureError: this thread is capturing or tracing.
        """
        # As short as the call of a captured function, see Note [Hot path].
        if self._captured is None or trace_state.value is not eval_trace:
            self._explain_replay()
            return
        if self._state:
            self._replay_state()
        elif self._captured.try_call(self._arguments, _NO_KEYWORDS, True) is MISS:
            raise make_deleted_error()

    def _replay_state(self) -> None:
        """Replays a graph that writes static inputs: they are donated and come back."""
        with self._lock:
            given = self._arguments
            if given is None:
                raise make_empty_error()
            fixed, state, *live = given
            inputs = self._state
            # As it came back, the tuple is recognised as a whole.
            if len(state) != len(inputs) or not all(
                each.leaf is leaf for each, leaf in zip(inputs, state, strict=True)
            ):
                state = tuple(each.give() for each in inputs)
            arguments = (fixed, state, *live)
            result = self._captured.try_call(arguments, _NO_KEYWORDS, True)
            if result is MISS:
                raise make_deleted_error()
            for each, leaf in zip(inputs, result, strict=True):
                each.take(leaf)
            self._arguments = (fixed, result, *live)

    def _explain_replay(self) -> None:
        if self._recording is not None:
            raise make_underway_error("replay")
        if trace_state.value is not eval_trace:
            raise make_nested_error("replay")
        if self._arguments is None:
            raise make_empty_error()

    @hides_own_frames
    def reset(self) -> None:
        """Drops the graph: the next capture may begin. What it wrote last can still be read.

        Raises:
            CaptureError: the capture has not ended.
        """
        with self._lock:
            if self._recording is not None:
                raise make_underway_error("reset")
            self._captured = self._arguments = self._pool = None
            self._state = ()

    @hides_own_frames
    def pool(self) -> PoolId:
        """Returns the id of the private pool; other graphs and captured functions share it.

        Raises:
            ReplayError: nothing was captured, or the graph was reset.

        Example:
            >>> x, g = tg.static_input((4,)), tg.CUDAGraph()
            >>> with tg.graph(g):
            ...     y = x + 1
            >>> step = tg.capture(lambda x: x * 2, pool=g.pool())
            >>> step.pool() == g.pool()
            True
        """
        if self._pool is None or self._device is None:
            raise make_empty_error()
        return self._pool.share(self._device)


def _block() -> None:
    """Stands for the function that a block is none of, where a message looks for a line."""
