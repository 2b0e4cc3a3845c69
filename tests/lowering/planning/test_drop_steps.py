"""Steps whose results nothing reads are dropped, and what they ordered stays in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, fill, kernel, make_frame, spec
from tracegraph.lowering.device_program import ConditionalStep, DeviceProgram
from tracegraph.lowering.planning.drop_steps import drop_steps, drop_unread
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.definition.graph_nodes import Construct


def program(*steps: Any) -> DeviceProgram:
    """Steps one after another: ``x`` is donated, ``y`` a result, t and u are temporaries."""
    frame = make_frame([spec("x")], [spec("y")], ["x"])
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    buffers = (*frame.buffers, spec("t"), spec("u"))
    return dataclasses.replace(frame, buffers=buffers, steps=steps, edges=edges)


LAST = kernel("last", "x", "y")
BRANCH = ConditionalStep("if", Construct.IF, ((kernel("in", "t", "y"),),), kernel("set", "u", ""))


def test_a_chain_that_nothing_reads_goes() -> None:
    steps = program(fill("zero", "t"), copy("c", "t", "u"), kernel("k", "x u", "u"), LAST)
    found = drop_unread(steps)
    assert [step.name for step in found.steps] == ["last"]
    assert found.edges == ()
    assert {buffer.name for buffer in found.buffers} == {"x", "y"}
    verify_order(found)


def test_what_only_an_earlier_unread_step_reads_goes() -> None:
    """As a counter that is counted ahead, and that no iteration reads."""
    counted = (fill("zero", "t"), kernel("count", "t", "u"), kernel("counted", "t", "t"))
    found = drop_unread(program(*counted, LAST))
    assert [step.name for step in found.steps] == ["last"]


@pytest.mark.parametrize(
    "steps",
    [
        (fill("zero", "t"), kernel("k", "t", "y")),
        (fill("zero", "t"), copy("c", "t[0:8]", "u[0:8]"), kernel("k", "u", "x")),
        (fill("zero", "y"), LAST),
        (fill("zero", "t"), fill("one", "u"), BRANCH),
        (kernel("only_sets", "x", ""), LAST),
        (kernel("two", "x", "t y"),),
    ],
)
def test_what_is_read_or_returned_stays(steps: Any) -> None:
    assert drop_unread(program(*steps)) == program(*steps)


def test_what_a_dropped_step_ordered_stays_in_order() -> None:
    steps = program(*(kernel(name, "x", "y") for name in "abcd"))
    found = drop_steps(steps, [1, 2])
    assert [step.name for step in found.steps] == ["a", "d"]
    assert found.edges == ((0, 1),)
    fork = dataclasses.replace(steps, edges=((0, 2), (1, 2), (2, 3)))
    assert drop_steps(fork, [2]).edges == ((0, 2), (1, 2))
