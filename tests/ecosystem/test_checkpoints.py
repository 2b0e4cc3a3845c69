"""A captured train step's state is saved and restored as any tree of arrays is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

OPTIMIZER = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def train(state: Any, x: Any) -> Any:
    weights, moments = state

    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["first"]) @ w["second"] - 1) ** 2)

    updates, moments = OPTIMIZER.update(jax.grad(loss)(weights), moments, weights)
    return optax.apply_updates(weights, updates), moments


def make_state() -> Any:
    rng = np.random.default_rng(1)
    shapes = {"first": (4, 8), "second": (8, 1)}
    weights = {name: jnp.asarray(rng.random(s), jnp.float32) for name, s in shapes.items()}
    return weights, OPTIMIZER.init(weights)


def expect(steps: int) -> Any:
    """Returns the state after some steps of `jax.jit`."""
    step, state = jax.jit(train), make_state()
    for _ in range(steps):
        state = step(state, X)
    return state


def run(step: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state = step(state, X)
    return state


def describe(state: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


@pytest.mark.parametrize(
    "round_trip",
    [
        lambda state: serialization.from_bytes(make_state(), serialization.to_bytes(state)),
        lambda state: pickle.loads(pickle.dumps(state)),
        copy.deepcopy,
        lambda state: jax.tree.map(jnp.copy, state),
        jax.device_get,
    ],
    ids=["flax", "pickle", "deepcopy", "copy", "device_get"],
)
def test_a_copy_of_the_state_stays_and_training_goes_on_from_it(
    round_trip: Callable[[Any], Any],
) -> None:
    step: Any = tg.capture(train, donate_argnums=0)
    state = run(step, make_state(), 3)
    kept = round_trip(state)
    assert_same(run(step, state, 2), expect(5))
    assert_same(jax.tree.map(jnp.asarray, kept), expect(3))
    assert_same(run(step, kept, 2), expect(5))
    assert step.cache_info().captures == 1


def test_orbax_saves_while_training_goes_on(tmp_path: Any) -> None:
    step: Any = tg.capture(train, donate_argnums=0)
    state = run(step, make_state(), 3)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        state = run(step, state, 2)
        assert_same(state, expect(5))
        manager.wait_until_finished()
        restored = manager.restore(3, args=ocp.args.StandardRestore(describe(state)))
    assert_same(restored, expect(3))
    assert_same(run(step, restored, 4), expect(7))
