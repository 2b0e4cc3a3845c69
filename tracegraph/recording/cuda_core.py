"""Graphs of NVIDIA's `cuda.core`: a `CUDAGraph` as a node of one, and one as a `CUDAGraph`.

`cuda.core` makes explicit graphs since version 1.0, as `cuda.core.graph.GraphDefinition`. It wraps
no graph that others have made, but gives the driver's handle of its own: both ways use that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import EdgeData, NodeData, PartData
from tracegraph.recording.cuda_graph import CUDAGraph
from tracegraph.recording.graph_errors import make_handle_error, make_poolless_error
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.definition.graph_nodes import ConditionalNode
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import ConfigError, UnsupportedError
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.runtime.memory.pool_id import PoolId

GRAPH_MODULE = "cuda.core.graph"


class ExportedGraph:
    """A `CUDAGraph` as a graph definition of `cuda.core`; made by `export_to_cuda_core`.

    It holds the memory and the kernels of the graph: keep it as long as the definition, and what is
    instantiated from it, is in use.

    Attributes:
        definition: a `cuda.core.graph.GraphDefinition` with one node, a child graph.
    """

    def __init__(self, definition: Any, addresses: dict[int, int], held: tuple[Any, ...]) -> None:
        self.definition = definition
        # By the identities of what is held.
        self._addresses, self._held = addresses, held

    def find_address(self, array: Any) -> int:
        """Returns the address at which the definition reads or writes an array.

        Args:
            array: that the block read or made. What other nodes write there is what is read.

        Raises:
            ConfigError: the block neither read nor made it.
        """
        base = unwrap_key(array)
        address = self._addresses.get(id(base._buffer if isinstance(base, Array) else array))
        if address is not None:
            return address
        raise ConfigError(
            "find_address is given an array that the graph does not have",
            where=f"{locate_caller()}, argument 0 `array`",
            why="it has what its block read from outside, and what it made and kept",
            fix="pass one of these arrays themselves, no copy",
            anchor="unknown-option",
        )


def export_to_cuda_core(graph: CUDAGraph) -> ExportedGraph:
    """Returns a raw graph as an explicit graph of NVIDIA's `cuda.core`.

    The definition has a copy of the graph as one node, to which others can be added. It works on
    fixed addresses: its inputs have the values of now, and a later ``copy_`` does not reach them.
    Arrays of the block show what replays of ``graph`` wrote.

    Args:
        graph: captured, on a GPU, without branches and loops of the device.

    Raises:
        ConfigError: `cuda.core` is not installed, or the graph is of the host device.
        UnsupportedError: the graph has branches or loops.
        ReplayError: nothing was captured, or the graph was reset.
        CaptureError: this thread is capturing or tracing.
    """
    captured, block, exchange, handle = graph.find_exported("export_to_cuda_core")
    make_definition = _find_definition_type()
    kinds = sorted({n.kind for n in list_nodes(captured) if isinstance(n, ConditionalNode)})
    if kinds:
        raise UnsupportedError(
            f"the graph has nodes that cannot be exported: {', '.join(kinds)}",
            where=f"{locate_caller()}, argument 0 `graph`",
            why="the driver copies no graph with conditional nodes into another",
            fix="export what is around the branch or the loop, and build that with cuda.core",
            anchor="unsupported",
        )
    sources = (*block.fixed, *block.state, *block.live)
    values = (*block.fixed, *(each.read() for each in (*block.state, *block.live)))
    with captured.reserve():
        captured.load_arrays([unwrap_key(value) for value in values], is_rebound=False)
    definition = make_definition()
    exchange.embed(int(definition.handle), handle)
    buffers, graph_definition = captured.replay.buffers, captured.replay.definition
    names = (*graph_definition.inputs[: len(sources)], *graph_definition.outputs)
    held = (*sources, *block.state, *block.outputs)
    addresses = {id(each): buffers[name].address for each, name in zip(held, names, strict=True)}
    return ExportedGraph(definition, addresses, (held, captured))


def import_from_cuda_core(definition: Any) -> CUDAGraph:
    """Returns a graph of NVIDIA's `cuda.core` as a raw graph, which is replayed in JAX's order.

    A replay waits for the work of JAX before it, and later work of JAX waits for the replay, as for
    every `CUDAGraph`. ``instantiate()`` takes changes of the definition over.

    Args:
        definition: a `cuda.core.graph.GraphDefinition`, complete. It is held, and must hold what
            its nodes use.

    Raises:
        ConfigError: it is something else, or captures are not for a GPU.
        CudaError: the driver refuses the graph.
    """
    module = sys.modules.get(GRAPH_MODULE)
    kind = getattr(module, "GraphDefinition", None)
    if kind is None or not isinstance(definition, kind):
        raise ConfigError(
            f"import_from_cuda_core is given {type(definition).__name__}, not a graph definition",
            where=f"{locate_caller()}, argument 0 `definition`",
            why="a graph is imported from a cuda.core.graph.GraphDefinition, which has its nodes",
            fix="pass one; of a GraphBuilder it is `builder.graph_definition`",
            anchor="unknown-option",
        )
    return ImportedGraph(definition)


class ImportedGraph(CUDAGraph):
    """A graph of `cuda.core`, replayed like one of a block; made by `import_from_cuda_core`."""

    def __init__(self, definition: Any) -> None:
        super().__init__(keep_graph=True)
        self._definition: Any = definition
        self._device = device = find_device(is_checking=read_check_replay())
        self._attachments.jax_device = device.jax_device
        self._make_executable()
        self._has_graph = True

    def get_graph_data(self) -> GraphData:
        """Returns nodes and edges as records; their memory is known to `cuda.core` alone."""
        if self._definition is None:
            return super().get_graph_data()
        return read_definition(self._definition)

    def pool(self) -> PoolId:
        """Refuses: the graph has no memory of ours."""
        if self._definition is None:
            return super().pool()
        raise make_poolless_error()

    def pools(self) -> list[PoolId]:
        """Returns no ids: the graph has no memory of ours."""
        return super().pools() if self._definition is None else []

    def _make_executable(self) -> None:
        if self._definition is None:
            super()._make_executable()
            return
        exchange = self._device.exchange if self._device is not None else None
        if exchange is None:
            raise make_handle_error("import_from_cuda_core", is_empty=False)
        stage = exchange.adopt(int(self._definition.handle), self._definition)
        captured: Any = _Launch(stage)
        self._captured, self._ready = captured, None

    def _bind(self) -> None:
        if self._definition is None:
            super()._bind()
        self._bound = self._captured

    def _forget(self) -> None:
        super()._forget()
        self._definition = None


class _Launch:
    """Stands where a block's graph has a `CapturedGraph`: it takes no arguments."""

    def __init__(self, stage: Any) -> None:
        self.stages = (stage,)
        self.replay = self

    def make_quick_call(self, _: tuple[Any, ...]) -> Callable[[], None]:
        """Returns what launches the graph."""
        launch: Callable[[], None] = self.stages[0].launch
        return launch

    def try_call(self, *_: Any) -> None:
        """Launches the graph."""
        self.stages[0].launch()


def read_definition(definition: Any) -> GraphData:
    """Returns the nodes and edges of a definition of `cuda.core`, each node behind those before it.

    Args:
        definition: a `cuda.core.graph.GraphDefinition`.
    """
    edges = list(definition.edges())
    waits: dict[Any, set[Any]] = {node: set() for node in definition.nodes()}
    for first, second in edges:
        waits[second].add(first)
    order: dict[Any, int] = {}
    while len(order) < len(waits):
        ready = [node for node in waits if node not in order and waits[node] <= order.keys()]
        order.update({node: len(order) + i for i, node in enumerate(ready)})
    nodes = tuple(
        NodeData(index, 0, _name_kind(node), repr(node), "", None, (), ())
        for node, index in order.items()
    )
    pairs = sorted((order[first], order[second]) for first, second in edges)
    return GraphData(
        "cuda.core graph",
        (PartData(0, "graph"),),
        nodes,
        tuple(EdgeData(first, second) for first, second in pairs),
        (),
    )


def _name_kind(node: Any) -> str:
    """Returns ``kernel`` for a ``KernelNode``."""
    return type(node).__name__.removesuffix("Node").lower()


def list_nodes(captured: CapturedGraph) -> list[Any]:
    """Returns the nodes of a graph, those inside of branches and loops apart."""
    return [node for stage in captured.replay.definition.stages for node in stage.nodes]


def _find_definition_type() -> Any:
    try:
        # Version 0.7 has the module, and in it a class of another name.
        return importlib.import_module(GRAPH_MODULE).GraphDefinition
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "`cuda.core` is not installed, or is older than its explicit graphs",
            where=locate_caller(),
            why=f"a graph is exported to a {GRAPH_MODULE}.GraphDefinition; Python says: {error}",
            fix='pip install "cuda-core>=1.0"',
            anchor="config",
        ) from None
