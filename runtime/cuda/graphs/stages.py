"""Stages on a GPU: a graph launched on a stream, or an eager call between two graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tracegraph.runtime.cuda.buffer import CudaBuffer
from tracegraph.runtime.cuda.graphs.builder import ErrorPlace
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.host_values import HostValues
from tracegraph.runtime.cuda.results import ResultPort
from tracegraph.runtime.definition.graph import ExecutableGraph, Stage
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.streams.stream import current_stream, default_stream
from tracegraph.runtime.streams.stream_capture import thread_state


class LaunchableGraph(Protocol):
    """An executable graph of the driver."""

    @property
    def handles(self) -> tuple[int, int]:
        """The driver's handles of the graph and the executable graph."""
        ...

    def launcher(self, stream: int) -> Callable[[], None]:
        """Returns the function that enqueues every node once on a stream."""
        ...


class CudaStage:
    """A captured stage, ready to be launched.

    `launch` puts it on the stream that JAX computes on, or, inside `with tg.stream(s)`, on ``s``
    between two waits: ``s`` waits for JAX's work so far, and JAX's later work for the graph.

    Args:
        graph: the executable graph.
        ports: results that are written to memory of their own.
        order: of JAX's work and ours.

    Attributes:
        launch_graph: enqueues the graph on JAX's stream, and does nothing else.
    """

    def __init__(
        self, graph: LaunchableGraph, ports: Sequence[ResultPort], order: JaxOrder
    ) -> None:
        self.graph = graph
        self.launch_graph = graph.launcher(order.stream)
        self.launch = _make_launch(graph, tuple(ports), order)

    @property
    def handles(self) -> tuple[int, int]:
        """The driver's handles of the graph and the executable graph."""
        return self.graph.handles


def _make_launch(
    graph: LaunchableGraph, ports: tuple[ResultPort, ...], order: JaxOrder
) -> Callable[[], None]:
    launch_graph = graph.launcher(order.stream)
    enter_thread, thread, primary = order.enter_thread, order.thread, order.primary
    streams = thread_state

    def launch() -> None:
        if thread.context != primary:
            enter_thread()
        if streams.streams and current_stream() is not default_stream():
            _launch_beside(graph, order)
        else:
            launch_graph()

    if not ports:
        return launch

    # Not by way of `launch`: see Note [Hot path].
    def renew_and_launch() -> None:
        if thread.context != primary:
            enter_thread()
        for port in ports:
            if port.is_taken:
                port.renew()
        if streams.streams and current_stream() is not default_stream():
            _launch_beside(graph, order)
        else:
            launch_graph()

    # Results can outlive the graph, and must not hold it.
    weakref.finalize(renew_and_launch, _close_all, ports).atexit = False
    return renew_and_launch


def _close_all(ports: tuple[ResultPort, ...]) -> None:
    for port in ports:
        port.close()


def _launch_beside(graph: LaunchableGraph, order: JaxOrder) -> None:
    side = order.find_stream(current_stream())
    with order.beside(side):
        graph.launcher(side)()


class BlockingStage:
    """A stage whose launch returns when its work is done, so that an error is its own.

    Args:
        stage: any other.
        order: of JAX's work and ours.
        name: of the captured function, for errors.
    """

    def __init__(self, stage: ExecutableGraph, order: JaxOrder, name: str) -> None:
        self.stage = stage
        self._order, self._name = order, name

    @property
    def handles(self) -> tuple[int, int] | None:
        """Those of the stage."""
        return self.stage.handles

    def launch(self) -> None:
        """Launches the stage between two waits of the host.

        Raises:
            CudaError: the work of this stage failed, or work before it; the place says which.
        """
        with ErrorPlace(f"work before the call of `{self._name}`"):
            self._order.synchronize()
        with ErrorPlace(f"call of `{self._name}`"):
            self.stage.launch()
            self._order.synchronize()


class NotedStage:
    """A stage whose graph uses host memory, which is noted at each launch.

    Args:
        stage: any other.
        host_values: the host memory.
        stream: that the stage is launched on.
    """

    def __init__(self, stage: ExecutableGraph, host_values: HostValues, stream: int) -> None:
        self.stage = stage
        self._host_values, self._stream = host_values, stream

    @property
    def handles(self) -> tuple[int, int] | None:
        """Those of the stage."""
        return self.stage.handles

    def launch(self) -> None:
        """Launches the stage."""
        self.stage.launch()
        self._host_values.note_launch(self._stream)


class EagerStage:
    """Eager work between two graphs: a call of JAX on private copies.

    A call that fails raises here, before a later graph could read what it has not made: Note
    [Arrays that were never made].

    Args:
        stage: one call.
        buffers: every buffer of the graph, by name.
    """

    handles = None

    def __init__(self, stage: Stage, buffers: Mapping[str, CudaBuffer]) -> None:
        self._calls = [
            (
                node.executable,
                [buffers[name] for name in node.arguments],
                [buffers[name] for name in node.results],
            )
            for node in stage.nodes
            if isinstance(node, CallNode)
        ]

    def launch(self) -> None:
        """Runs the call; its results are copied into their buffers.

        Raises:
            jax.errors.JaxRuntimeError: what XLA says, or the user's code under it.
        """
        for executable, arguments, results in self._calls:
            outputs = executable(*[buffer.snapshot().to_jax() for buffer in arguments])
            outputs = outputs if len(results) != 1 else (outputs,)
            for buffer, value in zip(results, outputs, strict=True):
                buffer.write(value)
