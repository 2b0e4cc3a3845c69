"""CUDAGraph: a graph that is captured from a with-block and replayed by hand, as in PyTorch."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames, locate_caller
from tracegraph.constraints.trace_errors import translate_trace_error
from tracegraph.jax_internals import eval_trace, trace_state
from tracegraph.options import Options, make_block_options
from tracegraph.randomness.errors import make_generator_error
from tracegraph.randomness.generator import Generator
from tracegraph.recording.block_graph import BlockGraph
from tracegraph.recording.graph_attachments import release_all
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
from tracegraph.recording.graph_hooks import (
    CAPTURE_END,
    CAPTURE_START,
    INSTANTIATE,
    REPLAY_END,
    REPLAY_START,
)
from tracegraph.recording.recorded_pipeline import BlockTemplate
from tracegraph.recording.recording import RecordedBlock, Recording
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.runtime.arrays.live_buffers import StateLeaves
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream import Stream, current_stream
from tracegraph.runtime.streams.stream_capture import is_tracing
from tracegraph.user_memory.mem_pool import MemPool

_NO_KEYWORDS: dict[str, Any] = {}


class CUDAGraph(BlockGraph):
    """A graph of what a with-block does, replayed by hand; the block is `tg.graph`.

    What the block computes is recorded, not run. Arrays of outside that it reads are static inputs:
    a replay reads them where they are. Arrays that it makes, and that are still held when it ends,
    are static outputs: they show what the latest replay wrote. Several threads may capture at once,
    each into a graph of its own.

    Args:
        keep_graph: keep what was captured, and make it executable in `instantiate`, or in the first
            replay; not when the capture ends.

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

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self._options: Options | None = None
        self._where = ""

    def __repr__(self) -> str:
        state = "recording" if self._recording is not None else "empty"
        return f"<CUDAGraph {'captured' if self._has_graph else state}>"

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
            if self._has_graph:
                raise make_captured_error()
            self._device = device = find_device(is_checking=read_check_replay())
            self._pool = FunctionPool(options.pool)
            self._options, self._where = options, where
            self._attachments.jax_device = device.jax_device
            self._recording = Recording(options.name, options.stream, device.jax_device)
        try:
            self._call_hooks(CAPTURE_START)
        except BaseException as error:
            translated = self.abandon(error)
            if translated is None:
                raise
            try:
                raise translated from None
            finally:
                # Its traceback has this frame, which would hold it.
                del translated

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
        if not self._keeps:
            self._call_hooks(INSTANTIATE)

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
        try:
            if block.outputs or block.state:
                self._template = BlockTemplate(block, options, self._where, device, pool)
            else:
                self._warn_of_nothing()
            self._block = block
            self._call_hooks(CAPTURE_END)
            if not self._keeps:
                self._make_executable()
            self._has_graph = True
        except BaseException:
            if self._template is not None:
                self._template.drop_values()
            self._forget()
            for output in block.outputs:
                output.abandon()
            raise
        if not self._keeps:
            self._template = None
        elif self._template is not None:
            self._template.drop_values()
        for output in block.outputs:
            output.await_replay()

    def _warn_of_nothing(self) -> None:
        warnings.warn(
            "the CUDA graph is empty: its block made no array that is still held "
            f"(at {self._where})",
            UserWarning,
            stacklevel=6,
        )

    def replay(self) -> None:
        """Runs everything that was recorded, on what the static inputs hold now.

        Raises:
            ReplayError: nothing was captured, the graph was reset, or an array that it reads was
                deleted.
            CaptureError: this thread is capturing or tracing.
        """
        # As short as the call of a captured function, see Note [Hot path].
        ready = self._ready
        if ready is None or trace_state.value is not eval_trace:
            self._replay_slowly()
        elif self._state:
            self._replay_state()
        elif ready() is MISS:
            raise make_deleted_error()

    def _replay_slowly(self) -> None:
        """Replays for the first time, with hooks, see Note [Hooks cost nothing], or with draws."""
        self._check_has_graph("replay")
        captured = self._find_executable()
        turns = self._block.turns if self._block is not None else None
        if turns is None and self._make_ready(captured, self._arguments):
            self._launch(captured)
            return
        self._call_hooks(REPLAY_START)
        try:
            with turns.take() if turns is not None else contextlib.nullcontext():
                self._launch(captured)
        finally:
            self._call_hooks(REPLAY_END)

    def _launch(self, captured: CapturedGraph | None) -> None:
        if captured is None:
            # The block did nothing.
            return
        if self._state:
            self._replay_state()
        elif captured.try_call(self._arguments, _NO_KEYWORDS, True) is MISS:
            raise make_deleted_error()

    def _replay_state(self) -> None:
        """Replays a graph that writes static inputs: they are donated and come back."""
        with self._lock:
            captured = self._bound
            if captured is None:
                raise make_empty_error()
            known = self._leaves
            if known is not None and not known.is_whole:
                known = None
            # As it came back, the tuple is recognised as a whole.
            state = tuple(each.give() for each in self._state) if known is None else known.leaves
            fixed, _, *live = self._arguments
            result = captured.try_call((fixed, state, *live), _NO_KEYWORDS, True)
            if result is MISS:
                raise make_deleted_error()
            if known is not None:
                known.leaves = result
                return
            self._leaves = leaves = StateLeaves(result)
            for index, each in enumerate(self._state):
                each.enter(leaves, index)

    @hides_own_frames
    def register_generator_state(self, generator: Generator) -> None:
        """Says that the block will draw keys from a generator, as PyTorch wants it said.

        It need not be said: a block may draw from any generator, and each replay advances it.

        Args:
            generator: a `tg.random.Generator`.

        Raises:
            CaptureError: the graph holds a capture already.
            ConfigError: it is no generator.

        Example:
            >>> g, gen = tg.CUDAGraph(), tg.random.Generator(1)
            >>> g.register_generator_state(gen)
            >>> with tg.graph(g):
            ...     noise = jax.random.normal(gen.next_key(), (2,))
            >>> g.replay()
            >>> bool((noise == jax.random.normal(tg.random.Generator(1).next_key(), (2,))).all())
            True
        """
        if not isinstance(generator, Generator):
            raise make_generator_error(generator)
        if self._has_graph:
            raise make_captured_error()

    @hides_own_frames
    def reset(self) -> None:
        """Drops the graph: the next capture may begin. What it wrote last can still be read.

        Hooks stay; functions and objects that were registered for the end of the graph go.

        Raises:
            CaptureError: the capture has not ended.
        """
        with self._lock:
            if self._recording is not None:
                raise make_underway_error("reset")
        release_all(self._attachments)
        with self._lock:
            self._forget()


def _block() -> None:
    """Stands for the function that a block is none of, where a message looks for a line."""
