"""A function with eager parts on a GPU: with the graph and as `jax.jit`, the same results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tracegraph.capturing.unlowered import UNLOWERED_PRIMITIVES
from tracegraph.verification import jit_comparison

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture(autouse=True)
def cut_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs transforms and solves eagerly, as if no graph held them."""
    for name in ("fft", "triangular_solve"):
        monkeypatch.setitem(UNLOWERED_PRIMITIVES, name, name)


def step(state: Any, x: Any) -> Any:
    gradient = jnp.abs(jnp.fft.fft(state["w"] * x)) * 1e-3
    return {"w": state["w"] - gradient}, gradient.sum()


@pytest.mark.parametrize("verdict", [(1.0, 2.0), (2.0, 1.0)])
def test_both_sides_train_alike(verdict: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(jit_comparison, "time_both", lambda *_: verdict)
    captured = tg.capture(step, mode="partial", donate_argnums=0)
    x = jnp.linspace(0.0, 1.0, 256)
    state, wanted = {"w": x + 1}, {"w": x + 1}
    for _ in range(3):
        before = state
        state, total = captured(state, x)
        wanted, expected = jax.jit(step)(wanted, x)
        assert before["w"].is_deleted()
        assert jnp.allclose(total, expected)
    assert jnp.allclose(state["w"], wanted["w"])


def test_the_clock_says_something() -> None:
    x = jnp.ones(256)
    captured = tg.capture(lambda x: jnp.abs(jnp.fft.fft(x * 2)) + 1, mode="partial")
    assert captured(x).shape == (256,)
    assert "calls run " in captured.explain(x)
