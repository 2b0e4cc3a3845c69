"""Closed-over arrays are embedded as `jax.jit` embeds them: results are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_python
from tracegraph.capturing import partition

X = jnp.linspace(-1.0, 1.0, 40)
W = jnp.sin(jnp.arange(40.0)) * 1.7
V = np.cos(np.arange(40)).astype(np.float32)
SCALE = jnp.float32(3.3)
KEY = jax.random.key(5)


def fold(x: jax.Array) -> tuple[jax.Array, ...]:
    """What XLA folds is computed otherwise than what it computes from inputs."""
    return (
        jnp.sum(jnp.exp(W) * jax.nn.gelu(V) * x) / jnp.sqrt(jnp.sum(W * V * x) ** 2 + SCALE),
        jax.nn.softmax(W * V) * x,
        jnp.abs(jnp.tanh(W)) ** 3.7 * jax.lax.erf(V),
    )


def fold_on_two_streams(x: jax.Array) -> tuple[jax.Array, ...]:
    """Two regions that close over the same array."""
    side = tg.Stream()
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        y = jnp.exp(jnp.tanh(W)) * x
    tg.current_stream().wait_stream(side)
    return y, jax.nn.softmax(W) + x


def draw(x: jax.Array) -> jax.Array:
    return x + jax.random.normal(KEY, x.shape)


def have_same_bytes(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("function", [fold, fold_on_two_streams, draw])
def test_results_are_those_of_jit_bit_for_bit(function: Callable[..., Any]):
    wanted = jax.jit(function)(X)
    captured = tg.capture(function)
    for _ in range(3):
        assert have_same_bytes(captured(X), wanted)


def test_as_inputs_they_would_not_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partition, "LARGE_CONSTANT_BYTES", 1)
    assert not have_same_bytes(tg.capture(fold)(X), jax.jit(fold)(X))


ARRAYS_ARE_INPUTS = """
import jax, tracegraph as tg
from tests.public.functions.test_closed_over import X, fold, have_same_bytes

captured = tg.capture(fold)
assert have_same_bytes(captured(X), jax.jit(fold)(X))
assert "%c1  closed over" in captured.explain(X)
"""


def test_where_jit_makes_inputs_of_them_so_does_a_capture():
    # JAX reads this option once.
    variables = {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    found = run_python(["-c", ARRAYS_ARE_INPUTS], variables=variables)
    assert found.returncode == 0, found.stderr


def test_a_large_one_is_an_input_and_explain_says_what_may_differ():
    table = jnp.ones(2**18)
    captured = tg.capture(lambda x: x + table[:40])
    assert have_same_bytes(captured(X), X + 1)
    assert "the last bits of results may differ" in captured.explain(X).show("notes")
    assert "closed over" in captured.explain(X)
    assert "closed over" not in tg.capture(fold).explain(X)
