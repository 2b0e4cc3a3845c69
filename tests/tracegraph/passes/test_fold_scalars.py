"""Scalars of literals, and functions with derivatives of their own: what rules see instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.ir.graph import Graph, Literal
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.passes.fold_scalars import FoldScalars
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.replacements.rules import open_graph
from tracegraph.tracing.trace import trace_function

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def build(function: Any, *args: Any) -> Graph:
    return run_passes(trace_function(function, args, {}, name="f").graph, DEFAULT_PASSES)[0]


def name_ops(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("function", [lambda x: x.var(-1), lambda x: x.std(ddof=1), jnp.var])
def test_a_variance_has_no_choice_left(function: Any) -> None:
    graph = build(function, X)
    assert "select_n" in name_ops(graph)
    opened = open_graph(graph)
    verify_graph(opened)
    assert not {"select_n", "gt"} & {*name_ops(opened)}
    np.testing.assert_array_equal(evaluate_graph(opened, X)[0], evaluate_graph(graph, X)[0])


def test_what_a_scalar_is_keeps_its_type() -> None:
    def function(x: Any) -> Any:
        weak = jax.lax.convert_element_type(3, jnp.bfloat16) * jnp.bfloat16(0.5)
        return x * weak, weak + 1, jnp.int32(7) // 2

    graph = build(function, X.astype(jnp.bfloat16))
    folded = FoldScalars().apply(graph)
    verify_graph(folded)
    kinds = [str(each.aval.dtype) for each in folded.outputs]
    assert kinds == [str(each.aval.dtype) for each in graph.outputs]
    assert any(isinstance(each, Literal) for each in folded.outputs)
    for one, other in zip(
        evaluate_graph(folded, X.astype(jnp.bfloat16)),
        evaluate_graph(graph, X.astype(jnp.bfloat16)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_choice_of_a_value_and_an_effect_stay() -> None:
    def function(x: Any) -> Any:
        jax.debug.callback(print, 1 + 1)
        return jnp.where(x > 0, x, 0.0)

    graph = build(function, X)
    kept = name_ops(FoldScalars().apply(graph))
    assert {"debug_callback", "select_n", "gt"} <= {*kept}


def test_a_key_of_a_literal_is_no_literal() -> None:
    """No array of NumPy holds one; what is computed from it stays, too."""
    graph = build(lambda x: x + jax.random.uniform(jax.random.key(3), x.shape), X)
    folded = FoldScalars().apply(graph)
    verify_graph(folded)
    assert "random_bits" in " ".join(name_ops(folded))
    np.testing.assert_array_equal(evaluate_graph(folded, X)[0], evaluate_graph(graph, X)[0])


def test_functions_with_derivatives_are_opened_only_where_asked() -> None:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x + x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g * 2,))
    graph = build(lambda x: double(jax.nn.relu(x)), X)
    assert name_ops(InlineCalls().apply(graph)) == name_ops(graph)
    opened = open_graph(graph)
    verify_graph(opened)
    assert name_ops(opened) == ["max", "add"]
    np.testing.assert_array_equal(evaluate_graph(opened, X)[0], 2 * np.maximum(X, 0))
