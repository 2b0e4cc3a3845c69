"""FakeDriver: the CUDA driver's methods without a GPU, strict about misuse.

It records every call, returns distinct handles, keeps the nodes and edges of graphs, can fail at
a chosen call, and raises MisuseError (no CudaError, so no code handles it by mistake) for what
would crash or corrupt a real process. With ``moves_bytes=True`` addresses are those of host memory,
and memcpys, memsets and launches of graphs really happen, at once and in order.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from tests.fakes.fake_state import (
    FakeConditional,
    FakeExecutable,
    FakeNode,
    FakePass,
    check,
    check_fill,
    list_nodes,
)
from tests.fakes.fake_streams import FakeStreams
from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    CopyRows,
    FillRange,
    KernelLaunch,
)
from tracegraph.runtime.cuda.driver.captured_nodes import CapturedNode
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.edge_calls import Edge, make_edge
from tracegraph.runtime.cuda.driver.parameters import KernelPatch, PackedParameters
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import TensorMap

MAX_SHARED_BYTES = 227 * 1024


if TYPE_CHECKING:
    # For type checkers it is the real one, whose methods it must have as they are.
    class Base(FakeStreams, CudaDriver): ...
else:
    Base = FakeStreams


class FakeDriver(Base):
    """Has the public methods of CudaDriver, and those of EXTRAS for tests.

    See `FakeState` and `FakeMemory` for arguments and attributes.
    """

    EXTRAS = ("add_captured", "count_calls", "live_handles", "read_bytes", "read_edges")

    def read_version(self) -> int:
        self._enter("read_version")
        return 13_000

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy("copy_async", target, source, nbytes, stream)

    def copy_rows_async(self, rows: CopyRows, stream: int) -> None:
        self._copy_rows(rows, stream)

    def fill_async(
        self, target: int, value: int, element_bytes: int, count: int, stream: int
    ) -> None:
        self._enter("fill_async", target, value, element_bytes, count, stream, needs_context=True)
        self._check_stream(stream)
        fill = FillRange(target, value, element_bytes, count)
        check_fill(fill)
        self._run(fill)

    def load_library(self, image: bytes) -> int:
        return self._create("library", "load_library", image)

    def unload_library(self, library: int) -> None:
        users = [
            executable
            for executable, record in self.executables.items()
            for node in list_nodes(record.nodes)
            if node.kind == "kernel" and self._libraries[node.action.function] == library
        ]
        check(not users, "unload_library of kernels that an executable graph can still launch")
        self._destroy("library", "unload_library", library)

    def get_function(self, library: int, symbol: str) -> int:
        self._enter("get_function", library, symbol, needs_context=True)
        self._check_live("library", library)
        function = next(self._numbers)
        self.functions[function] = symbol
        self._libraries[function] = library
        self._limits[function] = (0, False)
        return function

    def set_shared_bytes(self, function: int, nbytes: int) -> None:
        self._enter("set_shared_bytes", function, nbytes)
        self._check_function(function)
        check(0 <= nbytes <= MAX_SHARED_BYTES, f"{nbytes} bytes of shared memory")
        self._limits[function] = (nbytes, self._limits[function][1])

    def count_resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        self._enter("count_resident_blocks", function, threads, shared_bytes)
        self._check_function(function)
        return min(2048 // threads, self.most_blocks)

    def allow_large_clusters(self, function: int) -> None:
        self._enter("allow_large_clusters", function)
        self._check_function(function)
        self._limits[function] = (self._limits[function][0], True)

    def launch_kernel(self, launch: KernelLaunch, stream: int) -> None:
        self._enter("launch_kernel", launch, stream, needs_context=True)
        self._check_launch(launch)
        self._check_stream(stream)
        self._run(launch)

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        self._enter("encode_tensor_map", tensor_map, address)
        check(address % 16 == 0, f"a tensor map at {address:#x}, not a multiple of 16")
        return (b"map " + address.to_bytes(8, "little")).ljust(128, b"\0")

    def create_graph(self) -> int:
        graph = self._create("graph", "create_graph")
        self.graphs[graph] = {}
        return graph

    def destroy_graph(self, graph: int) -> None:
        self._drop_graph(graph)
        self._destroy("graph", "destroy_graph", graph)

    def add_kernel_node(self, graph: int, launch: KernelLaunch) -> int:
        self._enter("add_kernel_node", graph, launch)
        self._check_launch(launch)
        return self._add_node(graph, "kernel", launch)

    def add_copy_node(self, graph: int, copy: CopyRange, context: int) -> int:
        self._enter("add_copy_node", graph, copy, context)
        self._check_live("context", context)
        check(copy.nbytes > 0, "a copy of no bytes")
        return self._add_node(graph, "copy", copy)

    def add_fill_node(self, graph: int, fill: FillRange, context: int) -> int:
        self._enter("add_fill_node", graph, fill, context)
        self._check_live("context", context)
        check_fill(fill)
        return self._add_node(graph, "fill", fill)

    def add_child_node(self, graph: int, child: int) -> int:
        self._enter("add_child_node", graph, child)
        self._check_live("graph", child)
        return self._add_node(graph, "child", tuple(self.graphs[child].values()))

    def find_child(self, node: int) -> int:
        self._enter("find_child", node)
        (outer,) = (nodes for nodes in self.graphs.values() if node in nodes)
        check(outer[node].kind == "child", f"{node:#x} is no child node")
        inner = next(self._numbers)
        self.graphs[inner] = {}
        for place, each in enumerate(outer[node].action):
            handle = next(self._numbers)
            self.graphs[inner][handle] = each
            self._child_nodes[handle] = node, place
        return inner

    def list_captured(self, graph: int) -> list[CapturedNode]:
        self._enter("list_captured", graph)
        found = []
        for handle, node in self.graphs[graph].items():
            action = node.action
            kind = {KernelLaunch: "KERNEL", FillRange: "MEMSET"}.get(type(action), "HOST")
            known = action if isinstance(action, KernelLaunch | FillRange) else None
            found.append(CapturedNode(handle, kind, known))
        return found

    def add_event_record_node(self, graph: int, event: int) -> int:
        self._enter("add_event_record_node", graph, event)
        self._check_live("event", event)
        return self._add_node(graph, "event", FakePass(event, False))

    def add_event_wait_node(self, graph: int, event: int) -> int:
        self._enter("add_event_wait_node", graph, event)
        self._check_live("event", event)
        return self._add_node(graph, "event", FakePass(event, True))

    def add_empty_node(self, graph: int) -> int:
        self._enter("add_empty_node", graph)
        return self._add_node(graph, "empty", None)

    def create_condition(self, graph: int, context: int) -> int:
        self._enter("create_condition", graph, context)
        self._check_live("context", context)
        check(graph in self.graphs, f"a condition in {graph:#x}, which is no graph")
        return next(self._numbers)

    def add_conditional_node(
        self, graph: int, condition: Condition, context: int
    ) -> tuple[int, tuple[int, ...]]:
        self._enter("add_conditional_node", graph, condition, context)
        self._check_live("context", context)
        check(condition.handle not in self.values, "a handle of two conditional nodes")
        most = {Construct.IF: 2, Construct.WHILE: 1}.get(condition.construct, sys.maxsize)
        count = condition.body_count
        check(0 < count <= most, f"{count} bodies in a node of kind {condition.construct}")
        self.values[condition.handle] = 0
        inner = tuple(next(self._numbers) for _ in range(count))
        for each in inner:
            self.graphs[each], self._inner_graphs[each] = {}, graph
        action = FakeConditional(condition, tuple(self.graphs[each] for each in inner))
        return self._add_node(graph, "conditional", action), inner

    def _drop_graph(self, graph: int) -> None:
        self.graphs.pop(graph, None)
        for inner in [each for each, outer in self._inner_graphs.items() if outer == graph]:
            del self._inner_graphs[inner]
            self._drop_graph(inner)

    def count_nodes(self, graph: int) -> int:
        self._enter("count_nodes", graph)
        self._check_live("graph", graph)
        return len(self.graphs[graph])

    def add_edges(self, graph: int, edges: Collection[Edge]) -> None:
        self._enter("add_edges", graph, edges)
        for edge in edges:
            self._add_edge(graph, edge)

    def list_edges(self, graph: int, room: int) -> frozenset[Edge]:
        self._enter("list_edges", graph, room)
        edges = []
        for handle, node in self.graphs[graph].items():
            early = [port for _, port in node.dependencies if port]
            for first, port in node.dependencies:
                # The defect of Note [Ports of edges], as if one call had added all of them.
                given = early[0] if port and self.confuses_ports else port
                edges.append(make_edge(first, handle, given))
        return frozenset(edges[:room])

    def list_node_kinds(self, graph: int) -> frozenset[str]:
        self._enter("list_node_kinds", graph)
        self._check_live("graph", graph)
        # What stands for captured work is a kernel, unless it is named like a kind.
        names = (str(node.action) for node in self.graphs[graph].values())
        return frozenset(name if name.isupper() else "KERNEL" for name in names)

    def instantiate(self, graph: int, node_names: Mapping[int, str]) -> int:
        self._check_live("graph", graph)
        executable = self._create("executable", "instantiate", graph, node_names)
        self.executables[executable] = FakeExecutable(graph, dict(self.graphs[graph]), [], [])
        return executable

    def destroy_executable(self, executable: int) -> None:
        self.executables.pop(executable, None)
        self._destroy("executable", "destroy_executable", executable)

    def upload(self, executable: int, stream: int) -> None:
        self._enter("upload", executable, stream, needs_context=True)
        self._check_stream(stream)
        self._check_live("executable", executable)
        self.executables[executable].uploads.append(stream)

    def make_launcher(
        self, executable: int, stream: int, context: int = 0, owner: object = None
    ) -> Callable[[], None]:
        self._enter("make_launcher", executable, stream, context)
        self._check_stream(stream)
        self._check_live("executable", executable)

        def launch() -> None:
            if context and not getattr(self._thread, "context", 0):
                self.set_current(context)
            self._enter("launch", executable, stream, needs_context=True)
            self._check_live("executable", executable)
            self._check_stream(stream)
            self.executables[executable].launches.append(stream)
            for node in self.executables[executable].nodes.values():
                self._run(node.action)

        launch.__dict__["owner"] = owner
        return launch

    def set_kernel_node(self, executable: int, node: int, launch: KernelLaunch) -> None:
        self._enter("set_kernel_node", executable, node, launch)
        self._check_launch(launch)
        self._set(executable, node, "kernel", launch)

    def patch_kernel_node(self, executable: int, node: int, launch: KernelLaunch) -> KernelPatch:
        self._enter("patch_kernel_node", executable, node, launch)
        packed = PackedParameters(launch.parameters)

        def send() -> tuple[int]:
            self._enter("send", executable, node)
            changed = dataclasses.replace(launch, parameters=packed.read())
            self._check_launch(changed)
            self._set(executable, node, "kernel", changed)
            return (0,)

        # An error was raised already.
        return KernelPatch(packed, send, lambda: None)

    def set_copy_node(self, executable: int, node: int, copy: CopyRange, context: int) -> None:
        self._enter("set_copy_node", executable, node, copy, context)
        self._check_live("context", context)
        check(copy.nbytes > 0, "a copy of no bytes")
        before = self.executables[executable].nodes.get(node)
        if before is not None and isinstance(before.action, CopyRange):
            for name in ("source_address", "target_address"):
                old, new = getattr(before.action, name), getattr(copy, name)
                is_same = self._is_own(old) == self._is_own(new)
                check(is_same, f"the {name} of a copy moves to memory of another origin")
        self._set(executable, node, "copy", copy)

    def _is_own(self, address: int) -> bool:
        """True for memory that this driver has allocated; the rest is JAX's."""
        allocated = ((a, s) for a, s in self._sizes.items() if a in self._live)
        mapped = ((a, size) for a, (size, _) in self._ranges.items())
        return any(start <= address < start + nbytes for start, nbytes in (*allocated, *mapped))

    def set_fill_node(self, executable: int, node: int, fill: FillRange, context: int) -> None:
        self._enter("set_fill_node", executable, node, fill, context)
        self._check_live("context", context)
        check_fill(fill)
        self._set(executable, node, "fill", fill)

    def write_dot(self, graph: int, path: str | os.PathLike[str]) -> None:
        self._enter("write_dot", graph, path)
        self._check_live("graph", graph)
        lines = [f"  {first} -> {second};" for first, second, _ in sorted(self.read_edges(graph))]
        pathlib.Path(path).write_text("\n".join(["digraph {", *lines, "}"]))

    def begin_capture(self, stream: int) -> None:
        self._enter("begin_capture", stream)
        self._check_live("stream", stream)
        check(stream not in self._captures, "begin_capture of a stream that is captured")
        self._captures[stream] = []

    def end_capture(self, stream: int) -> int:
        check(stream in self._captures, "end_capture of a stream that is not captured")
        # A capture is over even if its end fails.
        captured = self._captures.pop(stream)
        graph = self._create("graph", "end_capture", stream)
        self.graphs[graph] = {
            next(self._numbers): FakeNode("captured", what, ()) for what in captured
        }
        return graph

    def abort_capture(self, stream: int) -> None:
        self._captures.pop(stream, None)
        self._enter("abort_capture", stream)
