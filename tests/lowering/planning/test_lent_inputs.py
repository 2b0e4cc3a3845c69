"""Lent inputs: which have no memory of the graph's own, and where the plan puts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, kernel, make_frame, spec
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import ConditionalStep, DeviceProgram
from tracegraph.lowering.planning.lent_inputs import SMALLEST_BYTES, find_lent
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import find_plan_problems, plan_memory
from tracegraph.lowering.request import Role
from tracegraph.runtime.definition.graph_nodes import Construct

LARGE = SMALLEST_BYTES
READ = f"x[0:{LARGE}]"


def program(*steps: Any, nbytes: int = LARGE, **changes: Any) -> DeviceProgram:
    """Steps one after another over an input ``x`` and a result ``y``."""
    frame = make_frame([spec("x", nbytes), spec("s")], [spec("y")], ["s"])
    inputs = tuple(
        dataclasses.replace(each, may_be_lent=each.role is Role.COPIED) for each in frame.inputs
    )
    inputs = (dataclasses.replace(inputs[0], **changes), *inputs[1:])
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    frame = dataclasses.replace(frame, inputs=inputs, steps=steps, edges=edges)
    used = {use.buffer for step in steps for use in (*step.reads, *step.writes)}
    more = [spec("t")] if "t" in used else []
    return dataclasses.replace(frame, buffers=(*frame.buffers, *more))


def branch(*steps: Any) -> ConditionalStep:
    return ConditionalStep("branch", Construct.IF, (steps,), kernel("set", "s[0:4]", "t[0:4]"))


def test_an_input_that_only_kernels_read_is_lent() -> None:
    found = program(kernel("a", READ, "t[0:64]"), kernel("b", READ, "y[0:64]"))
    assert find_lent(found) == {"x"}
    plan = plan_memory("f", find_lifetimes(found))
    assert plan.lent_bytes == LARGE
    assert plan.arena_bytes < LARGE <= plan.offsets["x"] + LARGE
    assert plan.offsets["x"] >= plan.arena_bytes
    assert "lent  1,048,576" in str(plan)
    assert str(plan).endswith(", lent 1,048,576")
    definition = build_graph(found, plan)
    assert [slot.name for slot in definition.slots if slot.is_lent] == ["x"]
    assert definition.arena_bytes == plan.arena_bytes
    assert not definition.has_scratch_inputs


KEPT = {
    "small": program(kernel("a", "x[0:64]", "y[0:64]"), nbytes=LARGE - 1),
    "not of a call": program(kernel("a", READ, "y[0:64]"), may_be_lent=False),
    "in shared memory": program(kernel("a", READ, "y[0:64]"), is_kept=False),
    "read by a memcpy": program(kernel("a", READ, "t[0:64]"), copy("c", "x[0:64]", "y[0:64]")),
    "written": program(kernel("a", "s[0:64]", READ), kernel("b", READ, "y[0:64]")),
}


@pytest.mark.parametrize("name", KEPT)
def test_any_other_has_its_place_in_the_arena(name: str) -> None:
    assert find_lent(KEPT[name]) == frozenset()
    plan = plan_memory("f", find_lifetimes(KEPT[name]))
    assert plan.lent_bytes == 0
    assert "lent" not in str(plan)


def test_what_a_branch_reads_is_not_lent() -> None:
    step = branch(kernel("a", READ, "y[0:64]"))
    assert find_lent(program(step)) == frozenset()


def test_a_wrong_place_is_found() -> None:
    plan = plan_memory("f", find_lifetimes(program(kernel("a", READ, "y[0:64]"))))
    inside = dataclasses.replace(plan, offsets={**plan.offsets, "x": 0})
    assert any("`x` is lent, and stands at 0" in each for each in find_plan_problems(inside))
    lives = [dataclasses.replace(each, is_kept=False) for each in plan.lifetimes if each.is_lent]
    others = [each for each in plan.lifetimes if not each.is_lent]
    temporary = dataclasses.replace(plan, lifetimes=(*others, *lives))
    assert any("`x` is lent, and stands at" in each for each in find_plan_problems(temporary))
