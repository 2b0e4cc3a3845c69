"""`graph`: the with-block whose ops are recorded."""

from __future__ import annotations

import types
from typing import Any

from tracegraph.constraints.frames import hide_own_frames
from tracegraph.recording.cuda_graph import CUDAGraph
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream import Stream
from tracegraph.user_memory.mem_pool import MemPool


class GraphBlock:
    """The block of a `graph`; made by it.

    Args:
        cuda_graph: that the block is captured into.
        pool: as of `graph`.
        stream: as of `graph`.
        capture_error_mode: as of `graph`.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: PoolId | MemPool | None,
        stream: Stream | None,
        capture_error_mode: str,
    ) -> None:
        self._graph, self._arguments = cuda_graph, (pool, stream, capture_error_mode)

    def __enter__(self) -> None:
        try:
            self._graph.begin(*self._arguments)
        except Exception as error:
            hide_own_frames(error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is None:
            self._graph.capture_end()
            return
        translated: Any = self._graph.abandon(error)
        if translated is None:
            return
        try:
            raise translated from None
        finally:
            # Its traceback has this frame, which would hold it.
            del translated


def graph(
    cuda_graph: CUDAGraph,
    pool: PoolId | MemPool | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> GraphBlock:
    """Records the body of a with-block into a `CUDAGraph`; nothing in it runs.

    Args:
        cuda_graph: that the block is captured into.
        pool: a private pool to share: ``pool()`` of another graph or captured function, a
            `tg.graph_pool_handle`, or a `tg.memory.MemPool`. None for a pool of its own.
        stream: the stream that is captured; not the default stream. None for a new one.
        capture_error_mode: as of `CUDAGraph.capture_begin`.

    Returns:
        The block, for a with-statement.

    Raises:
        ConfigError: an argument has a value that is not allowed.
        CaptureError: the block cannot be captured; all reasons are named. After any error the
            thread computes again, and the graph is empty.

    Example:
        >>> w, x = jnp.full((2, 2), 0.5), tg.static_input((2,))
        >>> g = tg.CUDAGraph()
        >>> with tg.graph(g):
        ...     h = jax.nn.relu(x @ w)
        ...     total = h.sum()
        >>> _ = x.copy_(jnp.array([1.0, 2.0]))
        >>> g.replay()
        >>> print(h, total)
        [1.5 1.5] 3.0
    """
    if not isinstance(cuda_graph, CUDAGraph):
        raise ConfigError(
            f"graph is given {type(cuda_graph).__name__}, not a CUDAGraph",
            where="tg.graph, argument 0 `cuda_graph`",
            why="the block is captured into a graph object",
            fix="write g = tg.CUDAGraph() and `with tg.graph(g):`",
            anchor="unknown-option",
        )
    return GraphBlock(cuda_graph, pool, stream, capture_error_mode)
