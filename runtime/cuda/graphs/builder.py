"""Builds a stage as a CUDA graph of explicit nodes, and makes it executable.

Note [Child graphs]
    A library call is captured on a stream of its own, in the mode that concerns only this thread,
    and becomes a child graph. Its nodes are the library's: no edge to or from it is programmatic,
    and other addresses they get only as Note [Moved libraries] says. Calls of handlers follow one
    another, also where no byte is common: see Note [Calls of handlers].

Note [Early starts]
    A kernel that waits for others itself may be started when every block of theirs has ended, or
    already when every block has begun. The second hides more of what starting takes, but its
    waiting blocks hold places on the GPU that blocks with work may need. So it is done only where
    both kernels have places at the same time: each has at most half as many blocks as the GPU has
    threads, registers and shared memory for. On an H200 it takes 4 % off a step of 717 small
    kernels; without a limit it costs others 1 to 2 %. By threads alone a step of GPT-2, whose
    kernels have many registers, takes 1.6 % more on an H100. Nothing can lock up: what waits, waits
    for blocks that have their places.
    A kernel with early loads says itself when the next may start: when its own are asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeAlias

from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    FillRange,
    KernelLaunch,
    Port,
)
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.edge_calls import Edge, make_edge
from tracegraph.runtime.cuda.graphs.edges import check_edges
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader, LoadedKernel
from tracegraph.runtime.cuda.graphs.library_capture import Library, LibraryCapture
from tracegraph.runtime.cuda.graphs.library_moves import Move
from tracegraph.runtime.cuda.graphs.node_actions import (
    Action,
    EventPass,
    LibraryNode,
    make_action,
    make_launch,
)
from tracegraph.runtime.definition.code_target import FIRST_WITH_CHOICES
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Node, list_nested
from tracegraph.runtime.definition.library_nodes import CudnnNode, FfiCallNode, MatmulNode
from tracegraph.runtime.definition.nodes import KernelNode, LaunchShape, Locate
from tracegraph.runtime.errors import CudaError, InternalError, OutOfMemoryError, UnsupportedError
from tracegraph.runtime.streams.event import Event

# What must live as long as a graph.
Held: TypeAlias = LoadedKernel | Library | Event


class GraphBuilder:
    """Builds one graph; what it has made is destroyed again when a step fails."""

    # What a stage becomes nodes with, and which of its buffers are to get other addresses.
    def __init__(
        self,
        driver: CudaDriver,
        stage: Stage,
        locate: Locate,
        kernels: KernelLoader,
        name: str,
        movable: Collection[str],
    ) -> None:
        self.driver, self.stage, self.locate, self.name = driver, stage, locate, name
        self.kernels = kernels
        self.processors = 0
        self.handles: list[int] = []
        self.actions: list[Action] = []
        self.loaded: list[Held] = []
        self.names: dict[int, str] = {}
        # Of the library calls outside of loops and branches, by the handle of the child node.
        self.moves: dict[int, Mapping[str, tuple[Move, ...]]] = {}
        self._movable = frozenset(movable)
        # Most kernels are launched many times: by identity of the code, which the stage holds.
        self._kernels: dict[tuple[int, LaunchShape], LoadedKernel] = {}
        self._places: dict[tuple[int, int, int], int] = {}

    def build(self, libraries: Mapping[str, Library]) -> tuple[int, int]:
        """Returns the handles of the graph and of the executable graph."""
        driver = self.driver
        self.processors = driver.count_processors()
        with contextlib.ExitStack() as undo:
            graph = driver.create_graph()
            undo.callback(driver.destroy_graph, graph)
            with contextlib.ExitStack() as scratch:
                capture = LibraryCapture(driver, scratch, libraries)
                label = f"graph `{self.name}`"
                for handle, action in self._add_nodes(graph, self.stage, capture, None, label):
                    self.handles.append(handle)
                    self.actions.append(action)
            with ErrorPlace(f"{label} of {format_kinds(self.stage)}"):
                executable = driver.instantiate(graph, self.names)
            undo.pop_all()
        return graph, executable

    def _add_nodes(
        self,
        graph: int,
        part: Stage | Body,
        capture: LibraryCapture,
        condition: int | None,
        place: str,
    ) -> list[tuple[int, Action]]:
        """Returns the handle of each node that it adds, and what the node does.

        Args:
            graph: that of the stage, or one inside of a conditional node.
            part: the nodes and their order.
            capture: captures library calls.
            condition: handle of the conditional node around the graph, if there is one.
            place: what errors call the graph.
        """
        added: list[tuple[int, Action]] = []
        edges: list[Edge] = []
        _check_edges(part, self.name)
        small = self._find_small(part)
        for index, firsts in enumerate(_collect_dependencies(part, small)):
            node = part.nodes[index]
            label = label_node(self.name, index, node)
            with ErrorPlace(label):
                if isinstance(node, ConditionalNode):
                    waiting, handle, action = self._add_conditional(graph, node, capture, label)
                    edges.append(make_edge(waiting, handle))
                else:
                    handle, action = self._add(graph, node, capture, condition)
                    waiting = handle
            edges += [make_edge(added[first][0], waiting, port) for first, port in firsts]
            self.names[handle] = label
            added.append((handle, action))
        with ErrorPlace(place):
            self.driver.add_edges(graph, edges)
        check_edges(self.driver, graph, edges, place, self.names)
        return added

    def _add(
        self,
        graph: int,
        node: Node,
        capture: LibraryCapture,
        condition: int | None,
    ) -> tuple[int, Action]:
        driver, context = self.driver, self.kernels.context
        if isinstance(node, KernelNode):
            return self._add_kernel(graph, node, condition)
        action = make_action(driver, node, 0, self.locate)
        if isinstance(action, CopyRange):
            return driver.add_copy_node(graph, action, context), action
        if isinstance(action, FillRange):
            return driver.add_fill_node(graph, action, context), action
        if isinstance(action, EventPass):
            return self._add_event(graph, node, action), action
        if isinstance(node, LibraryNode):
            self.loaded.append(capture.find_library(node))
            with capture.run(node, self.locate) as child:
                handle = driver.add_child_node(graph, child)
            if condition is None and isinstance(node, MatmulNode | CudnnNode):
                self.moves[handle] = capture.find_moves(node, handle, self.locate, self._movable)
            return handle, action
        return driver.add_empty_node(graph), action

    def _add_event(self, graph: int, node: Node, action: EventPass) -> int:
        assert isinstance(node, EventNode)
        self.loaded.append(node.event)
        if action.is_wait:
            return self.driver.add_event_wait_node(graph, action.handle)
        node.event.pass_by()
        return self.driver.add_event_record_node(graph, action.handle)

    def _add_kernel(
        self, graph: int, node: KernelNode, condition: int | None
    ) -> tuple[int, KernelLaunch]:
        kernel = self._load(node)
        bound = node if condition is None else node.bind(condition)
        action = make_launch(self.driver, bound, kernel.function, self.locate)
        return self.driver.add_kernel_node(graph, action), action

    def _load(self, node: KernelNode) -> LoadedKernel:
        key = id(node.code), node.shape
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self.kernels.load(node.code, node.shape)
            self.loaded.append(kernel)
        return kernel

    def _find_small(self, part: Stage | Body) -> set[int]:
        """Returns the kernels beside which another one has places, see Note [Early starts]."""
        small: set[int] = set()
        for index in {index for edge in part.programmatic for index in edge}:
            node = part.nodes[index]
            if not isinstance(node, KernelNode) or node.code.early:
                continue
            places = self._count_places(node, index) * self.processors
            if 2 * math.prod(node.shape.grid) <= places:
                small.add(index)
        return small

    def _count_places(self, node: KernelNode, index: int) -> int:
        """Returns how many blocks of a kernel have places on one multiprocessor."""
        threads, shared_bytes = math.prod(node.shape.block), node.shape.shared_bytes
        key = id(node.code), threads, shared_bytes
        if key not in self._places:
            with ErrorPlace(label_node(self.name, index, node)):
                function = self._load(node).function
                found = self.driver.count_resident_blocks(function, threads, shared_bytes)
            self._places[key] = found
        return self._places[key]

    def _add_conditional(
        self,
        graph: int,
        node: ConditionalNode,
        capture: LibraryCapture,
        label: str,
    ) -> tuple[int, int, Action]:
        """Returns the kernel that sets the handle, the node behind it, and what the node does."""
        driver, context = self.driver, self.kernels.context
        action = make_action(driver, node, 0, self.locate)
        check_constructs(driver.read_version(), node)
        handle = driver.create_condition(graph, context)
        setter, _ = self._add_kernel(graph, node.setter, handle)
        condition = Condition(handle, node.construct, len(node.bodies))
        added, graphs = driver.add_conditional_node(graph, condition, context)
        self.names[setter] = f"{label}, the kernel that sets its condition"
        for index, (inner, body) in enumerate(zip(graphs, node.bodies, strict=True)):
            self._add_nodes(inner, body, capture, handle, f"body {index} of {label}")
        return setter, added, action


def check_constructs(version: int, node: ConditionalNode) -> None:
    """Checks that the driver has a conditional node of a kind.

    Args:
        version: of the driver, as 12_040.
        node: the branch or loop.

    Raises:
        UnsupportedError: it is too old.
    """
    has_choice = len(node.bodies) > 1
    if not has_choice or version >= FIRST_WITH_CHOICES:
        return
    raise UnsupportedError(
        f"the CUDA driver has no conditional node of {len(node.bodies)} branches",
        where=f"{node.kind} {node.name}",
        why=f"it is of CUDA {version // 1000}.{version % 1000 // 10}, and a choice among branches "
        "came with CUDA 12.8",
        fix="install an NVIDIA driver of CUDA 12.8 or later, or capture the function on this "
        "machine, where each branch becomes a node of its own",
        anchor="unsupported",
    )


def _check_edges(part: Stage | Body, name: str) -> None:
    """Checks that edges join what they may; `name` is that of the captured function."""
    for edge in part.edges:
        first, second = edge
        if not 0 <= first < second < len(part.nodes):
            raise _make_edge_error(name, edge, "an edge leads from an earlier node to a later one")
        kinds = {part.nodes[first].kind, part.nodes[second].kind}
        if edge in part.programmatic and kinds != {KernelNode.kind}:
            raise _make_edge_error(name, edge, "a programmatic edge joins two kernels")
    if not part.programmatic <= set(part.edges):
        edge = min(part.programmatic - set(part.edges))
        raise _make_edge_error(name, edge, "a programmatic edge is one of the edges")


def _collect_dependencies(
    part: Stage | Body, small: Collection[int]
) -> list[list[tuple[int, Port]]]:
    """Returns for each node the nodes before it, by their indices, and when it may start.

    Args:
        part: nodes and edges.
        small: nodes that leave room for others, see Note [Early starts].
    """
    dependencies: list[list[tuple[int, Port]]] = [[] for _ in part.nodes]
    for edge in part.edges:
        first, second = edge
        port = Port.COMPLETE
        if edge in part.programmatic:
            has_room = first in small and second in small
            port = Port.LAUNCH_ORDER if has_room else Port.PROGRAMMATIC
        dependencies[second].append((first, port))
    calls = [index for index, node in enumerate(part.nodes) if _has_call(node)]
    for first, second in itertools.pairwise(calls):
        if (first, Port.COMPLETE) not in dependencies[second]:
            dependencies[second].append((first, Port.COMPLETE))
    return dependencies


def _has_call(node: Node) -> bool:
    """True for a call of a handler, and for a conditional node with one inside."""
    return any(isinstance(each, FfiCallNode) for each in list_nested([node]))


def _make_edge_error(name: str, edge: tuple[int, int], rule: str) -> InternalError:
    return InternalError(
        f"graph `{name}` has a wrong edge",
        where=f"edge from node {edge[0]} to node {edge[1]}",
        why=rule,
    )


class ErrorPlace(contextlib.AbstractContextManager[None]):
    """Puts the place in the user's graph before the failed call of a driver error.

    No generator: an error that replaces another in a generator leaves frames in a cycle, and these
    hold the memory of the capture.

    Args:
        label: what errors call the place.
    """

    def __init__(self, label: str) -> None:
        self._label = label

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises the same error with another place."""
        if not isinstance(error, CudaError | OutOfMemoryError):
            return
        raise type(error)(
            error.what,
            where=f"{self._label}: {error.where}",
            why=error.why,
            fix=error.fix,
            anchor=error.anchor,
        ) from error


def label_node(name: str, index: int, node: Node) -> str:
    """Returns how errors name a node of the graph of a captured function."""
    return f"node {index} of graph `{name}`, {node.kind} {node.name}"


def format_kinds(part: Stage | Body) -> str:
    """Returns how many nodes of each kind a graph has, and what is inside of its loops.

    Args:
        part: the graph.
    """
    counts = Counter(node.kind for node in part.nodes)
    texts = [f"{count} {kind}" for kind, count in counts.most_common()] or ["no nodes"]
    for node in part.nodes:
        for body in node.bodies if isinstance(node, ConditionalNode) else ():
            texts.append(f"in {node.kind} {node.name} ({format_kinds(body)})")
    return ", ".join(texts)
