"""A graph reads and writes the same addresses at every replay, and only its own."""

import gc
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed, find_captured

pytestmark = pytest.mark.usefixtures("gpu", "untried")
REPLAYS = 100


def step(state, x):
    mixed = jnp.tanh(state["w"] @ x)
    return {"w": state["w"] * 0.9 + mixed, "n": state["n"] + 1}, mixed.sum()


def make_state():
    return {"w": jnp.eye(64), "n": jnp.int32(0)}


def churn(index):
    """Allocates and frees memory between two replays, so that free memory moves."""
    return jnp.full((1 + index * 1000,), jnp.nan).block_until_ready()


def test_addresses_of_state_stay():
    captured = tg.capture(step, donate_argnums=0)
    x = jnp.full((64, 64), 0.01)
    state, _ = captured(make_state(), x)
    addresses = {name: leaf.data_ptr() for name, leaf in state.items()}
    for index in range(REPLAYS):
        kept = churn(index)
        state, _ = captured(state, x + index)
        assert {name: leaf.data_ptr() for name, leaf in state.items()} == addresses
        del kept
    assert int(state["n"]) == REPLAYS + 1


def test_addresses_of_static_outputs_stay():
    captured: Any = tg.capture(lambda x: (jnp.sort(x), x @ x), outputs="static")
    first = [leaf.data_ptr() for leaf in captured(jnp.arange(500.0))]
    for index in range(REPLAYS):
        kept = churn(index)
        x = np.random.default_rng(index).normal(size=500).astype(np.float32)
        results = captured(x)
        assert [leaf.data_ptr() for leaf in results] == first
        assert_replayed(captured, results, (x,))
        del kept


def test_static_buffers_stand_in_the_arena_and_apart():
    captured: Any = tg.capture(step, donate_argnums=0, outputs="static")
    state, total = captured(make_state(), jnp.ones((64, 64)))
    arena = find_captured(captured).replay.arena
    spans = sorted((leaf.data_ptr(), leaf.nbytes) for leaf in (*state.values(), total))
    start, kept_bytes = arena.ranges[0]
    for address, nbytes in spans:
        assert start <= address
        assert address + nbytes <= start + kept_bytes
    for (address, nbytes), (following, _) in itertools.pairwise(spans):
        assert address + nbytes <= following


@pytest.mark.parametrize("verify", [True, False])
def test_a_poisoned_pool_does_not_show(verify):
    """A block that an earlier graph left full of NaN serves the next graph of the same pool."""
    keeper = tg.capture(lambda x: x + 1)
    keeper(jnp.ones(3))
    poison = tg.capture(
        lambda x: jnp.broadcast_to(x, (1 << 20,)) + jnp.nan,
        pool=keeper.pool(),
        outputs="static",
        verify=False,
    )
    full = poison(jnp.zeros(()))
    assert bool(jnp.isnan(full).all())
    arena = find_captured(poison).replay.arena
    block = (arena.block.address, arena.block.nbytes)
    del poison, full, arena
    gc.collect()
    captured = tg.capture(
        lambda x: (jnp.cumsum(x), jnp.cumsum(x[::-1]), x @ x, jnp.zeros(7).at[:3].add(x[:3])),
        pool=keeper.pool(),
        verify=verify,
    )
    for seed in range(5):
        x = np.random.default_rng(seed).normal(size=100_000).astype(np.float32)
        assert_replayed(captured, captured(x), (x,))
    arena = find_captured(captured).replay.arena
    assert any(block[0] <= address < block[0] + block[1] for address, _ in arena.ranges)


def test_jax_never_writes_into_a_pool():
    """JAX's own allocations while a graph is idle leave its state alone, and the other way."""
    captured = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = captured(jnp.zeros(1 << 16))
    arrays = [jnp.full((1 << 16,), jnp.nan) for _ in range(50)]
    jax.block_until_ready([array * 2 for array in arrays])
    assert float(state.min()) == float(state.max()) == 1.0
    for _ in range(10):
        state = captured(state)
    assert all(bool(jnp.isnan(array).all()) for array in arrays)
    assert float(state.min()) == float(state.max()) == 11.0
