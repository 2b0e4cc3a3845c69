"""`tg.amp` on a GPU: whole steps in bfloat16, and in float16 with a scaler, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.draws import assert_same
from tests.gpu.reference import compute_exactly

pytestmark = pytest.mark.usefixtures("gpu")
BATCH, WIDTH, OUTPUT, RATE = 64, 256, 128, 0.5


def make_params() -> Any:
    keys = jax.random.split(jax.random.key(0))
    shapes = ((WIDTH, WIDTH), (WIDTH, OUTPUT))
    weights = [jax.random.normal(k, s) / 16 for k, s in zip(keys, shapes, strict=True)]
    return {"first": weights[0], "second": weights[1], "bias": jnp.zeros(OUTPUT)}


X, TARGET = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))


def make_loss(matmul: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(matmul(x, params["first"]))
        output = matmul(hidden, params["second"]) + params["bias"]
        return jnp.mean((output - TARGET[:, :OUTPUT]) ** 2)

    return compute_loss


def plain(a: Any, b: Any) -> Any:
    return a @ b


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_step_equals_casts_by_hand(dtype: Any) -> None:
    def by_hand(a: Any, b: Any) -> Any:
        return (a.astype(dtype) @ b.astype(dtype)).astype(jnp.float32)

    params = make_params()
    step = tg.capture(jax.value_and_grad(tg.amp.autocast(dtype)(make_loss(plain))))
    twin = tg.capture(jax.value_and_grad(make_loss(by_hand)))
    wanted = compute_exactly(jax.grad(make_loss(plain)), params, X)
    for _ in range(3):
        assert_same(jax.tree.leaves(step(params, X)), jax.tree.leaves(twin(params, X)))
    for got, exact in zip(
        jax.tree.leaves(step(params, X)[1]), jax.tree.leaves(wanted), strict=True
    ):
        # Six roundings, of 8 bits or more each; without the casts there would be no difference.
        assert 0 < np.abs(got - exact).max() < 6 * 2**-8 * np.abs(exact).max()
    assert ("bf16" if dtype == jnp.bfloat16 else "f16") in step.explain(params, X).ir


def test_g33_a_step_with_a_scaler_is_one_graph_and_skips_in_it() -> None:
    compute_loss = tg.amp.autocast(jnp.float16)(make_loss(plain))

    def sgd(grads: Any, count: Any, params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), count + 1

    def run(params: Any, count: Any, scaler: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: scaler.scale(compute_loss(p, x)))(params)
        params, count, found_inf = scaler.step(sgd, grads, count, params)
        return params, count, scaler.update(found_inf)

    step, twin = tg.capture(run, donate_argnums=(0, 1, 2)), jax.jit(run)
    state = (make_params(), jnp.int32(0), tg.amp.GradScaler(2.0**12, growth_interval=2))
    other = jax.tree.map(jnp.array, state)
    inf, nan = X.at[3, 5].set(jnp.inf), X.at[0, 0].set(jnp.nan)
    skipped = []
    for x in (X, X, inf, X, nan, nan, X, X):
        before = [np.array(leaf) for leaf in jax.tree.leaves(state[0])]
        count = int(state[1])
        state, other = step(*state, x), twin(*other, x)
        assert_same(jax.tree.leaves(state), jax.tree.leaves(other))
        skipped.append(int(state[1]) == count)
        if skipped[-1]:
            assert_same(jax.tree.leaves(state[0]), before)
    assert skipped == [False, False, True, False, True, True, False, False]
    assert float(state[2].get_scale()) == 2.0**12 * 2 / 8 * 2
    assert step.cache_info().captures == 1
    state[2].check()


def test_many_steps_without_a_wait_and_a_check_at_the_end() -> None:
    step = tg.capture(
        lambda scaler, grads: scaler.update(scaler.unscale(grads)[1]), donate_argnums=0
    )
    scaler = tg.amp.GradScaler(2.0**20, window=60)
    for _ in range(60):
        scaler = step(scaler, jnp.array([1.0, jnp.nan]))
    with pytest.raises(tg.ReplayError, match="skipped the last 60 steps"):
        scaler.check()
    assert float(scaler.get_scale()) == 2.0**-40


def test_a_convolution_and_its_gradients() -> None:
    images = jax.random.normal(jax.random.key(2), (2, 8, 16, 16))
    filters = jax.random.normal(jax.random.key(3), (16, 8, 3, 3))

    def convolve(x: Any, w: Any) -> Any:
        return jnp.mean(lax.conv(x, w, (1, 1), "SAME") ** 2)

    step = tg.capture(jax.grad(tg.amp.autocast(jnp.float16)(convolve), (0, 1)))
    wanted = jax.jit(jax.grad(convolve, (0, 1)))(images, filters)
    for got, exact in zip(step(images, filters), wanted, strict=True):
        assert 0 < np.abs(got - exact).max() < 2**-6 * np.abs(exact).max()


def test_a_region_in_a_block_and_in_eager_code() -> None:
    w = make_params()["first"]
    g = tg.CUDAGraph()
    with tg.graph(g), tg.amp.autocast():
        y = X @ w
    g.replay()
    with tg.amp.autocast():
        eager = X @ w
        compiled = jax.jit(jnp.matmul)(X, w)
    twin = tg.capture(
        lambda a, b: (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(a.dtype)
    )
    assert_same([y], [twin(X, w)])
    # In a graph XLA may leave out the rounding of the result to 16 bits, in eager code it cannot.
    for each in (eager, compiled):
        assert np.array_equal(np.asarray(each), np.asarray(each.astype(jnp.bfloat16)).astype("f4"))
        np.testing.assert_allclose(np.asarray(each), np.asarray(y), rtol=2**-7, atol=2**-7)
    assert not np.array_equal(np.asarray(y), np.asarray(X @ w))
