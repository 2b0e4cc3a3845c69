"""ForeignGraph: a graph of the driver that another library has built, as one that we launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.graphs.builder import ErrorPlace
from tracegraph.runtime.cuda.graphs.stages import BlockingStage, CudaStage
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.definition.graph import ExecutableGraph
from tracegraph.runtime.environment import read_launch_blocking

# What errors call it.
FOREIGN = "a graph of cuda.core"


class ForeignGraph:
    """An executable graph, made from a graph of another owner.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        graph: the driver's handle of the other owner's graph.
        owner: holds what the nodes of the graph need.

    Raises:
        CudaError: the driver refuses the graph.
    """

    def __init__(self, driver: CudaDriver, context: int, graph: int, owner: Any) -> None:
        self._driver, self._context, self._graph = driver, context, graph
        with driver.use_context(context), ErrorPlace(FOREIGN):
            self._executable = _Owned(driver, driver.instantiate(graph, {}), owner)

    @property
    def handles(self) -> tuple[int, int]:
        """The driver's handles of the graph and of the executable graph."""
        return self._graph, self._executable.handle

    def launcher(self, stream: int) -> Callable[[], None]:
        """Returns the function that enqueues every node once on a stream."""
        owned = self._executable
        return self._driver.make_launcher(owned.handle, stream, self._context, owned)


class _Owned:
    """Owns an executable; destroys it when graph and launchers are gone."""

    def __init__(self, driver: CudaDriver, handle: int, owner: Any) -> None:
        self.handle, self.owner = handle, owner
        weakref.finalize(self, driver.destroy_executable, handle).atexit = False


class CudaExchange:
    """Exchanges graphs with other libraries on one GPU.

    Args:
        order: of JAX's work and ours.
    """

    def __init__(self, order: JaxOrder) -> None:
        self._order = order

    def adopt(self, handle: int, owner: Any) -> ExecutableGraph:
        """Makes a graph of another library executable, to be launched in JAX's order."""
        order = self._order
        stage = CudaStage(ForeignGraph(order.driver, order.primary, handle, owner), (), order)
        return BlockingStage(stage, order, FOREIGN) if read_launch_blocking() else stage

    def embed(self, handle: int, graph: int) -> None:
        """Adds a copy of a graph of ours as one node to a graph of another library."""
        with self._order.use_context(), ErrorPlace(FOREIGN):
            self._order.driver.add_child_node(handle, graph)
