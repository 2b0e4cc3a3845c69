"""Every program of the corpus on its whole way, up to explicit nodes in the fake driver."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest

from tests.deviceless import building
from tests.deviceless.corpus import find_program, lower
from tests.deviceless.programs import PROGRAMS, Program
from tracegraph.lowering.planning.memory_plan import verify_plan
from tracegraph.runtime.definition.graph import ArenaSize, GraphDefinition, Stage
from tracegraph.runtime.definition.nodes import KernelNode

# Below this, rounding each buffer up to 256 bytes is most of the arena.
LARGE_BYTES = 1 << 18


# Twelve layers are two of them six times over, and take XLA a minute on a busy machine.
BUILT = [program for program in PROGRAMS if program.name != "gpt_12x128"]


# One test, since another worker would compile the program again.
@pytest.mark.parametrize("program", BUILT, ids=lambda program: program.name)
def test_program_is_lowered_planned_and_built(program: Program, h200: Any) -> None:
    lowered = lower(program, h200)
    definition = lowered.definition
    verify_plan(lowered.plan)
    assert {buffer.name for buffer in lowered.program.buffers} == set(lowered.plan.offsets)
    assert {slot.name for slot in definition.slots} == set(lowered.plan.offsets)
    assert building.find_faults(definition) == []
    assert definition.node_count == len(lowered.program.steps)
    if definition.arena_bytes > LARGE_BYTES:
        assert building.find_excess_bytes(lowered) <= 1.05
    building.check_built(definition)


def test_train_step_has_parallel_branches(h200: Any) -> None:
    definition = lower(find_program("gpt_2x128"), h200).definition
    (stage,) = definition.stages
    kinds = collections.Counter(node.kind for node in stage.nodes)
    assert 80 <= kinds["kernel"] <= 200
    assert building.find_longest_chain(stage) < 0.9 * len(stage.nodes)
    assert len(stage.edges) <= 2 * len(stage.nodes)
    assert len(stage.programmatic) >= 0.5 * len(stage.edges)


def _change_stage(definition: GraphDefinition, **changes: Any) -> GraphDefinition:
    (stage,) = definition.stages
    return dataclasses.replace(definition, stages=(dataclasses.replace(stage, **changes),))


def _drop_edge(definition: GraphDefinition) -> GraphDefinition:
    (stage,) = definition.stages
    edges = stage.edges[:-1]
    return _change_stage(definition, edges=edges, programmatic=stage.programmatic & set(edges))


def _repeat_edge(definition: GraphDefinition) -> GraphDefinition:
    (stage,) = definition.stages
    new = next(
        (a, d)
        for a, b in stage.edges
        for c, d in stage.edges
        if b == c and (a, d) not in stage.edges
    )
    return _change_stage(definition, edges=(*stage.edges, new))


def _start_all_early(definition: GraphDefinition) -> GraphDefinition:
    (stage,) = definition.stages
    # XLA writes a wait into nearly all kernels.
    nodes = list(stage.nodes)
    index = next(second for _, second in stage.edges if isinstance(nodes[second], KernelNode))
    nodes[index] = dataclasses.replace(nodes[index], begins_with_wait=False)
    return _change_stage(definition, nodes=tuple(nodes), programmatic=frozenset(stage.edges))


def _move_slots(definition: GraphDefinition) -> GraphDefinition:
    slots = tuple(dataclasses.replace(slot, offset=0) for slot in definition.slots)
    return dataclasses.replace(definition, slots=slots)


def _shrink_slots(definition: GraphDefinition) -> GraphDefinition:
    slots = tuple(dataclasses.replace(slot, shape=()) for slot in definition.slots)
    return dataclasses.replace(definition, slots=slots)


def _shrink_arena(definition: GraphDefinition) -> GraphDefinition:
    return dataclasses.replace(definition, arena_size=ArenaSize(definition.arena_bytes // 2))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_drop_edge, "does not wait for"),
        (_repeat_edge, "is implied by others"),
        (_start_all_early, "is programmatic"),
        (_move_slots, "does not wait for"),
        (_shrink_slots, "beyond its"),
        (_shrink_arena, "is outside of the arena"),
    ],
)
def test_planted_faults_are_found(plant: Any, message: str, h200: Any) -> None:
    definition = lower(find_program("mlp"), h200).definition
    faults = building.find_faults(plant(definition))
    assert any(message in fault for fault in faults), faults


def test_stage_without_nodes_has_no_chain() -> None:
    assert building.find_longest_chain(Stage((), ())) == 0
