"""Updates in matmuls: which differences are found, and what is computed instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tracegraph.replacements.few_rows.test_rule import GPU, build, evaluate
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import matmul_updates
from tracegraph.replacements.matmul_updates import MatmulUpdates
from tracegraph.replacements.rules import RULES
from tracegraph.replacements.splice import splice_matches

RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 5), (3, 6)))
G = RNG.normal(size=(3, 5)).astype(np.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_updates, "MIN_ELEMENTS", 0)


def descend(w: Any, x: Any, g: Any) -> Any:
    gradient = jax.grad(lambda w: ((x @ w) * g).sum())(w)
    return w - 0.1 * gradient


def scale_before(w: Any, x: Any, g: Any) -> Any:
    return w - (0.5 * (g.T @ x)).T


@pytest.mark.parametrize("function", [descend, scale_before])
def test_what_is_subtracted_is_added_with_its_factor_negated(function: Any) -> None:
    graph = build(function, W, X, G)
    (match,) = MatmulUpdates().find(graph, GPU)
    assert match.terms == 3
    replaced = splice_matches(graph, [match])
    verify_graph(replaced)
    names = [op.name for op in replaced.ops]
    assert "sub" not in names
    assert names[-1] == "add"
    wanted = [evaluate(graph, (W, X, G))[value] for value in graph.outputs]
    found = [evaluate(replaced, (W, X, G))[value] for value in replaced.outputs]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    (right,) = match.reference(*[evaluate(graph, (W, X, G))[each] for each in match.inputs])
    assert right.dtype == jnp.float32
    np.testing.assert_allclose(right, wanted[0], rtol=1e-6, atol=1e-7)


def test_an_operand_may_be_what_is_subtracted_from() -> None:
    square = np.eye(4, dtype=np.float32) * 3
    graph = build(lambda w: w - 0.5 * (w @ w), square)
    (match,) = MatmulUpdates().find(graph, GPU)
    (found,) = match.compute(*[evaluate(graph, (square,))[each] for each in match.inputs])
    np.testing.assert_allclose(found, square - 0.5 * square @ square)


def keep_product(w: Any, x: Any, g: Any) -> Any:
    product = x.T @ g
    return w - 0.1 * product, product


OTHERS = {
    "without a factor": lambda w, x, g: w - x.T @ g,
    "a factor that is computed": lambda w, x, g: w - x[0, 0] * (x.T @ g),
    "two factors around a sine": lambda w, x, g: w - 0.1 * jnp.sin(2 * (x.T @ g)),
    "the other side": lambda w, x, g: 0.1 * (x.T @ g) - w,
    "used elsewhere": keep_product,
    "added": lambda w, x, g: w + 0.1 * (x.T @ g),
    "no matmul": lambda w, x, g: w - 0.1 * w,
    "integers": lambda w, x, g: w.astype(int) - 2 * (x.astype(int).T @ g.astype(int)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_differences_stay(name: str) -> None:
    assert MatmulUpdates().find(build(OTHERS[name], W, X, G), GPU) == []


def test_small_results_and_the_host_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(descend, W, X, G)
    assert MatmulUpdates().find(graph, None) == []
    monkeypatch.setattr(matmul_updates, "MIN_ELEMENTS", W.size + 1)
    assert MatmulUpdates().find(graph, GPU) == []


def test_it_is_one_of_the_rules() -> None:
    assert MatmulUpdates() in RULES
