"""Build: DeviceProgram and MemoryPlan → GraphDefinition; steps become nodes, order edges."""

from __future__ import annotations

import itertools

from tracegraph.lowering.dependencies import reduce_edges, verify_order
from tracegraph.lowering.device_program import Copy, DeviceProgram, DeviceStep, ExecutableCall, Step
from tracegraph.lowering.memory_plan import MemoryPlan
from tracegraph.lowering.request import Role
from tracegraph.runtime.graph import BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.nodes import CallNode, CopyNode, Node


def build_graph(program: DeviceProgram, plan: MemoryPlan) -> GraphDefinition:
    """Returns the nodes, edges and buffer places of a program.

    Args:
        program: the steps, in program order.
        plan: an offset for each of the program's buffers.

    Returns:
        One stage per maximal run of captured steps, and one per eager step.

    Raises:
        CaptureError: the declared order leaves two steps that touch the same bytes unordered.
    """
    verify_order(program)
    residents = {output.alias for output in program.outputs if output.alias is not None}
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
        )
        for buffer in program.buffers
    )
    return GraphDefinition(
        name=program.name,
        arena_bytes=plan.arena_bytes,
        slots=slots,
        stages=_build_stages(program),
        inputs=tuple(spec.buffer.name for spec in program.inputs),
        outputs=tuple(spec.buffer.name for spec in program.outputs),
    )


def _build_stages(program: DeviceProgram) -> tuple[Stage, ...]:
    stages = []
    runs = itertools.groupby(range(len(program.steps)), key=lambda i: _stage_key(program.steps, i))
    for _, run in runs:
        indices = list(run)
        first, last = indices[0], indices[-1]
        inside = [
            (before - first, after - first)
            for before, after in program.edges
            if first <= before and after <= last
        ]
        stages.append(
            Stage(
                nodes=tuple(_build_node(program.steps[index]) for index in indices),
                edges=reduce_edges(len(indices), inside),
                is_captured=_is_captured(program.steps[first]),
            )
        )
    return tuple(stages)


def _stage_key(steps: tuple[Step, ...], index: int) -> int:
    """Returns a key that changes at every border between two stages."""
    if not _is_captured(steps[index]):
        return index
    return -1 - sum(not _is_captured(step) for step in steps[:index])


def _is_captured(step: Step) -> bool:
    return not isinstance(step, ExecutableCall) or step.is_captured


def _build_node(step: Step) -> Node:
    if isinstance(step, Copy):
        return CopyNode(step.name, step.source, step.target)
    if isinstance(step, DeviceStep):
        return step.node
    reads = tuple(use.buffer for use in step.reads)
    writes = tuple(use.buffer for use in step.writes)
    return CallNode(step.name, step.executable, reads, writes, step.in_place)
