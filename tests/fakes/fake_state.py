"""What FakeDriver keeps of each handle, and the checks that a real driver would not make."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.fakes.condition_kernels import make_kernels
from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    CopyRows,
    FillRange,
    KernelLaunch,
    Port,
    make_call_error,
)
from tracegraph.runtime.cuda.driver.edge_calls import Edge
from tracegraph.runtime.definition.graph_nodes import Construct

# The legacy and the per-thread default stream, as the driver's macros have them.
DEFAULT_STREAMS = (0, 1, 2)
USUAL_SHARED_BYTES = 48 * 1024
MAX_CLUSTER = 16
USUAL_CLUSTER = 8


class MisuseError(AssertionError):
    """A call that would crash or corrupt a real process."""


@dataclasses.dataclass(frozen=True)
class FakeCall:
    """One call: its method and its arguments."""

    name: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class FakeNode:
    """A node of a graph.

    Attributes:
        kind: ``kernel``, ``copy``, ``fill``, ``child``, ``conditional``, ``event`` or ``empty``.
        action: what it does; of a child the nodes of the captured graph.
        dependencies: handles of the nodes before it, and when the node may start.
    """

    kind: str
    action: Any
    dependencies: tuple[tuple[int, Port], ...]


@dataclasses.dataclass(frozen=True)
class FakeConditional:
    """What a conditional node does.

    Attributes:
        condition: its handle, and how its value is used.
        bodies: the nodes of each graph inside of it, by handle.
    """

    condition: Condition
    bodies: tuple[dict[int, FakeNode], ...]

    def choose(self, value: int) -> dict[int, FakeNode] | None:
        """Returns the nodes that a value of the handle makes run, None for none."""
        if self.condition.construct is Construct.SWITCH:
            return self.bodies[value] if value < len(self.bodies) else None
        index = 0 if value else 1
        return self.bodies[index] if index < len(self.bodies) else None


@dataclasses.dataclass(frozen=True)
class FakePass:
    """What an event node does; the order of a launch's nodes is that of their making."""

    event: int
    is_wait: bool


@dataclasses.dataclass(frozen=True)
class FakeExecutable:
    """An executable graph: current actions by node, and the streams of its launches."""

    graph: int
    nodes: dict[int, FakeNode]
    launches: list[int]
    uploads: list[int]


class FakeState:
    """Handles, calls and checks of a FakeDriver.

    Args:
        fail_at: number of the call that fails, from 1; handing back resources counts too.
        fail_on: name of a method whose next call fails.
        error: CUDA's name of the failure.
        moves_bytes: memcpys, memsets and launches happen, on host memory.
        checks_context: calls that need a current context are refused in threads without one.
        confuses_ports: edges of one node that differ in their port all have that of the first.

    Attributes:
        calls: every call so far.
        graphs: nodes of each live graph, by handle.
        executables: by handle.
        functions: symbol of each kernel, by handle.
        kernels: for ``moves_bytes``: what runs a kernel, by symbol; takes its parameters.
        values: of the handles of conditional nodes.
        foreign_streams: contexts of the streams that other libraries made, by handle.
    """

    def __init__(
        self,
        *,
        fail_at: int | None = None,
        fail_on: str | None = None,
        error: str = "CUDA_ERROR_UNKNOWN",
        moves_bytes: bool = False,
        checks_context: bool = True,
        confuses_ports: bool = False,
    ) -> None:
        self.fail_at, self.fail_on, self.error = fail_at, fail_on, error
        self.moves_bytes, self.checks_context = moves_bytes, checks_context
        self.confuses_ports = confuses_ports
        # Blocks of a kernel that a multiprocessor has registers for.
        self.most_blocks = 32
        self.calls: list[FakeCall] = []
        self.graphs: dict[int, dict[int, FakeNode]] = {}
        self.executables: dict[int, FakeExecutable] = {}
        self.functions: dict[int, str] = {}
        self.values: dict[int, int] = {}
        self.foreign_streams: dict[int, int] = {}
        self.kernels: dict[str, Callable[[tuple[bytes, ...]], None]] = make_kernels(self.values)
        # Which conditional nodes' graphs are whose.
        self._inner_graphs: dict[int, int] = {}
        # The nodes of child graphs: which child node, and which of its nodes.
        self._child_nodes: dict[int, tuple[int, int]] = {}
        self._live: dict[int, str] = {}
        self._dead: dict[int, str] = {}
        self._captures: dict[int, list[Any]] = {}
        self._contexts: dict[int, list[int]] = {}
        self._event_contexts: dict[int, int] = {}
        self._libraries: dict[int, int] = {}
        self._limits: dict[int, tuple[int, bool]] = {}
        self._numbers = itertools.count(0x7000_0000, 0x100)
        self._thread = threading.local()
        self._lock = threading.RLock()

    def live_handles(self) -> dict[int, str]:
        """Returns the kind of every handle that is not destroyed yet."""
        return dict(self._live)

    def count_calls(self, name: str) -> int:
        """Returns how often a method was called."""
        return sum(call.name == name for call in self.calls)

    def read_edges(self, graph: int) -> set[tuple[int, int, Port]]:
        """Returns a graph's edges: indices of two nodes, and when the second may start."""
        index = {handle: number for number, handle in enumerate(self.graphs[graph])}
        return {
            (index[before], index[handle], port)
            for handle, node in self.graphs[graph].items()
            for before, port in node.dependencies
        }

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Returns what is in memory, where addresses are those of host memory."""
        return ctypes.string_at(address, nbytes)

    def add_captured(self, stream: int, what: Any) -> None:
        """Enqueues work of a library on a stream that is being captured.

        Args:
            stream: its handle.
            what: called when the graph runs; a text stands for work that does nothing here.
        """
        check(stream in self._captures, f"{what} on stream {stream:#x}, which is not captured")
        self._captures[stream].append(what)

    def _enter(self, name: str, *arguments: Any, needs_context: bool = False) -> None:
        """Records a call, and fails if it is the one chosen to fail."""
        with self._lock:
            self.calls.append(FakeCall(name, arguments))
            is_chosen = len(self.calls) == self.fail_at or name == self.fail_on
            if name == self.fail_on:
                self.fail_on = None
        if is_chosen:
            raise make_call_error(self.error, name, f"{name}{arguments}", "chosen by the test")
        has_context = getattr(self._thread, "context", 0) or not self.checks_context
        check(bool(has_context) or not needs_context, f"{name} without a current context")

    def _create(self, kind: str, name: str, *arguments: Any, needs_context: bool = False) -> int:
        self._enter(name, *arguments, needs_context=needs_context)
        handle = next(self._numbers)
        self._live[handle] = kind
        return handle

    def _destroy(self, kind: str, name: str, handle: int) -> None:
        """Destroys a handle even if the call is chosen to fail: real errors are older ones."""
        self._check_live(kind, handle)
        del self._live[handle]
        self._dead[handle] = kind
        self._enter(name, handle)

    def _copy(self, name: str, target: int, source: int, nbytes: int, stream: int) -> None:
        self._enter(name, target, source, nbytes, stream, needs_context=True)
        self._check_stream(stream)
        self._run(CopyRange(target, source, nbytes))

    def _copy_rows(self, rows: CopyRows, stream: int) -> None:
        self._enter("copy_rows_async", rows, stream, needs_context=True)
        self._check_stream(stream)
        check(rows.nbytes * rows.count > 0, "a copy of no bytes")
        check(rows.nbytes <= min(rows.target_pitch, rows.source_pitch), "rows lie in one another")
        self._run(rows)

    def _run(self, action: Any) -> None:
        """Does what a memcpy, memset or kernel does, where addresses are those of host memory."""
        if not self.moves_bytes:
            return
        if isinstance(action, CopyRange):
            ctypes.memmove(action.target_address, action.source_address, action.nbytes)
        if isinstance(action, CopyRows):
            for row in range(action.count):
                target = action.target_address + row * action.target_pitch
                source = action.source_address + row * action.source_pitch
                ctypes.memmove(target, source, action.nbytes)
        if isinstance(action, FillRange):
            content = action.value.to_bytes(action.element_bytes, "little") * action.count
            ctypes.memmove(action.target_address, content, len(content))
        if isinstance(action, KernelLaunch):
            self.kernels[self.functions[action.function]](action.parameters)
        if isinstance(action, FakeConditional):
            self._run_bodies(action)
        if isinstance(action, tuple):
            # What a library has enqueued: its work, or a text that stands for it; or nodes of ours.
            for work in (node.action for node in action):
                if callable(work):
                    work()
                else:
                    FakeState._run(self, work)

    def _run_bodies(self, action: FakeConditional) -> None:
        handle, is_loop = action.condition.handle, action.condition.construct is Construct.WHILE
        while (chosen := action.choose(self.values[handle])) is not None:
            for node in chosen.values():
                FakeState._run(self, node.action)
            if not is_loop:
                return

    def _add_node(self, graph: int, kind: str, action: Any) -> int:
        if graph not in self._inner_graphs:
            self._check_live("graph", graph)
        node = next(self._numbers)
        self.graphs[graph][node] = FakeNode(kind, action, ())
        return node

    def _add_edge(self, graph: int, edge: Edge) -> None:
        nodes = self.graphs[graph]
        for each in (edge.first, edge.second):
            check(each in nodes, f"an edge of {each:#x}, which is no node of the graph")
        first, second = nodes[edge.first], nodes[edge.second]
        check(
            not edge.port or {first.kind, second.kind} == {"kernel"},
            f"a programmatic edge from a {first.kind} to a {second.kind}",
        )
        # Nodes are run in the order in which they were added.
        check(edge.first < edge.second, "an edge to an earlier node")
        waits = [before for before, _ in second.dependencies]
        check(edge.first not in waits, "two edges between the same two nodes")
        dependencies = (*second.dependencies, (edge.first, Port(edge.port)))
        nodes[edge.second] = dataclasses.replace(second, dependencies=dependencies)

    def _set(self, executable: int, node: int, kind: str, action: Any) -> None:
        self._check_live("executable", executable)
        record = self.executables[executable]
        self._check_live("graph", record.graph)
        if node in self._child_nodes:
            check(bool(record.uploads), f"a change of node {node:#x} before the first upload")
            outer, place = self._child_nodes[node]
            inner = list(record.nodes[outer].action)
            check(type(inner[place].action) is type(action), f"{node:#x} becomes a {kind} node")
            inner[place] = dataclasses.replace(inner[place], action=action)
            record.nodes[outer] = dataclasses.replace(record.nodes[outer], action=tuple(inner))
            return
        check(node in record.nodes, f"{node:#x} is no node of this executable graph")
        before = record.nodes[node]
        check(before.kind == kind, f"a {before.kind} node cannot become a {kind} node")
        # Such a node is slower for ever.
        check(bool(record.uploads), f"a change of node {node:#x} before the first upload")
        if isinstance(action, KernelLaunch):
            is_same = (action.function, action.shape) == (
                before.action.function,
                before.action.shape,
            )
            check(is_same, f"node {node:#x} gets another kernel or shape")
        record.nodes[node] = dataclasses.replace(before, action=action)

    def _check_live(self, kind: str, handle: int) -> None:
        is_dead = self._dead.get(handle) == kind
        state = "destroyed" if is_dead else f"unknown (a {self._live.get(handle, 'stranger')})"
        check(self._live.get(handle) == kind, f"{kind} {handle:#x} is {state}")

    def _check_stream(self, stream: int) -> None:
        check(stream not in DEFAULT_STREAMS, "work on a default stream")
        check(stream not in self._captures, "work of ours on a stream that is being captured")
        # Streams that were not made here are JAX's.
        kind = self._live.get(stream, self._dead.get(stream, "stream"))
        check(stream not in self._dead and kind == "stream", f"{stream:#x} is no live stream")

    def _check_function(self, function: int) -> None:
        check(function in self.functions, f"{function:#x} is no kernel")
        self._check_live("library", self._libraries[function])

    def _check_launch(self, launch: KernelLaunch) -> None:
        self._check_function(launch.function)
        shape = launch.shape
        shared_bytes, has_large_clusters = self._limits[launch.function]
        allowed = max(USUAL_SHARED_BYTES, shared_bytes)
        check(min(*shape.grid, *shape.block, *shape.cluster) > 0, f"a size of zero in {shape}")
        check(math.prod(shape.block) <= 1024, f"too many threads in {shape}")
        check(shape.shared_bytes <= allowed, f"more shared memory than was allowed: {shape}")
        size = math.prod(shape.cluster)
        limit = MAX_CLUSTER if has_large_clusters else USUAL_CLUSTER
        check(size <= limit, f"a larger cluster than was allowed: {shape}")
        remainders = [blocks % each for blocks, each in zip(shape.grid, shape.cluster, strict=True)]
        check(not any(remainders), f"a grid that is no multiple of its cluster: {shape}")
        check(all(launch.parameters), "a parameter of no bytes")


def list_nodes(nodes: Mapping[int, FakeNode]) -> Iterator[FakeNode]:
    """Yields the nodes of a graph, each followed by those inside of it."""
    for node in nodes.values():
        yield node
        if isinstance(node.action, FakeConditional):
            for body in node.action.bodies:
                yield from list_nodes(body)


def check_fill(fill: FillRange) -> None:
    """Refuses a memset that the driver cannot do."""
    check(fill.element_bytes in (1, 2, 4), f"elements of {fill.element_bytes} bytes")
    check(0 <= fill.value < 1 << 8 * fill.element_bytes, f"value {fill.value} of {fill}")
    check(fill.count > 0, "a memset of no elements")
    check(fill.target_address % fill.element_bytes == 0, f"misaligned elements: {fill}")


def check(is_right: bool, what: str) -> None:
    """Raises MisuseError unless a condition holds."""
    if not is_right:
        raise MisuseError(what)
