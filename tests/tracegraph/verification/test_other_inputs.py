"""Which arguments a verification may change: never one that a loop may run for ever on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tracegraph.tracing.trace import trace_function
from tracegraph.verification.other_inputs import MOST_ROUNDS, OtherInputs, choose_other_inputs

X = jnp.ones(4)


def choose(function: Callable[..., Any], *args: Any) -> OtherInputs:
    return choose_other_inputs(trace_function(function, args, {}, name="step").graph)


def solve(x: Any, most: int, *, start: Any = 0, stride: int = 1) -> Any:
    """Halves until the sum is small, and at most so often."""

    def goes_on(c: Any) -> Any:
        return (c[0] < most) & (c[1].sum() > 1)

    return lax.while_loop(goes_on, lambda c: (c[0] + stride, c[1] * 0.5), (start, x))


def count_down(x: Any, compare: Callable[[Any, Any], Any], change: int) -> Any:
    return lax.while_loop(
        lambda c: (c[1].sum() > 1) & compare(c[0], 0), lambda c: (c[0] - change, c[1]), (9, x)
    )


def search(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() != 8, lambda c: c * 2, x)


ENDS: list[Callable[[Any], Any]] = [
    lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    lambda x: lax.fori_loop(0, 3, lambda _, c: lax.cond(c[0] > 0, jnp.sin, jnp.cos, c), x),
    lambda x: solve(x, 100),
    lambda x: solve(x, MOST_ROUNDS, start=1),
    lambda x: solve(x, 10 * MOST_ROUNDS, stride=20),
    lambda x: count_down(x, operator.gt, 1),
    lambda x: count_down(x, operator.ge, 1),
    lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x)),
    lambda x: lax.scan(lambda c, _: (solve(c, 9)[1], None), x, None, 9)[0],
    # A search for what no argument changes.
    lambda x: search(jnp.ones(2)) + x[0],
]
MAY_NOT_END: list[Callable[[Any], Any]] = [
    search,
    lambda x: solve(x, MOST_ROUNDS + 1),
    lambda x: solve(x, 100, stride=0),
    lambda x: solve(x, 100, stride=-1),
    # The counter begins with a value of the argument.
    lambda x: solve(x, 100, start=x[0].astype(int)),
    lambda x: count_down(x, operator.gt, -1),
    lambda x: count_down(x, operator.ne, 2),
    lambda x: lax.while_loop(lambda c: (c < 3) | (x.sum() > 0), lambda c: c + 1, 0) + x,
    lambda x: lax.scan(lambda c, _: (search(c), None), x, None, 3)[0],
    lambda x: lax.scan(lambda c, _: (solve(c, 999)[1], None), x, None, 999)[0],
    lambda x: lax.cond(x[0] > 0, search, jnp.cos, x),
]


@pytest.mark.parametrize("number", range(len(ENDS)))
def test_all_may_differ_where_every_loop_ends(number: int) -> None:
    assert choose(ENDS[number], X) == OtherInputs((True,))


@pytest.mark.parametrize("number", range(len(MAY_NOT_END)))
def test_nothing_differs_where_a_loop_may_not_end(number: int) -> None:
    chosen = choose(MAY_NOT_END[number], X)
    assert chosen.may_differ == (False,)
    assert chosen.note.startswith("all arguments keep their values in both replays: on others the ")
    assert "test_other_inputs.py:" in chosen.note


def test_a_length_that_is_an_argument_keeps_its_value_and_floats_differ() -> None:
    def step(x: Any, n: Any, key: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: c * i, x) + jax.random.uniform(key)

    chosen = choose(step, X, 3, jax.random.key(0))
    assert chosen.may_differ == (True, False, False)
    assert chosen.note.startswith("arguments of integers keep their values in both replays: ")
