"""`release` and `restore`: a captured function gives its memory back and keeps its recipes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.raw_graphs import use_device


@pytest.fixture
def step():
    @tg.capture(donate_argnums=0, verify=False)
    def step(state, x):
        return {"sum": state["sum"] + x}, x * 2

    return step


def test_state_and_results_keep_their_values(step):
    state, double = step({"sum": jnp.zeros(4)}, jnp.arange(4.0))
    state, double = step(state, jnp.arange(4.0))
    assert step.pool_bytes > 0
    step.release()
    assert step.pool_bytes == 0
    np.testing.assert_array_equal(double, 2 * np.arange(4.0))
    np.testing.assert_array_equal(state["sum"], 2 * np.arange(4.0))
    state, _ = step(state, jnp.ones(4))
    np.testing.assert_array_equal(state["sum"], 2 * np.arange(4.0) + 1)
    assert step.cache_info()[:2] == (2, 1), "nothing is captured anew"


def test_restore_makes_all_graphs_again(step):
    for size in (2, 3):
        step({"sum": jnp.zeros(size)}, jnp.ones(size))
    before = step.pool_bytes
    step.release()
    step.restore()
    assert step.pool_bytes == before
    assert step.cache_info()[1:] == (2, 64, 2)
    step.restore()
    assert step.pool_bytes == before


def test_a_static_result_keeps_its_memory():
    double = tg.capture(lambda x: x * 2, outputs="static", verify=False)
    result = double(jnp.ones(3))
    double.release()
    np.testing.assert_array_equal(result, np.full(3, 2.0))


def test_a_function_that_was_never_called_has_nothing_to_release():
    double = tg.capture(lambda x: x * 2)
    double.release()
    double.restore()
    assert double.cache_info().currsize == 0


def test_a_graph_that_cannot_be_made_again_stays_released(step, monkeypatch):
    step({"sum": jnp.zeros(2)}, jnp.ones(2))
    step.release()
    with monkeypatch.context() as patch:
        recipe = type(next(iter(step._cache._released.values())).recipe)
        patch.setattr(recipe, "instantiate", raise_out_of_memory)
        with pytest.raises(tg.OutOfMemoryError):
            step({"sum": jnp.zeros(2)}, jnp.ones(2))
    state, _ = step({"sum": jnp.zeros(2)}, jnp.ones(2))
    np.testing.assert_array_equal(state["sum"], np.ones(2))


def raise_out_of_memory(_recipe):
    raise tg.OutOfMemoryError(
        "full", where="here", why="planted", fix="none", anchor="out-of-memory"
    )


def test_the_graphs_of_gradients_give_their_memory_back():
    @tg.capture
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    w, x = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.ones((2, 4))
    expected = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    value, pullback = jax.vjp(loss, w, x)
    np.testing.assert_allclose(jax.grad(loss)(w, x), expected, rtol=1e-6)
    pullback(jnp.ones(()))
    before, captures = loss.pool_bytes, loss.cache_info().captures
    assert before > 0
    loss.release()
    assert loss.pool_bytes == 0
    np.testing.assert_allclose(value, jnp.tanh(x @ w).sum(), rtol=1e-6)
    # A pullback of before takes residuals of its own, and its graph again.
    np.testing.assert_allclose(pullback(jnp.ones(()))[0], expected, rtol=1e-6)
    assert 0 < loss.pool_bytes <= before
    loss.release()
    loss.restore()
    assert loss.pool_bytes == before
    np.testing.assert_allclose(jax.grad(loss)(w, x), expected, rtol=1e-6)
    assert loss.cache_info().captures == captures, "nothing is captured anew"


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_the_parts_of_a_function_with_breaks_are_given_back(kind, monkeypatch):
    use_device(kind, monkeypatch)

    @tg.capture(mode="partial", donate_argnums=0, verify=False)
    def step(state, x):
        state = state + x
        return (state * 2, x - 1) if state.sum() > 10 else (state, x + 1)

    def expect(x):
        return [x * 2, np.zeros(4)] if x.sum() > 10 else [x, np.full(4, 2.0)]

    found = [step(jnp.full(4, value, jnp.float32), jnp.ones(4)) for value in (1.0, 5.0)]
    before = step.pool_bytes
    assert before > 0
    step.release()
    assert step.pool_bytes == 0
    assert "cuts: 3 graphs, 1 break" in step.explain(jnp.ones(4), jnp.ones(4))
    for value, result in zip((1.0, 5.0), found, strict=True):
        for one, other in zip(result, expect(np.full(4, value + 1)), strict=True):
            np.testing.assert_array_equal(one, other)
    captures = step.cache_info().captures
    state, _ = step(found[1][0], jnp.ones(4))
    np.testing.assert_array_equal(state, np.full(4, 26.0))
    step.restore()
    assert (step.pool_bytes, step.cache_info().captures) == (before, captures)
