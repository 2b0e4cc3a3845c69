"""A captured function under an eager `jax.grad` or `jax.vjp`: there it is a graphed callable."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.oracles.tree_equality import assert_same
from tests.raw_graphs import use_device
from tracegraph.graphed_callables.graph_pair import GraphPair

W, X = jnp.linspace(0.5, 1.5, 4), jnp.linspace(-1.0, 1.0, 4)


@pytest.fixture(params=["host", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def wave(w: jax.Array, x: jax.Array, *, n: int = 2, act: str = "tanh") -> jax.Array:
    for _ in range(n):
        x = getattr(jnp, act)(w * x)
    return x.sum()


def capture_wave(**options: Any) -> tuple[Any, Any]:
    jitted = jax.jit(wave, static_argnames=("n", "act"))
    return tg.capture(wave, static_argnames="n", **options), jitted


def test_gradients_are_replays_and_equal_those_of_jit(device):
    captured, jitted = capture_wave()
    for calls in range(3):
        assert_same(jax.grad(captured)(W, X), jax.grad(jitted)(W, X))
        assert captured.cache_info()[:2] == (calls, 1)
    pair = next(iter(next(iter(captured._differentiated._graphs.values()))._pairs.values()))
    assert (pair.forward.find().calls, pair.backward.find().calls) == (3, 3)


def test_each_signature_and_set_of_arguments_has_a_pair(device):
    captured, jitted = capture_wave()
    assert_same(jax.grad(captured)(W, X), jax.grad(jitted)(W, X))
    both = jax.value_and_grad(captured, argnums=(0, 1))(W, X)
    assert_same(both, jax.value_and_grad(jitted, argnums=(0, 1))(W, X))
    assert captured.cache_info().captures == captured.cache_info().currsize == 2
    for keywords in ({"n": 1}, {"act": "sin"}, {"n": 1}):
        found = jax.grad(lambda w, k=keywords: captured(w, X, **k))(W)
        assert_same(found, jax.grad(lambda w, k=keywords: jitted(w, X, **k))(W))
    assert captured.cache_info()[:2] == (1, 4)
    captured.reset()
    assert captured.cache_info() == (1, 4, 64, 0)


TRACED = {
    "jit": lambda f: jax.jit(jax.grad(f))(W, X),
    "vmap": lambda f: jax.vmap(jax.grad(f))(jnp.ones((2, 4)), jnp.ones((2, 4))),
    "grad of vmap": lambda f: jax.grad(lambda w: jax.vmap(f)(w, w).sum())(jnp.ones((2, 4))),
    "jvp": lambda f: jax.jvp(f, (W, X), (W, X)),
    "hessian": lambda f: jax.hessian(f)(W, X),
    "grad of grad": lambda f: jax.grad(lambda w: jax.grad(f)(w, X).sum())(W),
    "capture": lambda f: tg.capture(jax.grad(f))(W, X),
    "values only": lambda f: jax.grad(lambda w: (w * f(W, X)).sum())(W),
}


@pytest.mark.parametrize("place", TRACED)
def test_elsewhere_the_function_is_traced(place):
    captured, jitted = capture_wave()
    assert_same(TRACED[place](captured), TRACED[place](jitted))
    assert captured.cache_info().captures == 0


def test_jacrev_replays_the_forward_graph():
    captured = tg.capture(lambda w: jnp.tanh(w * X))
    assert_same(jax.jacrev(captured)(W), jax.jacrev(jax.jit(captured.__wrapped__))(W))
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("options", [{"donate_argnums": (0, 1)}, {"outputs": "static"}])
def test_nothing_is_taken_over_and_results_are_fresh(options):
    captured, jitted = capture_wave(**options)
    w, x = W + 0, X + 0
    first, pull = jax.vjp(lambda w: captured(w, x), w)
    second, other = jax.vjp(lambda w: captured(w, x), 2 * w)
    twin = [jax.vjp(lambda w: jitted(w, X), each)[0] for each in (W, 2 * W)]
    assert_same([first, second], twin)
    for found, at in ((pull, W), (other, 2 * W)):
        assert_same(found(jnp.float32(1))[0], jax.grad(jitted)(at, X))
    assert not w.is_deleted()
    assert not x.is_deleted()


def test_a_donated_argument_and_its_gradient_live_side_by_side(device):
    step = tg.capture(lambda state, g: state - 0.1 * g, donate_argnums=0)
    loss = tg.capture(lambda w: jnp.sum(jnp.sin(w) ** 2))
    twin, state = jax.jit(jax.grad(loss.__wrapped__)), W + 0
    expected = W
    for _ in range(3):
        state = step(state, jax.grad(loss)(state))
        expected = jax.jit(step.__wrapped__)(expected, twin(expected))
        assert_same(np.asarray(state), np.asarray(expected))
    assert loss.cache_info().captures == 1


@pytest.mark.parametrize("options", [{"mode": "partial"}, {"debug_nans": True}])
def test_calls_that_may_be_cut_or_are_watched_are_traced(options):
    captured, jitted = capture_wave(**options)
    assert_same(jax.grad(captured)(W, X), jax.grad(jitted)(W, X))
    assert captured.cache_info().captures == 0


def test_draws_from_generators_are_traced():
    tg.random.manual_seed(7)
    captured = tg.capture(lambda w: jnp.sum(w * jax.random.normal(tg.random.next_key(), (4,))))
    found = [jax.grad(captured)(W) for _ in range(2)]
    tg.random.manual_seed(7)
    assert_same(found, [jax.grad(captured.__wrapped__)(W) for _ in range(2)])
    assert captured.cache_info().captures == 0


def test_what_cannot_be_captured_is_traced_forward_and_backward():
    @jax.custom_vjp
    def call_back(w):
        return w * 2

    def pull(_, cotangent):
        return (jax.pure_callback(np.negative, cotangent, cotangent),)

    call_back.defvjp(lambda w: (w * 2, None), pull)
    backward = tg.capture(lambda w: call_back(w).sum())
    forward = tg.capture(lambda w: (w * jax.pure_callback(np.sin, X, X)).sum())
    for _ in range(2):
        assert_same(jax.grad(backward)(W), -jnp.ones(4))
        assert_same(jax.grad(forward)(W), jnp.asarray(np.sin(X)))
    assert backward.cache_info().captures == 1
    assert forward.cache_info().captures == 0


def test_what_was_refused_is_tried_again_after_a_reset():
    calls_back = True

    def function(w):
        return (w * (jax.pure_callback(np.negative, X, X) if calls_back else -X)).sum()

    captured = tg.capture(function)
    assert_same(jax.grad(captured)(W), -X)
    calls_back = False
    assert_same(jax.grad(captured)(W), -X)
    assert captured.cache_info().captures == 0
    captured.reset()
    assert_same(jax.grad(captured)(W), -X)
    assert captured.cache_info().captures == 1


def test_a_probe_only_returns_its_value():
    captured = tg.capture(lambda w: jnp.sum(tg.probe("sine", jnp.sin(w)) ** 2))
    for _ in range(2):
        assert_same(jax.grad(captured)(W), jax.jit(jax.grad(captured.__wrapped__))(W))
    assert captured.probes() == {}


def test_explain_names_the_pairs_and_why_calls_were_traced():
    captured, _ = capture_wave()
    assert "gradients" not in captured.explain(W, X)
    jax.vjp(lambda w: captured(w, X), W)
    jax.grad(lambda s: s * captured(W, X))(1.0)
    report = captured.explain(W, X, show="gradients")
    assert "gradients: pairs of graphs 1, calls 1; traced 1: no argument of it is" in report.summary
    pair, forward, backward, traced = report.parts["gradients"].splitlines()
    assert (pair, backward) == ("of `w`", "  backward: not captured yet")
    assert forward.startswith("  forward: 1 graph: ")
    assert traced == "traced 1: no argument of it is differentiated"
    jax.grad(captured)(W, X)
    assert "  backward: 1 graph: " in captured.explain(W, X).parts["gradients"]


def draw(w: jax.Array) -> jax.Array:
    return w * jax.random.normal(tg.random.next_key(), (4,))


REASONS = {
    "mode": (lambda w: w.sum(), {"mode": "partial"}, "mode='partial' may cut it"),
    "nans": (lambda w: w.sum(), {"debug_nans": True}, "debug_nans=True watches its ops"),
    "draws": (lambda w: draw(w).sum(), {}, "it draws keys from generators"),
    "callback": (
        lambda w: (w * jax.pure_callback(np.sin, X, X)).sum(),
        {},
        "`<lambda>` calls back into Python",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_explain_says_why_a_gradient_is_traced(name):
    function, options, reason = REASONS[name]
    captured: Any = tg.capture(function, **options)
    for _ in range(2):
        jax.grad(captured)(W)
    assert f"gradients: pairs of graphs 0, calls 0; traced 2: {reason}" in captured.explain(W)


def test_a_value_that_is_differentiated_and_closed_over_has_its_gradient():
    def loss(w: jax.Array) -> jax.Array:
        scale = tg.capture(lambda x: x * w)
        return scale(X).sum() + scale(w * 2).sum()

    assert_same(jax.grad(loss)(W), X + 4 * W)


def test_memory_goes_with_the_last_name_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        captured = tg.capture(lambda w: jnp.sum(jnp.sin(w) ** 2))
        jax.grad(captured)(W)
        kept: Any = captured._differentiated
        (graphs,) = kept._graphs.values()
        (pair,) = graphs._pairs.values()
        watched = [
            weakref.ref(each)
            for each in (captured, pair, pair.forward.find(), pair.backward.find())
        ]
        _, pull = jax.vjp(captured, W)
        del captured, kept, graphs, pair
        assert [each() for each in watched] == [None] * 4
        assert_same(
            pull(jnp.float32(1))[0], jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(w) ** 2)))(W)
        )
    finally:
        gc.enable()


def test_a_wrong_backward_graph_is_caught(monkeypatch):
    """The fault: the backward graph returns gradients of other cotangents."""
    captured, jitted = capture_wave()
    replay = GraphPair.replay_backward
    monkeypatch.setattr(
        GraphPair,
        "replay_backward",
        lambda self, residuals, cotangents: replay(self, residuals, [2 * x for x in cotangents]),
    )
    with pytest.raises(AssertionError):
        assert_same(jax.grad(captured)(W, X), jax.grad(jitted)(W, X))
