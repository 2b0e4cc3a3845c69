"""What JAX writes with one op is what rules know as several, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.tracegraph.replacements.attention.test_whole_rows import (
    attend_joined,
    differentiate,
    find,
)
from tests.tracegraph.replacements.attention.ways import draw
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.rules import open_graph
from tracegraph.replacements.spelled_out import _SPELLED
from tracegraph.tracing.trace import trace_function

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def take_apart(x: Any) -> Any:
    one, other, third = lax.unstack(x, axis=1)
    return one - other, third


def put_together(x: Any) -> Any:
    return lax.stack([x, -x, 2 * x], axis=2), lax.stack([x[0, 0], x[1, 2]])


def repeat(x: Any) -> Any:
    return lax.tile(x, [1, 3, 2]), lax.tile(x[0, 0], [2])


def nest(x: Any) -> Any:
    return lax.stack(lax.unstack(jax.jit(lambda y: lax.stack([y, y]))(x)), axis=1)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (take_apart, {"slice", "squeeze"}),
        (put_together, {"concatenate"}),
        (repeat, {"broadcast_in_dim", "reshape"}),
        (nest, {"concatenate", "slice", "squeeze"}),
    ],
)
def test_values_stay_as_they_are(function: Any, names: set[str]) -> None:
    graph = trace_function(function, (X,), {}, name="f").graph
    opened = open_graph(graph)
    assert {op.name for op in opened.ops}.isdisjoint(_SPELLED)
    verify_graph(opened)
    assert names <= {op.name for op in opened.ops}
    found = evaluate_graph(opened, X)
    for one, right in zip(found, jax.tree.leaves(jax.jit(function)(X)), strict=True):
        np.testing.assert_array_equal(one, right)


def test_keys_are_taken_apart_and_put_together() -> None:
    def draw_two(key: Any) -> Any:
        one, other = lax.unstack(lax.stack([key, jax.random.fold_in(key, 1)]))
        return jax.random.uniform(one), jax.random.uniform(other)

    key = jax.random.key(3)
    opened = open_graph(trace_function(draw_two, (key,), {}, name="f").graph)
    verify_graph(opened)
    assert {op.name for op in opened.ops}.isdisjoint(_SPELLED)
    assert evaluate_graph(opened, key) == jax.jit(draw_two)(key)


def test_a_graph_without_them_is_left_alone() -> None:
    graph = trace_function(lambda x: x + 1, (X,), {}, name="f").graph
    assert open_graph(graph).ops == graph.ops


def test_queries_keys_and_values_that_are_taken_apart_are_found() -> None:
    args = draw(2, 32, 32, dtype=jnp.bfloat16), draw(32, 96, dtype=jnp.bfloat16, seed=1)
    _, (backward, _) = find(differentiate(attend_joined, (0, 1)), *args)
    # Gradients of all three are written side by side.
    assert len(backward.results) == 1
