"""Graphs that are built against the fake driver, and checks of what is built."""

from __future__ import annotations

import collections
import gc
import itertools
from collections.abc import Iterator
from typing import Any

from tests.fakes.fake_driver import FakeDriver
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.cuda.driver.calls import Port
from tracegraph.runtime.cuda.graphs.builder import Library
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Node, list_nested
from tracegraph.runtime.definition.library_nodes import (
    CudnnNode,
    FfiCallNode,
    LibraryCallNode,
    MatmulNode,
)
from tracegraph.runtime.definition.nodes import BufferUse, CallNode, CopyNode, FillNode, KernelNode

ARENA_ADDRESS = 0x7F00_0000_0000
# What the driver calls a node, by our kind; a library call is a graph of its own.
DRIVER_KINDS = {"kernel": "kernel", "memcpy": "copy", "memset": "fill"}
LIBRARY_KINDS = ("matmul", "ffi_call", "cudnn", "fft", "scale", "triangular_solve")
DRIVER_KINDS |= dict.fromkeys(LIBRARY_KINDS, "child")


class FakeLibrary:
    """A fake library: enqueues one piece of work per call."""

    stream = 0

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def enqueue(
        self,
        node: MatmulNode | FfiCallNode | LibraryCallNode | CudnnNode,
        locate: Any,
        stream: int,
    ) -> None:
        for use in node.ranges:
            locate(use)
        self._driver.add_captured(stream, node.name)


def build_graphs(definition: GraphDefinition, driver: FakeDriver, context: int) -> list[CudaGraph]:
    """Returns one executable graph per captured stage, over an arena at a made-up address."""
    address_of = {slot.name: ARENA_ADDRESS + slot.offset for slot in definition.slots}

    def locate(use: BufferUse) -> int:
        return address_of[use.buffer] + use.offset

    loader = KernelLoader(driver, context)
    library: Library = FakeLibrary(driver)
    libraries: dict[str, Library] = dict.fromkeys(LIBRARY_KINDS, library)
    return [
        CudaGraph(driver, stage, locate, loader, libraries, definition.name)
        for stage in definition.stages
        if stage.is_captured
    ]


def check_built(definition: GraphDefinition) -> None:
    """Builds and launches; the driver must get every node and edge, and all handles back."""
    driver = FakeDriver()
    context = driver.retain_primary_context(0)
    graphs = build_graphs(definition, driver, context)
    stages = [stage for stage in definition.stages if stage.is_captured]
    with driver.use_context(context):
        stream = driver.create_stream()
    for graph, stage in zip(graphs, stages, strict=True):
        built = driver.graphs[graph.handles[0]]
        _check_part(driver, graph.handles[0], built, stage)
        graph.launcher(stream)()
    nodes = [node for stage in stages for node in list_nested(stage.nodes)]
    images = {node.code.cubin for node in nodes if isinstance(node, KernelNode)}
    assert driver.count_calls("load_library") == len(images)
    assert sum(graph.node_count for graph in graphs) == definition.node_count
    graphs.clear()
    graph = None
    if len(driver.live_handles()) > 2:
        gc.collect()
    assert sorted(driver.live_handles().values()) == ["context", "stream"]


def _check_part(driver: FakeDriver, graph: int, built: dict[int, Any], part: Stage | Body) -> None:
    """Checks the nodes and edges of a graph, and those of the graphs inside of it."""
    kinds: list[str] = []
    # A conditional node has the kernel that sets its handle right before it.
    first, last = [], []
    edges = set()
    for node in part.nodes:
        first.append(len(kinds))
        if isinstance(node, ConditionalNode):
            edges.add((len(kinds), len(kinds) + 1, False))
            kinds += ["kernel", "conditional"]
        else:
            kinds.append(DRIVER_KINDS[node.kind])
        last.append(len(kinds) - 1)
    assert [node.kind for node in built.values()] == kinds
    edges |= {(last[a], first[b], (a, b) in part.programmatic) for a, b in part.edges}
    # Calls of handlers follow one another.
    is_call = [any(isinstance(n, FfiCallNode) for n in list_nested([node])) for node in part.nodes]
    calls = [index for index, held in enumerate(is_call) if held]
    edges |= {(last[a], first[b], False) for a, b in itertools.pairwise(calls)}
    found = {(a, b, port != Port.COMPLETE) for a, b, port in driver.read_edges(graph)}
    assert found == edges
    handles = list(built)
    for index, node in zip(last, part.nodes, strict=True):
        if not isinstance(node, ConditionalNode):
            continue
        inner = built[handles[index]].action.bodies
        for body, nodes in zip(node.bodies, inner, strict=True):
            (number,) = [each for each, held in driver.graphs.items() if held is nodes]
            _check_part(driver, number, nodes, body)


def find_faults(definition: GraphDefinition) -> list[str]:
    """Returns what is wrong with nodes, places and edges of a definition; empty when all is right.

    Written apart from lowering: every byte range lies in its slot and every slot in the arena, two
    nodes that share bytes of which one is written are ordered, no edge is implied by others, and an
    edge is programmatic only between two kernels of which the second waits by itself.
    """
    found = []
    sizes = {slot.name: _count_bytes(slot) for slot in definition.slots}
    offsets = {slot.name: slot.offset for slot in definition.slots}
    for slot in definition.slots:
        if slot.offset < 0 or slot.offset + sizes[slot.name] > definition.arena_bytes:
            found.append(f"{slot.name} is outside of the arena")
    for stage in definition.stages:
        for node in stage.nodes:
            found += [
                f"{node.name} uses {use} beyond its {sizes[use.buffer]} bytes"
                for use, _ in list_uses(node)
                if use.offset < 0 or use.offset + use.nbytes > sizes[use.buffer]
            ]
        found += _find_faults_of_order(stage, offsets)
    return found


def _find_faults_of_order(part: Stage | Body, offsets: dict[str, int]) -> list[str]:
    found = [*_find_unordered(part, offsets), *_find_bad_edges(part)]
    for node in part.nodes:
        for body in node.bodies if isinstance(node, ConditionalNode) else ():
            found += _find_faults_of_order(body, offsets)
    return found


def list_uses(node: Node) -> list[tuple[BufferUse, bool]]:
    """Returns every byte range of a node, and whether it is written."""
    if isinstance(node, KernelNode):
        return list(node.uses)
    if isinstance(node, CopyNode):
        return [(node.source, False), (node.target, True)]
    if isinstance(node, FillNode):
        return [(node.target, True)]
    if isinstance(node, MatmulNode):
        return [(use, role in MatmulNode.WRITTEN) for role, use in node.operands]
    if isinstance(node, ConditionalNode):
        inner = [node.setter, *(each for body in node.bodies for each in body.nodes)]
        return [use for each in inner for use in list_uses(each)]
    if isinstance(node, FfiCallNode):
        written = [(use, True) for use in node.outputs if use is not None]
        return written + [(use, False) for use in node.operands if use is not None]
    if isinstance(node, LibraryCallNode):
        return [(use, role in node.call.written) for role, use in node.operands]
    if isinstance(node, CudnnNode):
        return [(use, use in node.written_ranges) for use in node.ranges]
    assert isinstance(node, CallNode)
    return []


def find_longest_chain(stage: Stage | Body) -> int:
    """Returns how many nodes the longest path of a stage has."""
    length = [1] * len(stage.nodes)
    for first, second in sorted(stage.edges, key=lambda edge: edge[1]):
        length[second] = max(length[second], length[first] + 1)
    return max(length, default=0)


def find_excess_bytes(lowered: Lowered) -> float:
    """Returns by which factor the arena is larger than XLA's own memory for the same regions."""
    total = 0
    for region in lowered.regions:
        analysis = region.executable.memory_analysis()  # type: ignore[attr-defined]
        total += analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        total += analysis.temp_size_in_bytes - analysis.alias_size_in_bytes
    total += sum(len(s.content) for s in lowered.definition.slots if s.content is not None)
    return lowered.definition.arena_bytes / max(total, 1)


def _count_bytes(slot: Any) -> int:
    count = 1
    for size in slot.shape:
        count *= size
    if slot.is_packed:
        bits = 2 if slot.dtype.name.endswith("int2") else 4
        return (count * bits + 7) // 8
    return count * slot.dtype.itemsize


def _find_unordered(stage: Stage | Body, offsets: dict[str, int]) -> Iterator[str]:
    before = _find_ancestors(stage)
    ranges = sorted(
        (offsets[use.buffer] + use.offset, offsets[use.buffer] + use.offset + use.nbytes, i, w)
        for i, node in enumerate(stage.nodes)
        for use, w in list_uses(node)
        if use.nbytes
    )
    active: list[tuple[int, int, int, bool]] = []
    for start, end, index, is_written in ranges:
        active = [other for other in active if other[1] > start]
        for _, _, other, other_written in active:
            early, late = sorted((index, other))
            is_ordered = early == late or before[late] >> early & 1
            if (is_written or other_written) and not is_ordered:
                yield f"{stage.nodes[late].name} does not wait for {stage.nodes[early].name}"
        active.append((start, end, index, is_written))


def _find_bad_edges(stage: Stage | Body) -> Iterator[str]:
    before = _find_ancestors(stage)
    waits = collections.defaultdict(list)
    for first, second in stage.edges:
        waits[second].append(first)
    for second, firsts in waits.items():
        for first in firsts:
            if any(before[other] >> first & 1 for other in firsts):
                yield f"edge {first} -> {second} is implied by others"
    for first, second in stage.programmatic:
        later = stage.nodes[second]
        is_early = isinstance(later, KernelNode) and later.begins_with_wait
        if (first, second) not in stage.edges:
            yield f"{first} -> {second} is programmatic and no edge"
        if not is_early or not isinstance(stage.nodes[first], KernelNode):
            yield f"edge {first} -> {second} is programmatic"


def _find_ancestors(stage: Stage | Body) -> list[int]:
    """Returns for each node the bitset of the nodes before it."""
    before = [0] * len(stage.nodes)
    for first, second in sorted(stage.edges, key=lambda edge: edge[1]):
        before[second] |= before[first] | 1 << first
    return before
