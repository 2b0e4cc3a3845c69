"""`tg.amp.GradScaler`: whole steps in one graph, equal to an eager twin that decides in Python."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tracegraph as tg
from tests.draws import read_words
from tracegraph.mixed_precision import grad_scaler

W = jax.random.normal(jax.random.key(0), (8, 2))
X = jax.random.normal(jax.random.key(1), (4, 8))
INF, NAN = X.at[1, 2].set(jnp.inf), X.at[0, 0].set(jnp.nan)
# Finite and overflowing in turn; the scale grows after two finite steps.
BATCHES = [X, X * 2, INF, X, NAN, NAN, X * 3, X, X]
# What is multiplied by powers of two is exact, however XLA fuses it.
RATE, SCALE = 0.5, 256.0
NO_BOOL: Any = 0


def compute_loss(w: Any, x: Any) -> Any:
    with tg.amp.autocast(jnp.float16):
        y = x @ w
    return jnp.mean(y**2)


def make_step(optimizer: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, scaler: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: scaler.scale(compute_loss(w, x)))(params)
        params, state, found_inf = scaler.step(optimizer, grads, state, params)
        return params, state, scaler.update(found_inf)

    return step


def sgd(grads: Any, count: Any, params: Any) -> Any:
    return params - RATE * grads, count + 1


def run_twin() -> Any:
    """Returns parameters, count and scale of the steps; Python decides."""
    gradient = jax.jit(jax.grad(lambda w, x, s: compute_loss(w, x) * s))
    params, count, scale, finite = W, 0, np.float32(SCALE), 0
    history = []
    for x in BATCHES:
        grads = gradient(params, x, scale)
        if np.isfinite(grads).all():
            params, count, finite = params - RATE * (grads / scale), count + 1, finite + 1
        else:
            scale, finite = scale / 2, 0
        if finite == 2:
            scale, finite = scale * 2, 0
        history.append((np.array(params), count, scale))
    return history


@pytest.fixture(scope="module")
def captured() -> Any:
    return tg.capture(make_step(sgd), donate_argnums=(0, 1, 2))


def make_state() -> Any:
    return jnp.array(W), jnp.int32(0), tg.amp.GradScaler(SCALE, growth_interval=2)


def test_g33_the_scale_changes_between_replays_and_infinities_are_found(captured: Any) -> None:
    compare_with_twin(captured)
    assert captured.cache_info().misses == 1


def compare_with_twin(captured: Any) -> None:
    state = make_state()
    for x, (params, count, scale) in zip(BATCHES, run_twin(), strict=True):
        state = captured(*state, x)
        assert np.array_equal(np.asarray(state[0]), params)
        assert int(state[1]) == count
        assert float(state[2].get_scale()) == scale
    assert int(state[1]) == 6, "three of nine steps were skipped"


@pytest.mark.parametrize(
    "make", [lambda: optax.sgd(0.5), lambda: optax.adam(1e-2), lambda: optax.adamw(1e-2)]
)
def test_g32_steps_of_optimizers_with_a_scale_equal_those_of_jit(make: Callable[[], Any]) -> None:
    optimizer = make()
    one = other = (jnp.array(W), optimizer.init(W), tg.amp.GradScaler(128.0))
    step, twin = tg.capture(make_step(optimizer)), jax.jit(make_step(optimizer))
    for x in (X, X * 2, INF, X, X * 3):
        before = jax.tree.map(np.array, one[:2])
        one, other = step(*one, x), twin(*other, x)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        if x is INF:
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(one[:2]), strict=True):
                assert np.array_equal(a, np.asarray(b)), "a skipped step keeps every bit"
    assert step.cache_info().misses == 1


def test_a_step_is_near_that_of_float32(captured: Any) -> None:
    params, *_ = captured(*make_state(), X)
    wanted = W - RATE * jax.grad(lambda w: jnp.mean((X @ w) ** 2))(W)
    assert 0 < np.abs(np.asarray(params) - wanted).max() < 2**-8


def test_a_gradient_that_is_clipped_is_unscaled_once() -> None:
    scaler = tg.amp.GradScaler(4.0)
    grads, found_inf = scaler.unscale({"a": jnp.full(2, 8.0), "n": jnp.arange(2)})
    assert (grads["a"] == 2).all()
    assert grads["n"].dtype == jnp.int32
    params, _, found = scaler.step(sgd, grads["a"] / 2, 0, jnp.zeros(2), found_inf=found_inf)
    assert (params == -0.5).all()
    assert not found


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_each_gradient_is_checked_and_those_of_one_type_together(poison: float) -> None:
    shapes = [(3,), (2, 4), (3,), (), (2, 4), (3,)]
    grads = [np.ones(shape, np.float32) for shape in shapes]
    unscale = tg.capture(lambda grads: tg.amp.GradScaler().unscale(grads)[1])
    assert not unscale(grads)
    for each in grads:
        each.flat[-1] = poison
        assert unscale(grads)
        each.flat[-1] = 1
    jaxpr = jax.make_jaxpr(tg.amp.GradScaler().unscale)(grads)
    assert str(jaxpr).count("reduce_and") == len(set(shapes)) + 1, "one per type, and one of all"


def test_keys_and_counts_of_a_skipped_step_stay() -> None:
    def advance(grads: Any, state: Any, params: Any) -> Any:
        key, count = state
        return params + grads, (jax.random.split(key)[0], count + 1)

    key = jax.random.key(3)
    step = tg.capture(lambda g, s: tg.amp.GradScaler().step(advance, g, s, jnp.ones(2)))
    params, (kept, count), found_inf = step(jnp.array([1.0, jnp.nan]), (key, jnp.int32(4)))
    assert (params == 1).all()
    assert found_inf
    assert kept == key
    assert count == 4


def test_several_optimizers_share_a_scale() -> None:
    scaler = tg.amp.GradScaler(8.0, growth_interval=1)
    assert scaler.update((jnp.array(False), jnp.array(True))).get_scale() == 4
    assert scaler.update([False, False]).get_scale() == 16
    assert scaler.update(False, new_scale=3).get_scale() == 3
    largest = tg.amp.GradScaler(3e38, growth_interval=1)
    assert largest.update(False).get_scale() == largest.get_scale(), "it stays finite"


def test_a_scaler_that_is_off_does_nothing() -> None:
    scaler = tg.amp.GradScaler(enabled=False)
    grads, found_inf = scaler.unscale(jnp.array([jnp.inf]))
    assert scaler.scale(2.0) == 2.0
    assert grads[0] == jnp.inf
    assert not found_inf
    assert scaler.step(sgd, jnp.ones(1), 0, jnp.ones(1))[0] == 0.5
    assert scaler.update(True) is scaler
    assert scaler.get_scale() == 1
    assert scaler.state_dict() == {}
    assert scaler.load_state_dict({}) is scaler
    assert not scaler.is_enabled()
    assert repr(scaler) == "<GradScaler off>"
    scaler.check()


def test_the_state_is_saved_and_restored() -> None:
    scaler = tg.amp.GradScaler(64.0, 4.0, 0.25, 3).update(False).update(False)
    state = scaler.state_dict()
    of_torch = {name: value for name, value in state.items() if name != "_skipped"}
    for saved in (state, of_torch):
        again = tg.amp.GradScaler().load_state_dict(saved)
        assert again.state_dict() == state
    assert again.update(False).get_scale() == 256, "the third finite step"
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    factors = (again.get_growth_factor(), again.get_backoff_factor(), again.get_growth_interval())
    assert factors == (4.0, 0.25, 3)
    assert repr(scaler) == "<GradScaler scale=64.0 growth_tracker=2>"


def test_a_scaler_without_a_finite_step_in_its_window() -> None:
    step = tg.capture(lambda scaler, grads: scaler.update(scaler.unscale(grads)[1]))
    state = tg.amp.GradScaler(window=3)
    for _ in range(2):
        state = step(state, NAN)
        state.check()
    state = step(state, NAN)
    with pytest.raises(tg.ReplayError, match="skipped the last 3 steps") as caught:
        state.check()
    assert read_words(caught.value) == ["where", "why", "fix"]
    assert "test_grad_scaler.py" in str(caught.value)
    state.update(False).check()  # one that is finite


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: tg.amp.GradScaler(0.0), "init_scale=0.0"),
        (lambda s: tg.amp.GradScaler(jnp.inf), "init_scale=inf"),
        (lambda s: tg.amp.GradScaler(growth_factor=1.0), "growth_factor=1.0"),
        (lambda s: tg.amp.GradScaler(backoff_factor=1.5), "backoff_factor=1.5"),
        (lambda s: tg.amp.GradScaler(growth_interval=0), "growth_interval=0"),
        (lambda s: tg.amp.GradScaler(enabled=NO_BOOL), "enabled=0"),
        (lambda s: tg.amp.GradScaler(window=True), "window=True"),
        (lambda s: s.unscale({"w": jnp.ones(2, jnp.float16)}), "float16"),
        (lambda s: s.step(3, X, 0, X), "int that can make no step"),
        (lambda s: s.step(lambda g, o, p: p, X, 0, X), "can make no step"),
        (lambda s: s.step(lambda g, o, p: (p, (o, o)), X, 0, X), "PyTreeDef"),
        (lambda s: s.step(lambda g, o, p: (p[0], o), X, 0, X), "returns float32"),
        (lambda s: s.update(None), "found_inf=None is not the result of a step"),
        (lambda s: s.load_state_dict({"scale": 1.0}), "growth_factor, "),
    ],
)
def test_bad_input_is_refused_at_the_door(call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(tg.ConfigError, match=words) as caught:
        call(tg.amp.GradScaler())
    assert read_words(caught.value) == ["where", "why", "fix"]
    assert "test_grad_scaler.py" in str(caught.value)


def test_a_check_in_a_step_is_refused() -> None:
    with pytest.raises(tg.CaptureError, match="while JAX traces"):
        tg.capture(lambda s: s.check())(tg.amp.GradScaler())


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are never skipped differ from the twin, whose Python skips them."""
    monkeypatch.setattr(grad_scaler, "_select", lambda skips, old, new: new)
    with pytest.raises(AssertionError):
        compare_with_twin(tg.capture(make_step(sgd), donate_argnums=(0, 1, 2)))
