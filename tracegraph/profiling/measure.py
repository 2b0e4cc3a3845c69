"""A captured graph → the times of its nodes: a second instance is walked through, node by node.

Note [A profile changes nothing]
The graph that calls replay is never launched, and no byte of its arena is written. A second
instance with an arena in a pool of its own gets copies of the arguments, and goes with its pool
when all is measured. So state, donated leaves, results that were handed out and generators are as
before, also when a profile fails midway. The user's events are left out: a record would move them.
What cannot be undone is what eager parts do: their Python code runs a few times more.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.capturing.progress import Progress
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import NodeData
from tracegraph.profiling.launch_keys import make_launch_key
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.definition.event_nodes import EventNode, HostEvent
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Node
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CallNode,
    ConditionHandle,
    CopyNode,
    KernelNode,
)
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import join_pool
from tracegraph.runtime.node_timer import NodeTime, NodeTimer, TimedGraph
from tracegraph.runtime.replay import Replay
from tracegraph.verification.device_verification import place_values
from tracegraph.verification.host_verification import copy_inputs
from tracegraph.verification.whole_times import bind_loading

# Replays of the whole that count, at most; user code in eager parts runs as often as it must.
REPEATS, REPEATS_WITH_EAGER = 9, 2
WHOLE_SECONDS = 3.0
# Nodes that are not timed by then have no time.
BUDGET_SECONDS = 60.0

_SETTER = "timed with the branch or loop behind it"
_EVENT = "left out: it would record or wait for your event"
_CONDITION = "it sets the condition of the loop that it is in"
_INSIDE = "inside of a branch or loop, and depends on what it runs on"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a graph.

    Attributes:
        times: of each node, by its index.
        sources: by node the index of the one that was timed: itself, or the same launch before.
        wholes: microseconds of one launch of each stage.
        floor_us: see `NodeTimer`.
        seconds: that it took.
    """

    times: Mapping[int, NodeTime]
    sources: Mapping[int, int]
    wholes: Sequence[float]
    floor_us: float | None
    seconds: float


def measure_graph(
    captured: CapturedGraph,
    leaves: Sequence[Any],
    device: Device,
    data: GraphData,
    nodes: Sequence[Node],
    progress: Progress,
) -> Measured:
    """Measures a captured graph, see Note [A profile changes nothing].

    Args:
        captured: the graph; it is not launched.
        leaves: one value per dynamic leaf.
        device: that it is on.
        data: the graph as records.
        nodes: the node of its definition behind each record.
        progress: shows how far it is.

    Raises:
        OutOfMemoryError: there is no memory for a second instance.
    """
    start = time.perf_counter()
    try:
        definition = leave_out_events(captured.lowered.definition)
        pool = join_pool(new_pool_id(), device.allocator)
        progress.enter("instantiate", "a second instance")
        replay = Replay(definition, device, pool, ArrayState.STATIC)
        place = copy_inputs if device.comparison is None else place_values
        values = place(captured, leaves)
        saved = _count_saved(data, nodes)
        graph = TimedGraph(
            definition, replay.arena, replay.buffers, replay.stages, replay.clock, saved
        )
        with device.open_timer(graph) as timer:
            progress.enter("time", "the whole")
            wholes = _time_wholes(timer, replay, values, len(leaves))
            replay.load(list(enumerate(values)))
            timer.start()
            walk = _Walk(timer, data, nodes, progress)
            walk.visit_all()
            found = walk.times, walk.sources
            floor_us = timer.floor_us
    except OutOfMemoryError as error:
        raise _make_memory_error(captured.name, error.where) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _make_memory_error(captured.name, str(error).partition("\n")[0]) from error
    return Measured(*found, wholes, floor_us, time.perf_counter() - start)


def leave_out_events(definition: GraphDefinition) -> GraphDefinition:
    """Returns a definition in which the user's events are nodes that do nothing.

    Args:
        definition: the whole capture.
    """
    if not definition.slots:
        return definition
    nothing = BufferUse(definition.slots[0].name, 0, 0)

    def replace(node: Node) -> Node:
        is_event = isinstance(node, EventNode) or (
            isinstance(node, CallNode) and isinstance(node.executable, HostEvent)
        )
        return CopyNode(node.name, nothing, nothing) if is_event else node

    stages = tuple(
        dataclasses.replace(stage, nodes=tuple(replace(node) for node in stage.nodes))
        for stage in definition.stages
    )
    return dataclasses.replace(definition, stages=stages)


def _time_wholes(
    timer: NodeTimer, replay: Replay, values: Sequence[Any], leaf_count: int
) -> list[float]:
    """Returns the median of each stage's times, on the arguments as a call takes them."""
    load = bind_loading(replay, values, leaf_count)
    repeats = REPEATS if replay.is_whole else REPEATS_WITH_EAGER
    found: list[list[float]] = []
    deadline = time.perf_counter() + WHOLE_SECONDS
    while len(found) <= repeats and (len(found) < 2 or time.perf_counter() < deadline):
        load()
        found.append([timer.time_stage(index) for index in range(len(replay.stages))])
    # The first launch loads what the others find there.
    return [statistics.median(times) for times in zip(*found[1:], strict=True)]


class _Walk:
    """Times the nodes in their order, equal launches once.

    Attributes:
        times: of the nodes so far, by index.
        sources: the node that was timed for each.
    """

    def __init__(
        self, timer: NodeTimer, data: GraphData, nodes: Sequence[Node], progress: Progress
    ) -> None:
        self._timer, self._data, self._nodes, self._progress = timer, data, nodes, progress
        self._deadline = time.perf_counter() + BUDGET_SECONDS
        self._known: dict[Hashable, int] = {}
        conditionals = [i for i, node in enumerate(nodes) if isinstance(node, ConditionalNode)]
        # The kernel that sets its handle is right before each.
        self._setters = {index - 1 for index in conditionals}
        self.times: dict[int, NodeTime] = {}
        self.sources: dict[int, int] = {}

    def visit_all(self) -> None:
        """Times all nodes."""
        for part in self._data.parts:
            if part.kind == "body":
                continue
            for node in self._data.list_nodes(part.number):
                self._visit(node, is_captured=part.kind == "graph")
        for node in self._data.nodes:
            if node.index not in self.times:
                self._skip(node, _INSIDE)

    def _visit(self, node: NodeData, *, is_captured: bool) -> None:
        if node.index in self._setters:
            self._skip(node, _SETTER, 0.0)
            return
        if node.kind.startswith("event "):
            self._skip(node, _EVENT)
            return
        if isinstance(self._nodes[node.index], ConditionalNode):
            self._visit_bodies(node)
        self._take(node, is_captured=is_captured)

    def _visit_bodies(self, owner: NodeData) -> None:
        """Times what is in a branch or a loop, on the values that it begins with."""
        bodies = [part for part in self._data.parts if part.owner == owner.index]
        with self._timer.visit(owner.writes):
            for part in bodies:
                for node in self._data.list_nodes(part.number):
                    note = self._find_hindrance(node)
                    if note:
                        self._skip(node, note, 0.0 if note == _SETTER else None)
                    else:
                        self._take(node, is_captured=True)

    def _find_hindrance(self, node: NodeData) -> str:
        source = self._nodes[node.index]
        if node.index in self._setters:
            return _SETTER
        if isinstance(source, KernelNode) and ConditionHandle.OWN in source.parameters:
            return _CONDITION
        # On values of another branch a loop need not end, and a handler may fail.
        return _INSIDE if isinstance(source, ConditionalNode | FfiCallNode) else ""

    def _take(self, node: NodeData, *, is_captured: bool) -> None:
        source = self._nodes[node.index]
        key = make_launch_key(source) if is_captured else None
        known = None if key is None else self._known.get(key)
        if known is not None:
            self._timer.run(source)
            self.times[node.index], self.sources[node.index] = self.times[known], known
            return
        if is_captured and time.perf_counter() > self._deadline:
            self._timer.run(source)
            self._skip(node, f"the {BUDGET_SECONDS:g} seconds that a profile takes were over")
            return
        self._progress.enter("time", f"node {node.index + 1} of {len(self._nodes)}")
        self.times[node.index] = self._timer.time(source, node.writes, is_captured=is_captured)
        self.sources[node.index] = node.index
        if key is not None:
            self._known[key] = node.index

    def _skip(self, node: NodeData, note: str, warm_us: float | None = None) -> None:
        self.times[node.index] = NodeTime(warm_us, None, note)
        self.sources[node.index] = node.index


def _count_saved(data: GraphData, nodes: Sequence[Node]) -> int:
    """Returns the most bytes that must be saved at a time, those of a body behind its owner's."""
    owners = {part.number: part.owner for part in data.parts}

    def count(node: NodeData) -> int:
        own = sum(use.nbytes for use in node.writes)
        if not isinstance(nodes[node.index], ConditionalNode):
            return own
        inside = (count(each) for each in data.nodes if owners[each.part] == node.index)
        return own + max(inside, default=0)

    outer = (node for node in data.nodes if owners[node.part] is None)
    return max(map(count, outer), default=0)


def _make_memory_error(name: str, where: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no memory is left to profile `{name}`",
        where=f"profile: {where}",
        why="its nodes are timed in a second instance of the graph, with an arena of its own",
        fix="release() captured functions that are not in use, or profile smaller arguments",
        anchor="out-of-memory",
    )
