"""Random programs on several streams, with donated state and eager parts, against `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracegraph as tg

jax.config.update("jax_platforms", "cpu")
SIZE = 4
STATE_COUNT = 3
CALLS = 5


class Step(NamedTuple):
    """One op of a random program: what it computes, where, from which values."""

    kind: str
    stream: int
    left: int
    right: int
    waits_for_event: bool


class Program(NamedTuple):
    """Random steps, which values become the new state, and which are returned beside it."""

    steps: list[Step]
    state: list[int]
    results: list[int]


def _scale_on_host(x: Any) -> Any:
    return (np.asarray(x) * np.float32(0.5) + 1).astype(np.float32)


def _call_back(x: Any, y: Any) -> Any:
    return jax.pure_callback(_scale_on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x + y)


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "constant": lambda x, y: jnp.arange(SIZE, dtype=jnp.float32) - x,
    "multiply": lambda x, y: x * y * 0.5,
    "roll": lambda x, y: jnp.roll(x, 1) - y,
    "sin": lambda x, y: jnp.sin(x),
}


@st.composite
def programs(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS)) -> Program:
    index = st.integers(0, 12)
    steps = draw(
        st.lists(
            st.builds(Step, st.sampled_from(kinds), st.integers(0, 2), index, index, st.booleans()),
            min_size=1,
            max_size=8,
        )
    )
    state = draw(st.lists(index, min_size=STATE_COUNT, max_size=STATE_COUNT))
    return Program(steps, state, draw(st.lists(index, min_size=1, max_size=3)))


def make_function(program: Program) -> Callable[..., Any]:
    """Returns the program as a step of a state; each stream waits for exactly what it uses."""

    def step(state: list[Any], batch: Any) -> Any:
        capturing = tg.current_stream()
        sides = [tg.Stream(), tg.Stream()]
        for side in sides:
            side.wait_stream(capturing)
        streams = [capturing, *sides]
        values: list[Any] = [(value, 0, None) for value in (*state, batch)]
        for kind, number, left, right, waits_for_event in program.steps:
            operands = [values[left % len(values)], values[right % len(values)]]
            for _, made_on, event in operands:
                if made_on == number:
                    continue
                if waits_for_event and event is not None:
                    streams[number].wait_event(event)
                else:
                    streams[number].wait_stream(streams[made_on])
            compute = _call_back if kind == "callback" else KINDS[kind]
            with tg.stream(streams[number] if number else None):
                result = compute(operands[0][0], operands[1][0])
            values.append((result, number, streams[number].record_event()))
        for side in sides:
            capturing.wait_stream(side)
        arrays = [value for value, _, _ in values]
        new_state = [arrays[-1 - index % len(arrays)] for index in program.state]
        results = [arrays[index % len(arrays)] for index in program.results]
        return new_state, (*results, 2.5)

    return step


def run_calls(function: Callable[..., Any], *, reads_at_once: bool = True) -> list[Any]:
    """Returns what five calls give, as NumPy arrays, and the last state."""
    random = np.random.default_rng(7)
    state: Any = [
        jnp.asarray(random.standard_normal(SIZE), jnp.float32) for _ in range(STATE_COUNT)
    ]
    given: list[Any] = []
    for _ in range(CALLS):
        state, results = function(state, jnp.asarray(random.standard_normal(SIZE), jnp.float32))
        given += [np.asarray(result) for result in results] if reads_at_once else results
    return [np.asarray(array) for array in (*given, *state)]


def assert_equals_jit(program: Program, mode: Any, *, reads_at_once: bool = True) -> None:
    step = make_function(program)
    expected = run_calls(jax.jit(step))
    captured = tg.capture(step, donate_argnums=0, mode=mode)
    got = run_calls(captured, reads_at_once=reads_at_once)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"result {index}")
    assert captured.cache_info().captures == 1


@settings(max_examples=12)
@given(programs(), st.booleans())
def test_random_stream_programs_equal_jit(program: Program, reads_at_once: bool):
    assert_equals_jit(program, "whole", reads_at_once=reads_at_once)


@settings(max_examples=8)
@given(programs(kinds=[*KINDS, "callback"]), st.booleans())
def test_random_partial_programs_equal_jit(program: Program, reads_at_once: bool):
    assert_equals_jit(program, "partial", reads_at_once=reads_at_once)


@settings(max_examples=12)
@given(programs())
def test_random_stream_programs_equal_jit_in_every_order(program: Program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
        assert_equals_jit(program, "whole")


@settings(max_examples=8)
@given(programs(kinds=[*KINDS, "callback"]))
def test_random_partial_programs_equal_jit_in_every_order(program: Program):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
        assert_equals_jit(program, "partial")
