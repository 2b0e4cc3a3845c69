"""Array as a leaf of the states of optax, flax and equinox."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.program import fill
from tests.fakes.host_memory import make_array
from tracegraph.runtime.arrays.array import Array, ArrayState


def move_to_pool(tree: Any) -> Any:
    """Returns the tree with every array leaf standing in a buffer of its own."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return make_array(np.asarray(leaf), ArrayState.RESIDENT, weak_type=leaf.aval.weak_type)

    return jax.tree.map(move, tree)


def count_arrays(tree: Any) -> int:
    return sum(type(leaf) is Array for leaf in jax.tree.leaves(tree))


def assert_equal_trees(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_optax_updates():
    optax = pytest.importorskip("optax")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    state = optimizer.init(params)

    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum((p["w"] @ p["b"]) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved = move_to_pool((params, state))
    assert count_arrays(moved) == len(jax.tree.leaves((params, state)))
    assert_equal_trees(step(*moved), step(params, state))
    assert_equal_trees(jax.jit(step)(*moved), jax.jit(step)(params, state))
    assert_equal_trees(optax.tree.norm(moved[0]), optax.tree.norm(params))


def test_flax_train_state():
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")
    flax = pytest.importorskip("flax")
    model = linen.Dense(4)
    batch = jnp.ones((2, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)
    params = jax.tree.map(jnp.asarray, fill(shapes))
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9)
    )

    def step(state):
        grads = jax.grad(lambda p: state.apply_fn(p, batch).sum())(state.params)
        return state.apply_gradients(grads=grads)

    moved = move_to_pool(state)
    assert count_arrays(moved) >= 4
    assert_equal_trees(step(moved), step(state))
    assert_equal_trees(jax.jit(step)(moved), jax.jit(step)(state))
    assert_equal_trees(model.apply(moved.params, batch), model.apply(params, batch))
    assert moved.replace(step=5).params is moved.params
    restored = flax.serialization.from_bytes(params, flax.serialization.to_bytes(moved.params))
    assert_equal_trees(restored, params)


def test_flax_struct_dataclass():
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class State:
        weight: Any
        count: int = struct.field(pytree_node=False, default=0)

    state = move_to_pool(State(jnp.arange(3.0)))
    assert type(state.weight) is Array
    assert state.replace(count=2).weight is state.weight
    doubled = jax.tree.map(lambda leaf: leaf * 2, state)
    assert doubled.weight.tolist() == [0, 2, 4]


def test_equinox_modules():
    eqx = pytest.importorskip("equinox")
    shapes = eqx.filter_eval_shape(eqx.nn.MLP, 3, 2, 4, 1, key=jax.random.key(0))
    parts = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    model = eqx.combine(jax.tree.map(jnp.asarray, fill(parts[0])), parts[1])
    moved = move_to_pool(model)
    x = jnp.ones(3)
    assert count_arrays(moved) == 4
    assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(eqx.filter(moved, eqx.is_array)))
    assert eqx.is_inexact_array(make_array(np.ones(3, np.float32)))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    assert_equal_trees(moved(x), model(x))
    assert_equal_trees(eqx.filter_jit(loss)(moved, x), eqx.filter_jit(loss)(model, x))
    assert_equal_trees(
        eqx.filter(eqx.filter_grad(loss)(moved, x), eqx.is_array),
        eqx.filter(eqx.filter_grad(loss)(model, x), eqx.is_array),
    )
    arrays, rest = eqx.partition(moved, eqx.is_array)
    assert count_arrays(arrays) == 4
    assert_equal_trees(eqx.combine(arrays, rest)(x), model(x))
    assert bool(eqx.tree_equal(arrays, eqx.filter(model, eqx.is_array)))
