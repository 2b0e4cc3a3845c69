"""State that several graphs of one function update in turns: in memory once, on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.device_memory import measure_used_bytes

pytestmark = pytest.mark.usefixtures("gpu", "untried")
SIZE = 2048
NBYTES = 4 * SIZE * SIZE


def train(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(state: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ state["w"] + state["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def choose(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    new, value = train(state, x)
    if x[0, 0] > 0:
        new = {"w": new["w"] * 0.99, "b": new["b"]}
    return new, value


def make_state() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (SIZE, SIZE)) / SIZE**0.5
    return jax.block_until_ready({"w": w, "b": jnp.zeros(SIZE)})


def make_batch(rows: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, SIZE))


@pytest.mark.parametrize("name", ["shapes", "branches"])
def test_graphs_take_turns_on_one_state(name: str) -> None:
    function = train if name == "shapes" else choose
    rows = (64, 48, 64, 64, 48, 48, 64) if name == "shapes" else (64,) * 7
    batches = [make_batch(count, seed) for seed, count in enumerate(rows)]
    jitted, wanted = jax.jit(train), make_state()
    for x in batches:
        wanted, _ = jitted(wanted, x)
        if name == "branches" and x[0, 0] > 0:
            wanted = {"w": wanted["w"] * 0.99, "b": wanted["b"]}
    captured = tg.capture(
        function, donate_argnums=0, mode="whole" if name == "shapes" else "partial"
    )
    state: Any = make_state()
    addresses: set[int] = set()
    for x in batches:
        state, _ = captured(state, x)
        addresses.add(state["w"].data_ptr())
    assert len(addresses) <= 2  # the first graph's verification comes before there is a second
    for leaf, value in wanted.items():
        np.testing.assert_allclose(state[leaf], value, rtol=1e-3, atol=1e-5)


def test_a_second_shape_takes_little_memory() -> None:
    captured, state = tg.capture(train, donate_argnums=0), make_state()
    small, large = make_batch(8, 1), make_batch(16, 2)
    state, _ = captured(state, large)
    state, _ = captured(state, large)
    before, used = captured.pool_bytes, measure_used_bytes()
    for x in (small, large, small, large):
        state, value = captured(state, x)
    assert np.isfinite(float(value))
    assert captured.pool_bytes - before < NBYTES
    assert measure_used_bytes() - used < NBYTES


def test_a_state_that_is_held_keeps_its_value() -> None:
    captured: Any = tg.capture(train, donate_argnums=0)
    small, large = make_batch(8, 1), make_batch(16, 2)
    first, _ = captured(make_state(), large)
    wanted = jax.tree.map(np.asarray, jax.jit(train)(make_state(), large)[0])
    other, _ = captured(make_state(), small)
    for leaf, value in wanted.items():
        np.testing.assert_allclose(first[leaf], value, rtol=1e-4, atol=1e-6)
    wanted = jax.tree.map(np.asarray, jax.jit(train)(make_state(), small)[0])
    for leaf, value in wanted.items():
        np.testing.assert_allclose(other[leaf], value, rtol=1e-4, atol=1e-6)
