"""Which old bytes branches and loops need: those read first, and those a way not taken keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.gpu_programs import kernel, use
from tracegraph.lowering.device_program import ConditionalStep
from tracegraph.lowering.planning.first_reads import find_first_reads
from tracegraph.runtime.definition.graph_nodes import Construct


def branch(*bodies: list[Any], reads: str = "flag", writes: str = "") -> ConditionalStep:
    construct = Construct.IF if len(bodies) < 3 else Construct.SWITCH
    return ConditionalStep("if", construct, tuple(map(tuple, bodies)), kernel("set", reads, writes))


def loop(*body: Any, reads: str = "flag", writes: str = "") -> ConditionalStep:
    return ConditionalStep("while", Construct.WHILE, (body,), kernel("set", reads, writes))


READ, WRITE = kernel("read", "t", "x"), kernel("write", "", "t")
CASES = {
    "what a branch reads": (branch([READ], []), "", "flag t"),
    "what a branch writes first is no input": (branch([WRITE, READ], []), "", "flag"),
    "what only one branch writes and is needed": (branch([WRITE], []), "t", "flag t"),
    "what only one branch writes, alone": (branch([WRITE]), "t", "flag t"),
    "what all branches write": (branch([WRITE], [WRITE]), "t", "flag"),
    "what all cases but one write": (branch([WRITE], [WRITE], []), "t", "flag t"),
    "what no later step needs": (branch([WRITE], []), "", "flag"),
    "what a loop may not write at all": (loop(WRITE), "t", "flag t"),
    "what a loop keeps for itself": (loop(WRITE, READ), "", "flag"),
    "what a loop carries": (loop(READ, WRITE), "", "flag t"),
    "a counter that the setter starts": (loop(kernel("n", "n", "n"), reads="", writes="n"), "", ""),
    "half of a range": (branch([kernel("half", "", "t[0:32]"), READ], []), "", "flag t"),
    "a range in two halves": (
        branch([kernel("a", "", "t[0:32]"), kernel("b", "", "t[32:64]"), READ], []),
        "",
        "flag",
    ),
    "a branch in a loop": (loop(branch([WRITE], []), READ), "", "flag t"),
    "a loop in a branch": (branch([loop(WRITE), READ], []), "", "flag t"),
}


@pytest.mark.parametrize("case", CASES)
def test_first_reads(case: str):
    step, results, expected = CASES[case]
    (found,) = find_first_reads([step], map(use, results.split()))
    assert set(found.reads) == {use(each) for each in expected.split()}
    # What is read inside, and was written there, is among the writes.
    touched = {*found.reads, *found.writes}
    assert touched == {*step.reads, *step.writes}


def test_later_steps_decide_what_is_needed():
    first, second = branch([WRITE], []), kernel("write", "", "t")
    found, _, _ = find_first_reads([first, second, READ], [])
    assert use("t") not in found.reads
    found, _ = find_first_reads([first, READ], [])
    assert use("t") in found.reads


def test_steps_without_branches_and_loops_stay_as_they_are():
    steps = [WRITE, READ]
    assert find_first_reads(steps, []) == (WRITE, READ)
    found = find_first_reads([*steps, branch([READ])], [])
    assert found[:2] == (WRITE, READ)
    assert use("t") in found[2].reads


def test_until_they_are_known_everything_counts_as_read():
    step = branch([WRITE, READ], [])
    assert {*step.reads} == {use("t"), use("x"), use("flag")}
    assert {*step.writes} == {use("t"), use("x")}


def test_a_step_moves_with_what_is_inside():
    (step,) = find_first_reads([branch([WRITE, READ], [])], [])
    moved = step.move(lambda each: each._replace(buffer=f"new_{each.buffer}"))
    assert {each.buffer for each in moved.reads} == {"new_flag"}
    assert {each.buffer for each in moved.writes} == {"new_t", "new_x"}
    assert {each.buffer for each in moved.ranges} == {"new_t", "new_x", "new_flag"}
