"""Cut a program of GPUs at the collectives that cross processes.

Note [Joint collectives]
Kernels of ours reach the memory of GPUs of one process. What GPUs of several processes exchange is
left to XLA: a *joint collective* is an eager call between two graphs, made by all processes, as
each of them cuts the same program at the same places. XLA has placed and joined the collectives of
the whole function before, so what is cut is what `jax.jit` would run.

Neighbours of which none needs what another writes are one call. Collectives inside of loops and
branches are inside of one node of a graph, which cannot be left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    GraphStep,
    list_device_steps,
)
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.lowering.xla.refusal import make_refused_error
from tracegraph.runtime.definition.collective_nodes import (
    MAX_MEMBERS,
    CollectiveNode,
    JointCollectiveNode,
)
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import RefusedWork, UnsupportedError

_Uses: TypeAlias = tuple[BufferUse, ...]


def cut_collectives(
    program: XlaProgram, owners: Sequence[int], region: str, locate: Callable[[str], str]
) -> XlaProgram:
    """Returns a program whose collectives over several processes are joint ones.

    Args:
        program: of all GPUs.
        owners: the process of each GPU.
        region: its name.
        locate: says where an instruction comes from.

    Raises:
        UnsupportedError: a loop or a branch has one, or one that is not cut has too many GPUs.
    """
    if len(owners) == 1:
        return program
    for each in list_device_steps(program.steps):
        _check_members(each, owners, region, locate)
    if len({*owners}) == 1:
        return program
    steps: list[GraphStep] = []
    for step in program.steps:
        if isinstance(step, ConditionalStep):
            _check_inside(step, owners, region, locate)
        node = _find_crossing(step, owners)
        if node is None:
            steps.append(step)
        elif steps and _may_join(steps[-1], node):
            steps.append(_join(steps.pop(), step, node))
        else:
            steps.append(_make_joint((node,), step.reads, step.writes))
    return dataclasses.replace(program, steps=tuple(steps))


def _find_crossing(step: GraphStep, owners: Sequence[int]) -> CollectiveNode | None:
    """Returns the collective of a step, if it is one over several processes."""
    node = step.node if isinstance(step, DeviceStep) else None
    if isinstance(node, CollectiveNode) and node.exchange.crosses(owners):
        return node
    return None


def _list_members(step: GraphStep) -> tuple[CollectiveNode, ...]:
    """Returns the collectives of a joint one; none of another step."""
    node = step.node if isinstance(step, DeviceStep) else None
    return node.members if isinstance(node, JointCollectiveNode) else ()


def _may_join(step: GraphStep, added: CollectiveNode) -> bool:
    members = _list_members(step)
    reached = [use for member in members for use in added.ranges if member.target.overlaps(use)]
    return bool(members) and not reached


def _join(first: GraphStep, second: GraphStep, added: CollectiveNode) -> DeviceStep:
    reads = dict.fromkeys((*first.reads, *second.reads))
    writes = dict.fromkeys((*first.writes, *second.writes))
    return _make_joint((*_list_members(first), added), tuple(reads), tuple(writes))


def _make_joint(members: tuple[CollectiveNode, ...], reads: _Uses, writes: _Uses) -> DeviceStep:
    return DeviceStep(JointCollectiveNode(members), reads, writes)


def _check_members(
    step: DeviceStep, owners: Sequence[int], region: str, locate: Callable[[str], str]
) -> None:
    """Raises where kernels of more GPUs would have to meet than a table has room for."""
    node = step.node
    if not isinstance(node, CollectiveNode) or node.exchange.crosses(owners):
        return
    count = len(node.exchange.groups[0])
    if count <= MAX_MEMBERS:
        return
    raise _make_collective_error(
        region,
        node,
        locate,
        problem=f"between {count} GPUs, more than {MAX_MEMBERS}",
        why="the kernels of all of them meet, and each has a table of so many",
        fix="use jax.jit for this function",
    )


def _make_collective_error(
    region: str,
    node: CollectiveNode,
    locate: Callable[[str], str],
    *,
    problem: str,
    why: str,
    fix: str,
) -> UnsupportedError:
    # Of an iteration that is written out the name has its number behind it.
    place = locate(node.name.partition("@")[0])
    return make_refused_error(
        f"`{region}` has a collective {problem}",
        where=f"{node.exchange.kind.value} at {place}",
        why=why,
        fix=fix,
        refused=[RefusedWork(region, node.kind, f"is {problem}")],
    )


def _check_inside(
    outer: ConditionalStep, owners: Sequence[int], region: str, locate: Callable[[str], str]
) -> None:
    nodes = (_find_crossing(step, owners) for step in list_device_steps([outer]))
    found = next((node for node in nodes if node is not None), None)
    if found is None:
        return
    what = "a loop" if outer.construct is Construct.WHILE else "a branch"
    raise _make_collective_error(
        region,
        found,
        locate,
        problem=f"over several processes inside of {what}",
        why="XLA is called for it between two graphs, and this one is in the middle of a graph",
        fix="unroll the loop: lax.scan(..., unroll=True); or use jax.jit for this function",
    )
