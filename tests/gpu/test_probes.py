"""`tg.probe` and `debug_nans=True` on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")
X = np.arange(1.0, 5.0, dtype=np.float32)


def compute(x):
    h = tg.probe("hidden", jnp.sin(x) * 2)
    tg.probe("unused", {"square": h * h})
    return jax.lax.scan(lambda c, y: (tg.probe("carry", c + y), c), h[0], h)[0]


def test_probes_are_results_of_each_replay():
    step = tg.capture(compute)
    kept = []
    for x in (X, X + 1, X * 3):
        assert np.array_equal(step(x), jax.jit(compute)(x))
        kept.append((x, step.probes()))
    for x, probes in kept:
        h = np.asarray(jax.jit(lambda x: jnp.sin(x) * 2)(x))
        assert np.array_equal(probes["hidden"], h)
        assert np.array_equal(probes["unused"]["square"], h * h)
        np.testing.assert_allclose(probes["carry"], h[0] + np.cumsum(h), rtol=1e-6)


def test_a_probe_below_a_gradient_beside_donated_state():
    def loss(w, x):
        return (tg.probe("hidden", x * w) ** 2).sum()

    def train(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.01 * gradient, value

    step, twin = tg.capture(train, donate_argnums=0), jax.jit(train)
    w, other = jnp.ones(4), jnp.ones(4)
    for _ in range(3):
        before = np.asarray(other)
        w, value = step(w, X)
        other, wanted = twin(other, X)
        np.testing.assert_allclose(step.probes()["hidden"], X * before, rtol=1e-6)
        assert np.array_equal(value, wanted)
        assert np.array_equal(w, other)


def test_the_op_that_made_a_nan_is_named():
    def work(x):
        return jax.lax.scan(lambda c, y: (jnp.sqrt(c - y) + 4, c), 9.0 * x[0], x)[0]

    step = tg.capture(work, debug_nans=True)
    assert np.isfinite(step(X))
    with pytest.raises(tg.InvalidFloatError, match="iteration 3 of scan"):
        step(X * 2)
    assert np.isfinite(step(X))


def test_donated_values_are_kept_for_the_search():
    step = tg.capture(lambda s, x: s + jnp.log(x), donate_argnums=0, debug_nans=True)
    state = jnp.zeros(4)
    with pytest.raises(tg.InvalidFloatError, match="4 NaN of 4 elements in log"):
        step(state, -X)
    np.testing.assert_allclose(step(step(state, X), X), 2 * np.log(X), rtol=1e-5)
