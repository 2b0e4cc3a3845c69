"""Shape buckets on a GPU: results, poisoned padding, memory of all sizes, release and restore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.buckets.padded_call import pad_with

pytestmark = pytest.mark.usefixtures("gpu")
WIDTH = 64
SIZES = (2, 4, 8, 16)


def decode(weights: Any, x: Any) -> Any:
    is_true = (jnp.arange(x.shape[0]) < tg.bucket_size())[:, None]
    hidden = jnp.tanh(x @ weights["w"]) @ weights["w"]
    mean = jnp.where(is_true, hidden, 0).sum(0) / tg.bucket_size()
    return {"hidden": hidden, "mean": mean, "seen": jax.nn.softmax(hidden)}


def make_arguments(size: int) -> Any:
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH
    return {"w": w}, jax.random.normal(jax.random.key(size), (size, WIDTH))


def make_step() -> Any:
    return tg.capture(decode, buckets={"x": {0: SIZES}})


def check(step: Any, size: int) -> None:
    arguments = make_arguments(size)
    found, expected = step(*arguments), jax.jit(step)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        # The two programs choose their own matmuls, in TF32 perhaps.
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


def test_results_of_all_sizes_in_any_order() -> None:
    step = make_step()
    for size in (3, 16, 1, 5, 2, 3, 9):
        check(step, size)
    assert step.cache_info().captures == len(SIZES)


def test_what_is_kept_does_not_see_the_padding() -> None:
    step = make_step()
    outcomes = []
    for poison in (0.0, np.nan, 1e30):

        def pad(array: Any, shape: Any, poison: float = poison) -> Any:
            return pad_with(array, shape, poison)

        step._pad = pad
        outcomes.append([np.array(x).tobytes() for x in jax.tree.leaves(step(*make_arguments(5)))])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_results_keep_their_values_while_other_buckets_run() -> None:
    step = make_step()
    first = step(*make_arguments(7))
    before = jax.tree.map(np.array, step(*make_arguments(7)))
    for size in (16, 3, 8):
        step(*make_arguments(size))
    jax.tree.map(np.testing.assert_array_equal, first, before)


def test_all_sizes_take_the_memory_of_the_largest() -> None:
    step = make_step()
    weights, x = make_arguments(1)
    infos = step.warm_up(weights, jax.ShapeDtypeStruct(x.shape, x.dtype))
    # Constants of XLA's programs stay each graph's own, and each part is rounded up.
    assert step.pool_bytes <= 1.15 * infos[-1].pool_bytes + 2048 * len(infos)
    check(step, 3)
    assert step.cache_info().captures == len(SIZES)


def test_release_and_restore() -> None:
    step = make_step()
    check(step, 3)
    held = step(*make_arguments(3))
    before = jax.tree.map(np.array, held)
    step.release()
    assert step.pool_bytes == 0
    jax.tree.map(np.testing.assert_array_equal, held, before)
    again = jax.tree.map(np.array, step(*make_arguments(3)))
    jax.tree.map(np.testing.assert_array_equal, again, before)
    step.release()
    step.restore()
    assert step.pool_bytes > 0
    check(step, 4)
    assert step.cache_info().captures == 1


def test_state_survives_a_release() -> None:
    @tg.capture(donate_argnums=0)
    def add(state: Any, x: Any) -> Any:
        return state + x

    state = add(jnp.zeros(1000), jnp.ones(1000))
    state = add(state, jnp.ones(1000))
    add.release()
    np.testing.assert_array_equal(state, np.full(1000, 2.0))
    state = add(state, jnp.ones(1000))
    np.testing.assert_array_equal(state, np.full(1000, 3.0))
    assert add.cache_info().captures == 1
