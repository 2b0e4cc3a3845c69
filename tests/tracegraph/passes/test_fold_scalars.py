"""Scalars of literals, and functions with derivatives of their own: what rules see instead."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tracegraph.ir.graph import Graph, Literal
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.passes import fold_scalars
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


NUMBERS = (0.0, -0.0, 1.0, 3.0, 0.1, 65504.0, -7.5, float("inf"), float("nan"), 1e-20)
FLOATS = ("float16", "bfloat16", "float32")
UNARY = (lax.neg, lax.sqrt, lambda a: a.astype(jnp.float32), lambda a: a.astype(jnp.float16))
BINARY = (lax.add, lax.sub, lax.mul, lax.div, lax.lt, lax.ge, lax.eq, lax.ne)
WHOLE = (lax.add, lax.sub, lax.mul, lax.le, lax.gt, lax.bitwise_and, lax.bitwise_or)


def fold(function: Any) -> list[Any]:
    """Returns the literals that results become."""
    folded = FoldScalars().apply(build(lambda x: (x, *function()), X))
    assert folded.ops == ()
    return [each.value for each in folded.outputs[1:] if isinstance(each, Literal)]


def check_folded(functions: Any, dtype: str, numbers: Any, arity: int) -> None:
    """Compares literals with what XLA makes of constants: equal bits, or two NaNs."""
    pairs = list(itertools.product(numbers, repeat=arity))

    def compute() -> list[Any]:
        return [f(*[np.array(n, dtype) for n in pair]) for f in functions for pair in pairs]

    found, wanted = fold(compute), jax.device_get(jax.jit(compute)())
    assert len(found) == len(wanted) == len(functions) * len(pairs)
    for one, other in zip(found, wanted, strict=True):
        ours = np.asarray(one, other.dtype)
        assert ours.tobytes() == other.tobytes() or (ours != ours and other != other)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that XLA computes."""
    names: list[str] = []
    bind = fold_scalars.bind_op
    monkeypatch.setattr(
        fold_scalars, "bind_op", lambda op, a: (names.append(op.name), bind(op, a))[1]
    )
    return names


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_folded_to_the_bits_of_xla_without_it(dtype: str, bound: list[str]) -> None:
    check_folded(UNARY, dtype, [n for n in NUMBERS if n >= 0], 1)
    binary = BINARY if dtype != "float32" else (*BINARY, lax.nextafter)
    check_folded(binary, dtype, [n for n in NUMBERS if n == n], 2)
    assert bound == []


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "bool"])
def test_integers_are_folded_to_the_bits_of_xla_without_it(dtype: str, bound: list[str]) -> None:
    is_bool = dtype == "bool"
    largest = 1 if is_bool else int(np.iinfo(dtype).max)
    check_folded(WHOLE[-2:] if is_bool else WHOLE, dtype, (0, 1, largest), 2)
    casts = [lambda a, to=to: a.astype(to) for to in ("int16", "float32", "bool")]
    check_folded([lax.bitwise_not, *casts], dtype, (0, 1, largest), 1)
    assert bound == []


def test_what_numpy_may_round_otherwise_is_left_to_xla(bound: list[str]) -> None:
    numbers = [np.float32(0.3), np.float32(2.7), np.int32(7)]

    def compute() -> list[Any]:
        a, b, c = map(np.asarray, numbers)
        return [
            lax.exp(a),
            lax.pow(a, b),
            lax.div(c, np.int32(2)),
            lax.convert_element_type(lax.neg(b), "int32"),
        ]

    np.testing.assert_allclose(fold(compute), jax.device_get(jax.jit(compute)()), rtol=3e-7)
    assert bound == ["exp", "pow", "div", "convert_element_type"]


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
