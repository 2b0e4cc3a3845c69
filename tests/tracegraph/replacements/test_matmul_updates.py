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


BF16 = jnp.bfloat16


def descend_in_halves(w: Any, x: Any, g: Any) -> Any:
    compute = jax.grad(lambda w: ((x.astype(BF16) @ w) * g.astype(BF16)).sum())
    return w - 0.1 * compute(w.astype(BF16)).astype(jnp.float32)


def add_as_optax_does(w: Any, x: Any, g: Any) -> Any:
    compute = jax.grad(lambda w: ((x.astype(BF16) @ w.astype(BF16)) * g.astype(BF16)).sum())
    return jnp.asarray(w + -0.1 * compute(w)).astype(w.dtype)


def descend_on_a_tied_table(table: Any, x: Any, g: Any) -> Any:
    tokens = jnp.array([1, 5, 1, -1, 9], jnp.int32)

    def compute_loss(table: Any) -> Any:
        hidden = table[tokens] @ g.astype(BF16).T
        return (jnp.tanh(hidden @ x[:, :5].astype(BF16)) @ table.T).astype(jnp.float32).var()

    gradient = jax.grad(compute_loss)(table.T.astype(BF16).T)
    return table - 0.1 * gradient.astype(jnp.float32)


@pytest.mark.parametrize("function", [descend_in_halves, add_as_optax_does])
def test_gradients_of_16_bits_are_not_rounded(function: Any) -> None:
    graph = build(function, W, X, G)
    (match,) = MatmulUpdates().find(graph, GPU)
    replaced = splice_matches(graph, [match])
    verify_graph(replaced)
    (matmul,) = [op for op in replaced.ops if op.name == "dot_general"]
    # Its result is that of the update, in its order: XLA takes nothing in behind a transposition.
    assert (matmul.results[0].shape, matmul.results[0].dtype) == (W.shape, jnp.float32)
    assert [op.name for op in replaced.ops][-2:] == ["mul", "add"]
    check_errors(graph, match, (W, X, G))


def test_a_scatter_that_is_added_goes_to_the_updated_table() -> None:
    table = RNG.normal(size=(10, 5)).astype(np.float32)
    graph = build(descend_on_a_tied_table, table, X, RNG.normal(size=(3, 5)).astype(np.float32))
    (match,) = MatmulUpdates().find(graph, GPU)
    replaced = splice_matches(graph, [match])
    verify_graph(replaced)
    (scatter,) = [op for op in replaced.ops if op.name == "scatter-add"]
    assert {each.aval.dtype for each in scatter.operands[::2]} == {np.dtype(np.float32)}
    assert replaced.outputs == scatter.results
    check_errors(graph, match, (table, X, np.ones((3, 5), np.float32)))


def check_errors(graph: Any, match: Any, args: Any) -> None:
    """Asserts that a match is less than half as far from its reference as what it replaces."""
    values = evaluate(graph, args)
    given = [values[each] for each in match.inputs]
    right = np.asarray(*match.reference(*given))
    ours, theirs = (
        np.abs(np.asarray(each) - right).max()
        for each in (*match.compute(*given), values[match.results[0]])
    )
    assert ours < theirs / 2


def list_factors(graph: Any) -> list[float]:
    updates: list[Any] = [match.compute for match in MatmulUpdates().find(graph, GPU)]
    return [update.chain.factor for update in updates]


def test_factors_of_matrices_of_one_shape_differ_in_their_last_bits() -> None:
    def descend(weights: Any, x: Any, g: Any) -> Any:
        return [descend_in_halves(each, x, n * g) for n, each in enumerate(weights, start=1)]

    graph = build(descend, [W] * 5, X, G)
    factors = list_factors(graph)
    bits = [int(np.float32(each).view(np.int32)) for each in factors]
    middle = int(np.float32(-0.1).view(np.int32))
    assert [each - middle for each in bits] == [0, 1, -1, 2, -2]
    plain = build(lambda w, v, x, g: (w - 0.1 * (x.T @ g), v - 0.1 * (x.T @ (2 * g))), W, W, X, G)
    assert set(list_factors(plain)) == {factors[0]}


@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-38, float("inf"), float("nan")])
def test_a_factor_at_the_ends_of_its_type_stays(factor: float) -> None:
    for number in range(4):
        np.testing.assert_equal(matmul_updates._move(factor, number), factor)


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
    "added to a scatter that adds to others": lambda w, x, g: (
        w - 0.1 * ((x.T @ g).astype(BF16).at[0].add(g[0].astype(BF16)) + w.astype(BF16))
    ),
    "narrowed": lambda w, x, g: w.astype(BF16) - BF16(0.1) * (x.T @ g).astype(BF16),
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
