"""`debug_nans=True`: the first op that made a NaN or an infinity, with the user's line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line

X = jnp.arange(1.0, 5.0)
FILE = "tests/public/inspection/test_debug_nans.py"


def compute(x: jax.Array) -> jax.Array:
    y = x * 2
    return jnp.exp(jnp.log(y) + 1) * y


LOG = line() - 3


@pytest.fixture(scope="module")
def step() -> Any:
    return tg.capture(compute, debug_nans=True, name="step")


def read_error(function: Any, *args: Any) -> str:
    with pytest.raises(tg.InvalidFloatError) as caught:
        function(*args)
    assert isinstance(caught.value, FloatingPointError)
    message = str(caught.value)
    assert len(message.splitlines()) == 4
    return message


def test_the_op_its_line_and_its_operands_are_named(step: Any) -> None:
    np.testing.assert_array_equal(step(X), jax.jit(compute)(X))
    what, where, why, _ = read_error(step, X.at[2].set(-3)).splitlines()
    assert what == "`step` makes 1 NaN of 4 elements in log"
    assert f"{FILE}:{LOG} in compute" in where
    assert " = log %" in where
    assert why.endswith("f32[4] from -6 to 8")
    np.testing.assert_array_equal(step(X), jax.jit(compute)(X))


def test_the_first_of_several_is_named(step: Any) -> None:
    # The infinity of log(0) becomes exp(-inf) * 0, which is finite: nothing is wrong with it.
    assert float(step(X.at[0].set(0))[0]) == 0
    divide = tg.capture(lambda x: jnp.log(x) * (x / x), debug_nans=True)
    assert "1 infinite of 4 elements in log" in read_error(divide, X.at[0].set(0))


def test_what_was_in_the_arguments_is_said_so(step: Any) -> None:
    message = read_error(step, X.at[1].set(jnp.nan).at[3].set(jnp.inf))
    assert "because its inputs are not" in message
    assert "`x` has 1 NaN and 1 infinite of 4 elements" in message


def test_an_infinite_mask_is_no_fault_but_what_becomes_of_it_is() -> None:
    @tg.capture(debug_nans=True)
    def attend(x: jax.Array, mask: jax.Array) -> jax.Array:
        x = jnp.where(mask, x, -jnp.inf)
        x = jnp.exp(x - x.max())
        return x / x.sum()

    assert float(attend(X, X > 2).sum()) == 1
    assert "4 NaN of 4 elements in sub" in read_error(attend, X, X > 9)


def in_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, y: (jnp.sqrt(c - y) + 4, c), 9.0 * x[0], x)[0]


def in_while(x: jax.Array) -> jax.Array:
    def body(c: Any) -> Any:
        return c[0] + 1, jnp.sqrt(c[1] - x[3])

    return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x.sum()))[1]


def in_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, lambda x: jnp.sqrt(x - 2), lambda x: x, x)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (in_scan, "iteration 3 of scan"),
        (in_while, "iteration 1 of while"),
        (in_branch, "branch 1 of cond"),
    ],
)
def test_an_op_in_a_body_is_named_with_its_run(function: Any, place: str) -> None:
    x = X * 2 if function is in_scan else X
    message = read_error(tg.capture(function, debug_nans=True), x)
    assert place in message
    assert "in sqrt" in message
    assert FILE in message


def test_donated_values_are_kept_while_the_option_is_on() -> None:
    @tg.capture(donate_argnums=0, debug_nans=True)
    def step(state: Any, x: jax.Array) -> Any:
        return {"w": state["w"] + jnp.log(x)}

    state = {"w": jnp.zeros(4)}
    assert "in log" in read_error(step, state, -X)
    after = step(step(state, X), X)
    assert not state["w"].is_deleted()
    np.testing.assert_allclose(after["w"], 2 * jnp.log(X), rtol=1e-6)


def test_probes_of_the_invalid_replay_can_be_read() -> None:
    step = tg.capture(lambda x: jnp.log(tg.probe("y", x - 1)), debug_nans=True)
    read_error(step, X)
    np.testing.assert_array_equal(step.probes()["y"], X - 1)


def test_a_failed_call_draws_no_key() -> None:
    generator = tg.random.Generator(5)

    @tg.capture(debug_nans=True)
    def step(x: jax.Array) -> jax.Array:
        return jnp.log(x) + jax.random.uniform(generator.next_key(), x.shape)

    read_error(step, -X)
    found = step(X)
    generator.manual_seed(5)
    key = generator.next_key()
    np.testing.assert_allclose(found, jnp.log(X) + jax.random.uniform(key, X.shape), rtol=1e-6)


def test_eager_parts_streams_and_a_compiled_capture() -> None:
    def show(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: None, x.sum())
        return jnp.log(x)

    assert "in log" in read_error(tg.capture(show, mode="partial", debug_nans=True), -X)
    side = tg.Stream()

    def fork(x: jax.Array) -> jax.Array:
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            y = jnp.log(x)
        tg.current_stream().wait_stream(side)
        return y + 1

    assert "in log" in read_error(tg.capture(fork, debug_nans=True), -X)
    compiled = tg.capture(compute, debug_nans=True).lower(X).compile()
    assert "in log" in read_error(compiled, -X)


def test_without_the_option_nothing_is_checked() -> None:
    assert bool(jnp.isnan(tg.capture(compute)(-X)).all())


def test_each_part_of_a_function_with_breaks_is_checked() -> None:
    @tg.capture(mode="partial", debug_nans=True)
    def branching(x: jax.Array) -> jax.Array:
        return jnp.sqrt(x) if (x - 1).sum() > 0 else jnp.log(x)

    np.testing.assert_array_equal(branching(X), jnp.sqrt(X))
    assert "4 NaN of 4 elements in log" in read_error(branching, -X)


def test_a_part_after_a_read_is_searched_with_its_own_inputs() -> None:
    @tg.capture(mode="partial", debug_nans=True)
    def branching(x: jax.Array) -> jax.Array:
        y = x.sum() - 11
        return y if y > 0 else jnp.log(y)

    message = read_error(branching, X)
    assert "1 NaN of 1 elements in log" in message
    assert "f32[] from" in message


def test_buckets_are_refused_beside_it() -> None:
    with pytest.raises(tg.ConfigError, match="buckets= is given with debug_nans=True"):
        tg.capture(compute, debug_nans=True, buckets={"x": {0: (2, 4)}})


def test_another_value_is_refused() -> None:
    with pytest.raises(tg.ConfigError, match="debug_nans='nan' is unknown"):
        tg.capture(compute, debug_nans="nan")  # pyright: ignore
