"""Lifetimes of buffers, also across streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegraph.lowering.device_program import BufferUse, DeviceProgram, ExecutableCall
from tracegraph.lowering.planning.lifetimes import Lifetime, find_lifetimes
from tracegraph.lowering.planning.step_order import find_ancestors
from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec, Role
from tracegraph.runtime.errors import InternalError


def make_spec(name: str, nbytes: int = 64) -> BufferSpec:
    return BufferSpec(name, (nbytes,), np.dtype(np.uint8))


def make_program(
    steps: list[tuple[str, str]],
    *,
    edges: Any = None,
    inputs: str = "",
    outputs: str = "",
    buffers: str | None = None,
) -> DeviceProgram:
    """Makes a program of steps (letters read, letters written); by default one stream."""
    touched = "".join(sorted({letter for step in steps for part in step for letter in part}))
    names = buffers if buffers is not None else "".join(dict.fromkeys(inputs + touched + outputs))
    chain = [(index, index + 1) for index in range(len(steps) - 1)]
    return DeviceProgram(
        name="f",
        buffers=tuple(map(make_spec, names)),
        steps=tuple(
            ExecutableCall(
                f"s{index}",
                None,
                tuple(BufferUse(name, 0, 64) for name in reads),
                tuple(BufferUse(name, 0, 64) for name in writes),
            )
            for index, (reads, writes) in enumerate(steps)
        ),
        edges=tuple(chain if edges is None else edges),
        inputs=tuple(InputSpec(make_spec(name), Role.COPIED) for name in inputs),
        outputs=tuple(OutputSpec(make_spec(name)) for name in outputs),
    )


def find_spans(program: DeviceProgram) -> dict[str, tuple[int, int]]:
    return {life.name: (life.first, life.last) for life in find_lifetimes(program)}


def test_inputs_results_and_constants_are_kept():
    program = make_program([("x", "a"), ("a", "o"), ("o", "b")], inputs="x", outputs="o")
    kept = {life.name for life in find_lifetimes(program) if life.is_kept}
    assert kept == {"x", "o"}
    constant = dataclasses.replace(program.buffers[0], name="c", content=b"")
    program = dataclasses.replace(program, buffers=(*program.buffers, constant))
    assert {life.name for life in find_lifetimes(program) if life.is_kept} == {"c", "x", "o"}


def test_one_stream():
    program = make_program(
        [("x", "a"), ("a", "b"), ("b", "o"), ("o", "p"), ("p", "q")], inputs="x", outputs="oq"
    )
    assert find_spans(program) == {
        "x": (0, 4),
        "a": (0, 1),
        "b": (1, 2),
        "o": (2, 4),
        "p": (3, 4),
        "q": (4, 4),
    }


def test_inputs_of_every_role_live_over_all_steps():
    program = make_program([("", "a"), ("a", "b"), ("b", "c")], outputs="c", buffers="abcdef")
    inputs = tuple(InputSpec(make_spec(name), role) for name, role in zip("def", Role, strict=True))
    program = DeviceProgram("f", program.buffers, program.steps, program.edges, inputs, ())
    spans = find_spans(program)
    assert spans["d"] == spans["e"] == spans["f"] == (0, 2)


def test_a_result_that_is_never_read_lives_at_its_step():
    assert find_spans(make_program([("x", "ab"), ("a", "c"), ("c", "d")], inputs="x"))["b"] == (
        0,
        0,
    )


def test_a_program_without_steps():
    program = make_program([], inputs="xy", outputs="yx")
    assert find_spans(program) == {"x": (0, 0), "y": (0, 0)}


def test_an_empty_buffer_has_a_lifetime():
    program = DeviceProgram(
        "f",
        (make_spec("e", 0),),
        (ExecutableCall("s", None, (), (BufferUse("e", 0, 0),)),),
        (),
        (),
        (OutputSpec(make_spec("e", 0)),),
    )
    assert find_lifetimes(program) == (Lifetime("e", 0, 0, 0, is_kept=True),)


def test_a_side_stream_extends_lifetimes_until_the_streams_join():
    # Stream 0: steps 0, 1, 4. Stream 1: steps 2, 3; forks after step 0, joins before step 4.
    steps = [("x", "a"), ("a", "b"), ("a", "c"), ("c", "d"), ("bd", "e")]
    program = make_program(
        steps, edges=[(0, 1), (0, 2), (2, 3), (1, 4), (3, 4)], inputs="x", outputs="e"
    )
    spans = find_spans(program)
    # Step 1 may still read `a` while steps 2 and 3 run, and may run before or after them.
    assert spans["a"] == (0, 3)
    assert spans["b"] == (1, 4)
    assert spans["c"] == (2, 3)


def test_without_any_wait_all_lifetimes_overlap():
    program = make_program([("x", "a"), ("x", "b"), ("x", "c")], edges=[], inputs="x")
    lifetimes = find_lifetimes(program)
    assert all(one.first <= other.last for one in lifetimes for other in lifetimes)


@st.composite
def programs(draw: st.DrawFn) -> DeviceProgram:
    count = draw(st.integers(1, 10))
    pairs = [(first, second) for second in range(count) for first in range(second)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    ancestors = find_ancestors(count, edges)
    steps = []
    for index in range(count):
        known = [f for f in range(index) if ancestors[index] >> f & 1]
        reads = draw(st.sets(st.sampled_from(known), max_size=3)) if known else set()
        steps.append(("".join(chr(97 + first) for first in sorted(reads)), chr(97 + index)))
    return make_program(steps, edges=sorted(edges))


@settings(max_examples=200)
@given(programs())
def test_disjoint_lifetimes_mean_that_one_happens_before_the_other(program: DeviceProgram):
    ancestors = find_ancestors(len(program.steps), program.edges)
    uses: dict[str, list[int]] = {}
    for index, step in enumerate(program.steps):
        for use in (*step.reads, *step.writes):
            uses.setdefault(use.buffer, []).append(index)
    lifetimes = find_lifetimes(program)
    for one in lifetimes:
        assert one.first == min(uses[one.name])
        assert one.last >= max(uses[one.name])
        for other in lifetimes:
            if one.last < other.first:
                assert all(
                    ancestors[late] >> early & 1
                    for late in uses[other.name]
                    for early in uses[one.name]
                )


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (make_program([("a", "b"), ("b", "a")]), "no step writes buffer `a` before it is read"),
        (make_program([], outputs="o"), "no step writes buffer `o` before it is read"),
        (make_program([("x", "a")], inputs="x", buffers="x"),
         "the program does not list the buffers `a`"),
        (make_program([], inputs="xy", buffers=""),
         "the program does not list the buffers `x`, `y`"),
        (make_program([], inputs="x", buffers="xx"), "a buffer is listed twice"),
    ],
)  # fmt: skip
def test_a_malformed_program_is_an_internal_error(program: DeviceProgram, what: str):
    with pytest.raises(InternalError) as raised:
        find_lifetimes(program)
    assert raised.value.what == what
    assert raised.value.where == "lifetimes of `f`"
    assert raised.value.fix == "internal error in tracegraph: please report this text"
    assert raised.value.anchor == "internal"
