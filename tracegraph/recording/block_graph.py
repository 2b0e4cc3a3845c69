"""BlockGraph: what a block has become, and what it can be asked."""

from __future__ import annotations

import os
import pathlib
import threading
from typing import Any

import jax

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames
from tracegraph.graph_pictures.dump import describe_graph, find_drawer
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.jax_internals import eval_trace, trace_state
from tracegraph.profiling.profile import Profile
from tracegraph.profiling.profile_graph import (
    find_profiled,
    make_nothing_error,
    profile_graph,
)
from tracegraph.recording.graph_attachments import AttachedGraph
from tracegraph.recording.graph_errors import (
    make_captured_error,
    make_empty_error,
    make_handle_error,
    make_nested_error,
    make_underway_error,
    make_uninstantiated_error,
    make_unkept_error,
)
from tracegraph.recording.graph_hooks import INSTANTIATE
from tracegraph.recording.recorded_pipeline import BlockTemplate, bind_outputs
from tracegraph.recording.recording import RecordedBlock, Recording
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.live_buffers import StateLeaves, StaticInput
from tracegraph.runtime.device import Device, GraphExchange
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream_capture import is_tracing


class BlockGraph(AttachedGraph):
    """What a block has become: what it was lowered to, and executable graphs made from that.

    Base class of `CUDAGraph`, which captures and replays.

    Args:
        keep_graph: as of `CUDAGraph`.
    """

    def __init__(self, keep_graph: bool) -> None:
        super().__init__()
        self._keeps = keep_graph
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._device: Device | None = None
        self._pool: FunctionPool | None = None
        # True from the end of a capture on, until a reset.
        self._has_graph = False
        self._block: RecordedBlock | None = None
        # None where the block did nothing, and once it is not needed any more.
        self._template: BlockTemplate | None = None
        # The newest executable graph, and the one that the block's arrays show.
        self._captured: CapturedGraph | None = None
        self._bound: CapturedGraph | None = None
        # One tuple of the plain arrays, one of the state, then each other live array.
        self._arguments: tuple[Any, ...] = ()
        self._state: tuple[StaticInput, ...] = ()
        # The newest values of the state, since the first replay.
        self._leaves: StateLeaves | None = None

    @hides_own_frames
    def instantiate(self) -> None:
        """Makes what was captured executable, of a graph with ``keep_graph=True``.

        A further call makes another executable graph from the same capture; from the next replay
        on it takes the place of the one before. Until then the block's arrays show what they show.

        Raises:
            CaptureError: the graph was made without ``keep_graph=True``, the capture has not ended,
                or this thread is capturing or tracing.
            ReplayError: nothing was captured, or the graph was reset.
            VerificationError: the new graph differs from its reference.
            OutOfMemoryError: the pool cannot hold the graph.

        Example:
            >>> x, g = tg.static_input((3,)), tg.CUDAGraph(keep_graph=True)
            >>> with tg.graph(g):
            ...     x.copy_(x + 1)
            Array([...
            >>> g.instantiate()
            >>> g.replay()
            >>> print(x)
            [1. 1. 1.]
        """
        self._check_has_graph("instantiate")
        if not self._keeps:
            raise make_unkept_error("instantiate")
        with self._lock:
            self._make_executable()
        self._call_hooks(INSTANTIATE)

    def _make_executable(self) -> None:
        """Makes a new executable graph; the first one is what the block's arrays show at once."""
        template = self._template
        if template is None:
            return
        self._captured, self._ready = template.instantiate(), None
        if self._bound is None:
            self._bind()

    def _find_executable(self) -> CapturedGraph | None:
        """Returns the newest executable graph, made if there is none; the block's arrays show it.

        None where the block did nothing.
        """
        is_new = False
        with self._lock:
            if self._captured is None and self._template is not None:
                self._make_executable()
                is_new = True
            if self._captured is not self._bound:
                self._bind()
            captured = self._bound
        if is_new:
            self._call_hooks(INSTANTIATE)
        return captured

    def _bind(self) -> None:
        """Makes the block's arrays show the newest executable graph, and its replays use it."""
        captured, block = self._captured, self._block
        assert captured is not None
        assert block is not None
        bind_outputs(block, captured)
        live = [Array(buffer, 0, ArrayState.LIVE) for buffer in block.live]
        # The state comes with the first replay, from where it is by then.
        self._leaves = None
        self._state, self._arguments = block.state, (block.fixed, (), *live)
        self._bound = captured

    def _check_has_graph(self, call: str) -> None:
        if self._recording is not None:
            raise make_underway_error(call)
        if is_tracing() or trace_state.value is not eval_trace:
            raise make_nested_error(call)
        if not self._has_graph:
            raise make_empty_error()

    def _forget(self) -> None:
        self._ready = self._captured = self._bound = self._template = self._block = None
        self._has_graph, self._pool = False, None
        self._leaves = None
        self._state = self._arguments = ()

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

    @hides_own_frames
    def pools(self) -> list[PoolId]:
        """Returns the ids of all pools that the graph keeps: its private pool, and no other.

        Raises:
            ReplayError: nothing was captured, or the graph was reset.
        """
        return [self.pool()]

    def enable_debug_mode(self) -> None:
        """Keeps what is captured, as ``keep_graph=True`` does; to be called before the capture.

        Raises:
            CaptureError: the graph holds a capture already.
        """
        if self._has_graph:
            raise make_captured_error()
        self._keeps = True

    @hides_own_frames
    def get_graph_data(self) -> GraphData:
        """Returns nodes, edges and buffers of the graph as records; needs no GPU.

        Raises:
            ReplayError: nothing was captured, or the graph was reset.

        Example:
            >>> x, g = tg.static_input((3,)), tg.CUDAGraph()
            >>> with tg.graph(g):
            ...     y = jnp.sin(x) * 2
            >>> [node.kind for node in g.get_graph_data().nodes]
            ['call']
        """
        if self._template is not None:
            lowered = self._template.lowered
            return describe_graph(lowered.checked, lowered.lowered)
        if self._captured is not None:
            return describe_graph(self._captured.checked, self._captured.lowered)
        if self._block is None:
            raise make_empty_error()
        return GraphData("graph", (), (), (), ())

    @hides_own_frames
    def profile(self) -> Profile:
        """Returns the time of every node, and the critical path, on what the static inputs hold.

        The graph is not replayed: it is measured in a second instance with memory of its own, so
        that neither its results nor its static inputs change. See `GraphedFunction.profile`.

        Raises:
            ReplayError: nothing was captured, the graph was reset, or it computes nothing.
            OutOfMemoryError: there is no memory for the second instance.

        Example:
            >>> x, g = tg.static_input((3,)), tg.CUDAGraph()
            >>> with tg.graph(g):
            ...     y = jnp.sin(x) * 2
            >>> g.profile().nodes[0].warm_us > 0
            True
        """
        self._check_has_graph("profile")
        captured, device = self._find_executable(), self._device
        if captured is None or device is None:
            raise make_nothing_error("graph")
        with self._lock:
            fixed, _, *live = self._arguments
            state = tuple(each.give() for each in self._state)
        # The plain arrays: read as a user would, an input would be copied at its next write.
        inputs = [each.find_input().value for each in live]
        leaves = jax.tree.leaves((fixed, state, inputs))
        return profile_graph(find_profiled(captured.name, captured), leaves, device)

    @hides_own_frames
    def debug_dump(self, debug_path: str | os.PathLike[str]) -> None:
        """Writes the graph as a file, for a person or for Graphviz.

        Args:
            debug_path: ends in ``.dot`` for DOT, or in ``.svg`` for a picture.

        Raises:
            ConfigError: it ends in something else.
            ReplayError: nothing was captured, or the graph was reset.
        """
        draw = find_drawer(debug_path)
        pathlib.Path(debug_path).write_text(draw(self.get_graph_data()), "utf-8")

    @hides_own_frames
    def raw_cuda_graph(self) -> int:
        """Returns the driver's handle of the graph, a ``CUgraph``, for NVIDIA's `cuda.bindings`.

        It is that of the newest executable graph; if there is none, it is made. The handle is valid
        until the next `instantiate`, `reset`, or the end of the graph. To be looked at: what is
        changed in it changes no replay.

        Raises:
            CaptureError: the graph was made without ``keep_graph=True``.
            ReplayError: nothing was captured, or the graph was reset.
            ConfigError: the graph is none of the driver's.
        """
        self._check_has_graph("raw_cuda_graph")
        if not self._keeps:
            raise make_unkept_error("raw_cuda_graph")
        if self._captured is None:
            self._find_executable()
        return self._find_handles("raw_cuda_graph")[0]

    @hides_own_frames
    def raw_cuda_graph_exec(self) -> int:
        """Returns the driver's handle of the executable graph, a ``CUgraphExec``.

        It is valid until the next `instantiate`, `reset`, or the end of the graph.

        Raises:
            ReplayError: nothing was captured, the graph was reset, or it has to be instantiated.
            ConfigError: the graph is none of the driver's.
        """
        self._check_has_graph("raw_cuda_graph_exec")
        return self._find_handles("raw_cuda_graph_exec")[1]

    def find_exported(self, call: str) -> tuple[CapturedGraph, RecordedBlock, GraphExchange, int]:
        """Returns what an export needs: the executable graph, its block, and the driver's handle.

        Args:
            call: as the user wrote it.

        Raises:
            ConfigError: the graph is none of the driver's.
        """
        self._check_has_graph(call)
        captured, block, device = self._find_executable(), self._block, self._device
        handle, _ = self._find_handles(call)
        exchange = device.exchange if device is not None else None
        if captured is None or block is None or exchange is None:
            raise make_handle_error(call, is_empty=block is not None)
        return captured, block, exchange, handle

    def _find_handles(self, call: str) -> tuple[int, int]:
        captured = self._captured
        if captured is None and self._template is not None:
            raise make_uninstantiated_error(call)
        # A block is one stage: it has no eager parts.
        handles = captured.replay.stages[0].handles if captured is not None else None
        if handles is None:
            raise make_handle_error(call, is_empty=captured is None)
        return handles
