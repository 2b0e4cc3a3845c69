"""Partial mode on a GPU: calls of XLA between two graphs, with the results of `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.capturing.unlowered import UNLOWERED_PRIMITIVES

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture(autouse=True)
def cut_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs transforms and solves eagerly, as if no graph held them."""
    for name in ("fft", "triangular_solve"):
        monkeypatch.setitem(UNLOWERED_PRIMITIVES, name, name)


def transform(x):
    return jnp.abs(jnp.fft.fft(x * 2)) + x


def solve(x):
    return jnp.linalg.solve(x + 80 * jnp.eye(64), x * 2) + 1


FUNCTIONS: list[Any] = [transform, solve]


def draw(seed):
    return np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_captures_equal_jit(function):
    captured: Any = tg.capture(function, mode="partial")
    for seed in range(20):
        x = jnp.asarray(draw(seed))
        with jax.default_matmul_precision("highest"):
            got: Any = captured(x)
            wanted: Any = jax.jit(function)(x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), got, wanted
        )
    assert captured.cache_info() == (19, 1, 64, 1)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_report_lists_what_runs_eagerly(function):
    captured: Any = tg.capture(function, mode="partial")
    report = captured.explain(draw(0))
    assert "becomes work that no graph on a GPU holds yet" in report
    assert "test_partial.py:" in report
    assert "device: cuda:0: NVIDIA" in report


def test_a_donated_state_passes_an_eager_part():
    def step(state, x):
        w = jnp.fft.fft(state["w"] + x).real * 0.01
        return {"w": w, "n": state["n"] + 1}, w.sum()

    captured = tg.capture(step, mode="partial", donate_argnums=0)
    state: Any = {"w": jnp.asarray(draw(0)), "n": jnp.int32(0)}
    wanted: Any = {"w": jnp.asarray(draw(0)), "n": jnp.int32(0)}
    for seed in range(10):
        x = jnp.asarray(draw(seed))
        state, total = captured(state, x)
        wanted, total_wanted = jax.jit(step)(wanted, x)
        np.testing.assert_allclose(total, total_wanted, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(state["w"], wanted["w"], rtol=1e-4, atol=1e-4)
    assert int(state["n"]) == 10
