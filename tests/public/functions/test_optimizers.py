"""Captured steps of optax's optimizers, and graphed callables in 16 bits, equal those of `jax.jit`.

The names of cases (G30...) are those of PyTorch's own tests of graphs. Its ``capturable`` says
whether an optimizer counts its steps on the device; those of optax all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tracegraph as tg
from tests.draws import assert_same

X, TARGET = jax.random.normal(jax.random.key(1), (2, 4, 8))
# Of PyTorch's, ASGD has no counterpart.
NAMES = ("adadelta", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "rprop", "sgd")
STEPS = 5


def make_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {name: jax.random.normal(key, (8, 8)) for name, key in zip("ab", keys, strict=True)}


def compute_loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - TARGET) ** 2)


def make_step(optimizer: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(compute_loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def run_steps(optimizer: Any, compiled: Callable[..., Any]) -> list[Any]:
    """Returns all leaves after each step."""
    params = make_params()
    state, history = optimizer.init(params), []
    for number in range(STEPS):
        params, state, loss = compiled(params, state, X * (number + 1))
        history.append(jax.tree.map(np.array, (params, state, loss)))
    return history


def assert_same_leaves(found: Any, wanted: Any) -> None:
    assert_same(jax.tree.leaves(found), jax.tree.leaves(wanted))


def make_optimizer(name: str) -> Any:
    return getattr(optax, name)(0.01)


@pytest.mark.parametrize("name", NAMES)
def test_g30_steps_of_optimizers_equal_those_of_jit(name: str) -> None:
    optimizer = make_optimizer(name)
    captured = tg.capture(make_step(optimizer))
    found = run_steps(optimizer, captured)
    assert_same_leaves(found, run_steps(optimizer, jax.jit(make_step(optimizer))))
    assert captured.cache_info()[:2] == (STEPS - 1, 1)
    assert not np.array_equal(found[0][0]["a"], found[-1][0]["a"])


def count_on_host(optimizer: Any) -> Any:
    """Returns an optimizer that reads the number of its steps in Python."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, inner = state
        updates, inner = optimizer.update(updates, inner, params)
        return updates, (jnp.int32(int(count) + 1), inner)

    def init(params: Any) -> tuple[Any, Any]:
        return jnp.int32(0), optimizer.init(params)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("name", NAMES)
def test_g31_groups_of_parameters_are_captured_if_both_can_be(name: str) -> None:
    groups = [make_optimizer(name), make_optimizer("sgd")]

    def join(first: Any, second: Any) -> Any:
        return optax.multi_transform({"a": first, "b": second}, {"a": "a", "b": "b"})

    for hosted in (0, 1):
        mixed = [count_on_host(each) if i == hosted else each for i, each in enumerate(groups)]
        optimizer = join(*mixed)
        with pytest.raises(tg.CaptureError, match="int"):
            run_steps(optimizer, tg.capture(make_step(optimizer)))
    optimizer = join(*groups)
    found = run_steps(optimizer, tg.capture(make_step(optimizer)))
    assert_same_leaves(found, run_steps(optimizer, jax.jit(make_step(optimizer))))


@tg.amp.autocast(jnp.bfloat16)
def half(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"]) @ params["b"]


def test_g26_in_16_bits_with_casts_that_are_kept() -> None:
    """PyTorch's case fails unless casts are not kept: one graph would have those of another."""
    graphed = tg.make_graphed_callables(half, (make_params(), X))

    def run(function: Any) -> list[Any]:
        params, history = make_params(), []
        for _ in range(STEPS):
            grads = jax.grad(lambda p: jnp.mean(function(p, X) ** 2))(params)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
            history.append(params)
        return history

    wanted = run(jax.jit(half))
    assert_same_leaves(run(graphed), wanted)
    assert not np.array_equal(run(jax.jit(half.__wrapped__))[0]["a"], wanted[0]["a"])


def test_g27_without_parameters_in_16_bits() -> None:
    @tg.amp.autocast(jnp.bfloat16)
    def product(x: Any) -> Any:
        return x @ x.T

    graphed, twin = tg.make_graphed_callables(product, (X,)), jax.jit(product)
    assert_same_leaves(graphed(X), twin(X))
    gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(X) for f in (graphed, twin)]
    assert_same_leaves(*gradients)
