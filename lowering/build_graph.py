"""Build: DeviceProgram and MemoryPlan → GraphDefinition; steps become nodes, order edges.

Note [Programmatic edges]
An edge P -> C is full when C is started after P has completed, and programmatic when C may be
started before that. XLA writes kernels that begin with a wait (`griddepcontrol.wait`, before they
touch memory: the machine code is read, see Note [Loads ahead of the wait] in `lowering/xla`): there
C waits until every kernel with an edge to it has *completed* and what it wrote is visible. Starting
C early then hides the time that starting takes, and nothing else.
An edge is programmatic only if both nodes are kernels and C begins with a wait; else it is full.

Why that is safe. Say X comes before C in the order of the edges; the claim is that X has completed,
and its writes are visible, before C touches memory. The last step of the way from X to C is an edge
P -> C. If it is full, P has completed before C starts. If it is programmatic, P has completed when
the wait of C returns. Either way P has completed. If X is P, that is all. Else X comes before P,
and by the same claim for the shorter way X had completed before P touched memory, so before P
completed: P cannot complete earlier, because

* a P with a programmatic edge into it begins with a wait, and completes only after that wait;
* a P without a wait has only full edges into it, and does not even start before;
* a P that is no kernel has only full edges into it as well.

When an early start happens is the device's choice (as soon as P's blocks have begun, or when they
have ended): the claim rests on C's wait alone.

So edges that the transitive reduction left out (A -> C where A -> P -> C) stay covered: C may be
started while A still runs, if P was, but its wait returns after P has completed, P's own wait
returned after A had, and what A wrote was visible then and stays so. The waits of one graph need
none of another: a launch begins when the work before it on its stream has completed.

What must never be: a programmatic edge into a kernel that does not wait. It would start early and
read what P has not written yet. The only loads ahead of a wait are those of Note [Early loads].
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from tracegraph.lowering.byte_ranges import verify_ranges
from tracegraph.lowering.device_program import (
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    GraphStep,
    Step,
    list_device_steps,
)
from tracegraph.lowering.planning.byte_edges import find_edges, verify_edges
from tracegraph.lowering.planning.lanes import arrange_in_lanes
from tracegraph.lowering.planning.memory_plan import MemoryPlan
from tracegraph.lowering.planning.step_order import reduce_edges
from tracegraph.lowering.planning.step_times import estimate_microseconds
from tracegraph.lowering.request import Role
from tracegraph.runtime.definition.collective_nodes import CollectiveNode, JointCollectiveNode
from tracegraph.runtime.definition.early_loads import CompletedNodes, find_settled, find_writers
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph import BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, GraphNode, Node
from tracegraph.runtime.definition.nodes import CallNode, CopyNode, KernelNode
from tracegraph.runtime.errors import InternalError

# A node behind one may be started before it has completed.
_KERNELS = (KernelNode, CollectiveNode)


def build_graph(
    program: DeviceProgram, plan: MemoryPlan, *, has_two_lanes: bool = False
) -> GraphDefinition:
    """Returns the nodes, edges and buffer offsets of a program.

    Args:
        program: the steps, in program order; their declared order is verified, see `verify_order`.
        plan: an offset for each of the program's buffers.
        has_two_lanes: see Note [Lanes].

    Returns:
        One stage per maximal run of captured steps, and one per eager step.

    Raises:
        InternalError: the edges of a graph leave two steps that share bytes unordered, or a node
            names bytes that are not its buffer's.
    """
    residents = {output.alias for output in program.outputs if output.alias is not None}
    lent = {each.name for each in plan.lifetimes if each.is_lent}
    residents |= {spec.buffer.name for spec in program.inputs if spec.role is Role.CONSTANT}
    slots = tuple(
        BufferSlot(
            buffer.name,
            plan.offsets[buffer.name],
            buffer.shape,
            buffer.dtype,
            buffer.weak_type,
            is_resident=buffer.name in residents or buffer.content is not None,
            content=buffer.content,
            is_packed=buffer.is_packed,
            is_lent=buffer.name in lent,
            is_host=buffer.is_host,
        )
        for buffer in program.buffers
    )
    definition = GraphDefinition(
        name=program.name,
        arena_size=plan.arena_size,
        slots=slots,
        stages=_build_stages(program, plan, has_two_lanes=has_two_lanes),
        inputs=tuple(spec.buffer.name for spec in program.inputs),
        outputs=tuple(spec.buffer.name for spec in program.outputs),
    )
    verify_ranges(definition)
    return definition


def _build_stages(
    program: DeviceProgram, plan: MemoryPlan, *, has_two_lanes: bool
) -> tuple[Stage, ...]:
    stages = []
    writers = _find_writers(program, plan)
    settled = find_settled(writers)
    # The key changes at every border between two stages.
    borders = itertools.accumulate(
        0 if _is_captured(step) and (not index or _is_captured(program.steps[index - 1])) else 1
        for index, step in enumerate(program.steps)
    )
    keyed = itertools.groupby(enumerate(borders), key=lambda entry: entry[1])
    for indices in [[index for index, _ in run] for _, run in keyed]:
        steps = program.steps[indices[0] : indices[-1] + 1]
        edges = _find_stage_edges(program, plan, indices[0], steps)
        steps, edges = _deal_out(steps, edges, has_two_lanes=has_two_lanes)
        nodes = tuple(_build_node(step, program, plan, settled) for step in steps)
        objects = [_get_node(step) for step in steps]
        behind = _find_settled_behind(nodes, edges, objects, writers)
        stages.append(
            Stage(
                nodes=nodes,
                edges=edges,
                is_captured=_is_captured(steps[0]),
                programmatic=find_programmatic(nodes, edges, behind),
            )
        )
    return tuple(stages)


def _find_stage_edges(
    program: DeviceProgram, plan: MemoryPlan, first: int, steps: Sequence[Step]
) -> tuple[tuple[int, int], ...]:
    """Returns the fewest edges among the steps of one stage, by their index in it.

    Device nodes wait for what shares bytes with them. A compiled call keeps the order that
    the streams declare: what else it touches is not known here.
    """
    if any(isinstance(step, ExecutableCall) for step in steps):
        last = first + len(steps) - 1
        found = [(a - first, b - first) for a, b in program.edges if first <= a and b <= last]
    else:
        found = find_edges(steps, plan.offsets)
    edges = reduce_edges(len(steps), found)
    verify_edges(steps, edges, plan.offsets, name=program.name)
    return edges


def _deal_out(
    steps: Sequence[Step], edges: tuple[tuple[int, int], ...], *, has_two_lanes: bool
) -> tuple[Sequence[Step], tuple[tuple[int, int], ...]]:
    """Returns steps and edges in lanes, or as they are where lanes may not be: Note [Lanes]."""
    if any(_keeps_edges(step) for step in steps):
        return steps, edges
    times = [estimate_microseconds(step) for step in steps]
    order, arranged = arrange_in_lanes(times, edges, has_two=has_two_lanes)
    return [steps[index] for index in order], arranged


def _keeps_edges(step: Step) -> bool:
    if isinstance(step, DeviceStep):
        return isinstance(step.node, EventNode)
    return isinstance(step, ExecutableCall)


def _find_writers(program: DeviceProgram, plan: MemoryPlan) -> dict[int, frozenset[int]]:
    """Returns what writes the early loads of each kernel, see `find_writers`."""
    steps = list_device_steps(_list_graph_steps(program))
    kernels = [step.node for step in steps if isinstance(step.node, KernelNode)]
    if not any(node.code.early for node in kernels):
        return {id(node): frozenset() for node in kernels}
    places = {
        buffer.name: range(start, start + buffer.nbytes)
        for buffer in program.buffers
        for start in (plan.offsets[buffer.name],)
    }
    order = [_get_node(step) for step in program.steps]
    steps_of = zip(order, program.steps, strict=True)
    writes = [(each, use.buffer) for each, step in steps_of for use in step.writes]
    return find_writers(kernels, order, writes, places)


def _get_node(step: Step) -> object:
    return step.node if isinstance(step, DeviceStep) else step


def _find_settled_behind(
    nodes: Sequence[Node],
    edges: Sequence[tuple[int, int]],
    objects: Sequence[object],
    writers: Mapping[int, Collection[int]],
) -> frozenset[int]:
    """Returns the kernels of a stage that load early what is there, see Note [Early loads].

    Args:
        nodes: of the stage.
        edges: pairs of their indices.
        objects: what each of them was built from, as ``writers`` knows it.
        writers: see `find_writers`.
    """
    if not any(writers.values()):
        return find_settled(writers)
    places = {id(each): place for place, each in enumerate(objects)}
    settled: set[int] = set()
    completed = CompletedNodes(edges)
    for place, node in enumerate(nodes):
        early = [p for p in completed.list_ahead(place) if isinstance(nodes[p], _KERNELS)]
        found = completed.find(place, early)
        ahead = writers.get(id(node), ())
        if all(each in places and found >> places[each] & 1 for each in ahead):
            settled.add(id(node))
        completed.add(place, early if _starts_early(node, settled) else ())
    return frozenset(settled)


def _list_graph_steps(program: DeviceProgram) -> list[GraphStep]:
    return [step for step in program.steps if not isinstance(step, ExecutableCall | Copy)]


def find_programmatic(
    nodes: Sequence[Node],
    edges: Iterable[tuple[int, int]],
    settled: frozenset[int],
) -> frozenset[tuple[int, int]]:
    """Returns the edges at which the second kernel may be started early.

    See Note [Programmatic edges].

    Args:
        nodes: of a stage or a body.
        edges: pairs of their indices.
        settled: kernels that load nothing before they wait that is not there, by identity.
    """
    return frozenset(
        (first, second)
        for first, second in edges
        if isinstance(nodes[first], _KERNELS) and _starts_early(nodes[second], settled)
    )


def _starts_early(node: Node, settled: Set[int]) -> bool:
    if isinstance(node, CollectiveNode):
        # Its kernel begins with a wait.
        return True
    return isinstance(node, KernelNode) and node.begins_with_wait and id(node) in settled


def _is_captured(step: Step) -> bool:
    if isinstance(step, DeviceStep):
        return not isinstance(step.node, JointCollectiveNode)
    return not isinstance(step, ExecutableCall) or step.is_captured


def _build_node(
    step: Step, program: DeviceProgram, plan: MemoryPlan, settled: frozenset[int]
) -> Node:
    if isinstance(step, Copy):
        return CopyNode(step.name, step.source, step.target)
    if not isinstance(step, ExecutableCall):
        return _build_graph_node(step, program, plan, settled)
    reads = tuple(use.buffer for use in step.reads)
    writes = tuple(use.buffer for use in step.writes)
    return CallNode(step.name, step.executable, reads, writes, step.in_place)


def _build_graph_node(
    step: GraphStep, program: DeviceProgram, plan: MemoryPlan, settled: frozenset[int]
) -> GraphNode:
    if isinstance(step, DeviceStep):
        return step.node
    setter = step.setter.node
    if not isinstance(setter, KernelNode):
        raise InternalError(
            f"a {setter.kind} sets the condition of `{step.name}`",
            where=f"{step.kind} {step.name} of `{program.name}`",
            why="only a kernel can set the handle of a conditional node",
        )
    bodies = tuple(_build_body(body, program, plan, settled) for body in step.bodies)
    return ConditionalNode(step.name, step.construct, bodies, setter, step.turn)


def _build_body(
    steps: Sequence[GraphStep],
    program: DeviceProgram,
    plan: MemoryPlan,
    settled: frozenset[int],
) -> Body:
    nodes = tuple(_build_graph_node(step, program, plan, settled) for step in steps)
    edges = reduce_edges(len(steps), find_edges(steps, plan.offsets))
    verify_edges(steps, edges, plan.offsets, name=program.name)
    return Body(nodes, edges, find_programmatic(nodes, edges, settled))
