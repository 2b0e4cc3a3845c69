"""Python between graphs on a GPU: results, counts of graphs, resident state, one pool."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

pytestmark = pytest.mark.usefixtures("gpu")


def make_vector(value):
    return jnp.arange(64, dtype=jnp.float32) + value


def branch(x):
    y = x * 2
    return (y + 1, y.max()) if y[0] > 0 else (y - 1, y.min())


def repeat(x):
    while x.max() > 1:
        x = x * 0.5
    return x


def use_reads(x):
    count = int(x[0])
    table = np.asarray(x[:2] > 0)
    return x * count, x + table.sum()


def pick_keys(key):
    first, second = jax.random.split(key)
    bit = jax.random.bernoulli(first)
    return (second, jnp.ones(2)) if bit else (first, jnp.zeros(2))


@pytest.mark.parametrize("function", [branch, repeat, use_reads])
def test_results_are_those_of_python(function):
    captured: Any = tg.capture(function, mode="partial")
    for value in (1.0, -70.0, 1.0, 2.0, -70.0, 2.0, 1.0):
        x = make_vector(value)
        # Exact: sums of integers and products with powers of two.
        assert_same(captured(x), function(x))


def test_keys_are_results_of_parts():
    captured: Any = tg.capture(pick_keys, mode="partial")
    for seed in (0, 1, 2, 3, 0, 1):
        assert_same(captured(jax.random.key(seed)), pick_keys(jax.random.key(seed)))


def test_graphs_are_made_once_and_share_a_pool():
    captured: Any = tg.capture(branch, mode="partial")
    for value in (1.0, -70.0):
        captured(make_vector(value))
    reserved = captured.pool_bytes
    for value in (2.0, -80.0, 3.0):
        captured(make_vector(value))
    assert captured.pool_bytes == reserved
    assert captured._latest.part_count == 3
    assert "cuts: 3 graphs, 1 break" in captured.explain(make_vector(1.0))


def test_resident_state_moves_between_branches():
    def step(state, x):
        state = jax.tree.map(lambda leaf: leaf + x, state)
        if x[0] > 0:
            return jax.tree.map(lambda leaf: leaf * 2, state), x.max()
        return state, x.min()

    captured: Any = tg.capture(step, mode="partial", donate_argnums=0)
    state = expected = {"a": jnp.zeros(64), "b": jnp.ones(64)}
    expected = jax.tree.map(jnp.copy, expected)
    for value in (1.0, 1.0, -70.0, 1.0, -70.0, -70.0):
        x = make_vector(value)
        state, peak = captured(state, x)
        expected, top = step(expected, x)
        assert_same((jax.tree.map(jnp.asarray, state), peak), (expected, top))


def test_a_break_inside_of_a_derivative():
    def train(weights, x):
        def compute_loss(weights):
            hidden = jnp.tanh(x * weights)
            return hidden.mean() if hidden.sum() > 0 else (hidden**2).mean()

        loss, gradient = jax.value_and_grad(compute_loss)(weights)
        return weights - gradient, loss

    captured: Any = tg.capture(train, mode="partial")
    for value in (1.0, -70.0, 1.0):
        x = make_vector(value) / 64
        for got, wanted in zip(captured(jnp.ones(64), x), train(jnp.ones(64), x), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
