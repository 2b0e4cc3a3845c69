"""Captured functions that draw keys, in eager gradients: they are called once for each gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tracegraph.tracing import inner_call

X = jnp.arange(3.0)


def make_noise(gen: Any, calls: list[Any], **options: Any) -> Any:
    def add_noise(x: jax.Array, is_noisy: bool) -> jax.Array:
        calls.append(x.shape)
        return (x * jax.random.normal(gen.next_key(), x.shape)).sum() if is_noisy else x.sum()

    return tg.capture(add_noise, static_argnums=1, **options)


def test_a_gradient_calls_a_function_that_draws_once_and_draws_as_eager_code() -> None:
    calls: list[Any] = []
    step = make_noise(tg.random.Generator(7), calls)
    jax.grad(step)(X, True)
    calls.clear()
    slopes = [jax.grad(step)(X, True) for _ in range(4)]
    assert calls == [(3,)] * 4

    eager = tg.random.Generator(7)
    wanted = [jax.random.normal(eager.next_key(), (3,)) for _ in range(5)][1:]
    np.testing.assert_array_equal(np.asarray(slopes), np.asarray(wanted))


def test_kinds_of_calls_that_draw_nothing_stay_traced() -> None:
    calls: list[Any] = []
    step = make_noise(tg.random.Generator(7), calls)
    for _ in range(3):
        jax.grad(step)(X, True)
        jax.grad(step)(X, False)
    calls.clear()
    np.testing.assert_array_equal(jax.grad(step)(X, False), jnp.ones(3))
    assert not calls
    jax.grad(step)(jnp.ones(5), True)
    jax.grad(step)(X, True)
    assert calls[-1] == (3,)
    assert calls.count((3,)) == 1


def test_what_no_longer_draws_is_called_and_right() -> None:
    gen, is_noisy = tg.random.Generator(7), [True]

    @tg.capture
    def step(x: jax.Array) -> jax.Array:
        return (x * jax.random.normal(gen.next_key(), x.shape)).sum() if is_noisy[0] else x.sum()

    first = jax.grad(step)(X)
    is_noisy[0] = False
    np.testing.assert_array_equal(jax.grad(step)(X), jnp.ones(3))
    is_noisy[0] = True
    assert not np.array_equal(jax.grad(step)(X), first)


def test_few_kinds_are_remembered_and_none_after_a_clear(monkeypatch: Any) -> None:
    monkeypatch.setattr(inner_call, "_MAX_KINDS", 2)
    step = make_noise(tg.random.Generator(7), [])
    for size in range(1, 6):
        jax.grad(step)(jnp.ones(size), True)
    assert len(step._inner._drawing) == 2
    step.clear_cache()
    assert not step._inner._drawing
    step.reset()
    assert jax.grad(step)(X, True).shape == (3,)


def test_a_planted_fault_is_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(inner_call.InnerCall, "_find_kind", lambda *_: None)
    calls: list[Any] = []
    step = make_noise(tg.random.Generator(7), calls)
    jax.grad(step)(X, True)
    calls.clear()
    jax.grad(step)(X, True)
    assert calls == [(3,)] * 2
