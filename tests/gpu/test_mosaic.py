"""Kernels of Mosaic GPU in a graph: the bits of `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.mosaic_kernels import double_exp, multiply
from tests.oracles.tree_equality import assert_same
from tracegraph.runtime.cuda.libraries.mosaic import VERSIONS

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(
        jax.__version__ not in VERSIONS, reason="its kernels are not launched with this JAX"
    ),
]


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def test_a_kernel_is_part_of_the_graph() -> None:
    def compute(x: Any) -> Any:
        return double_exp(x + 1) * 3

    captured: Any = tg.capture(compute)
    for seed in range(3):
        x = draw(256, 128, seed=seed)
        assert_same(captured(x), jax.jit(compute)(x))
    assert captured.cache_info().captures == 1
    assert "cuts: none, all is one graph" in captured.explain(draw(256, 128))


def test_a_matmul_on_tensor_cores() -> None:
    captured: Any = tg.capture(lambda a, b: multiply(a, b) * 2)
    for seed in range(3):
        a, b = (draw(256, 128, seed=seed, dtype=np.float16), draw(128, 384, dtype=np.float16))
        found = captured(a, b)
        assert_same(found, jax.jit(lambda a, b: multiply(a, b) * 2)(a, b))
        wanted = np.asarray(a, np.float32) @ np.asarray(b, np.float32) * 2
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("length", [3, 400])
def test_a_kernel_in_a_loop(length: int) -> None:
    def compute(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(double_exp(c)), None), x, length=length)[0]

    captured: Any = tg.capture(compute)
    for seed in range(2):
        x = draw(128, 128, seed=seed)
        assert_same(captured(x), jax.jit(compute)(x))


def test_two_graphs_and_a_loaded_one_have_the_same_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")
    x = draw(128, 128)
    expected = jax.jit(double_exp)(x)
    first: Any = tg.capture(double_exp)
    second: Any = tg.capture(lambda y: double_exp(y))
    assert_same(first(x), expected)
    assert_same(second(x), expected)
    del second
    assert_same(first(x + 0), expected)
    first.save(tmp_path / "step.tg")
    loaded: Any = tg.load(tmp_path / "step.tg")
    assert_same(loaded(x), expected)


def test_its_gradient_by_hand_is_in_one_graph_with_a_train_step() -> None:
    @jax.custom_vjp
    def compute(x: Any) -> Any:
        return double_exp(x)

    def forward(x: Any) -> Any:
        y = double_exp(x)
        return y, y

    compute.defvjp(forward, lambda y, g: (g * y,))

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda v: (compute(x * v) ** 2).mean())(w)
        return w - 1e-6 * gradient, value

    captured, jitted = tg.capture(step, donate_argnums=0), jax.jit(step)
    w, state, x = draw(128, 128), draw(128, 128), draw(128, 128, seed=2)
    for _ in range(3):
        w, value = captured(w, x)
        state, expected = jitted(state, x)
        assert_same((w, value), (state, expected))
