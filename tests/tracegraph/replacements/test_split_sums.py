"""Split sums: which matmuls of a graph XLA has made a batch of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tracegraph.replacements.few_rows.test_rule import build
from tracegraph.ir.graph import Graph
from tracegraph.replacements.match import Match
from tracegraph.replacements.place_errors import measure_options, measure_places
from tracegraph.replacements.split_sums import find_split_sums
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout

X, W = np.ones((6, 32), np.float32), np.ones((32, 4), np.float32)


@dataclasses.dataclass(frozen=True)
class Stage:
    nodes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Definition:
    stages: tuple[Stage, ...]


def make_node(rows: int, depth: int, columns: int, batch: int) -> MatmulNode:
    """A batch of matmuls as cublasLt gets it: operands exchanged, columns contiguous."""
    shapes = ((columns, depth), (depth, rows), (columns, rows))
    a, b, d = (
        MatrixLayout("float32", *shape, leading_stride=shape[0], batch_count=batch)
        for shape in shapes
    )
    return MatmulNode("custom-call", Matmul(a, b, d, d, 1.0, 0.0, "32F", "float32"), ())


def find(graph: Graph, *nodes: MatmulNode) -> list[Match]:
    definition: Any = Definition((Stage(()), Stage((object(), *nodes))))
    return find_split_sums(graph, definition)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_batch_of_shorter_sums_is_a_split_sum(batch: int) -> None:
    graph = build(lambda x, w: (x @ w, x + 1), X, W)
    (match,) = find(graph, make_node(6, 32 // batch, 4, batch))
    assert match.op.name == "dot_general"
    assert match.results == match.op.results
    assert match.terms == 32


@pytest.mark.parametrize(
    ("function", "arguments", "node"),
    [
        (jnp.matmul, (X, W), make_node(6, 32, 4, 1)),
        (jnp.matmul, (X, W), make_node(6, 16, 8, 2)),
        (jax.vmap(jnp.matmul), (np.ones((2, 6, 16)), np.ones((2, 16, 4))), make_node(6, 16, 4, 2)),
        (lambda x, w: x[:4, :4] + w[:4], (X, W), make_node(6, 16, 4, 2)),
    ],
    ids=["whole", "another", "a batch of the user", "no matmul"],
)
def test_other_matmuls_are_none(function: Any, arguments: Any, node: MatmulNode) -> None:
    assert find(build(function, *arguments), node) == []


def test_what_is_measured_is_the_matmul_itself() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=X.shape).astype(np.float32)
    graph = build(lambda x: (jnp.tanh(x) @ x.T) ** 2, x)
    (error,) = measure_places(graph, find(graph, make_node(6, 16, 6, 2)), [x])
    assert max(error.ours, error.theirs) <= error.rounding
    hidden = np.tanh(x.astype(np.float64)) @ x.T.astype(np.float64)
    unit = np.finfo(np.float32).eps / 2
    assert error.rounding == pytest.approx(np.abs(hidden).max() * unit * np.sqrt(32), rel=1e-5)


OPTION = ("xla_gpu_autotune_level", "0")


def test_options_are_measured_against_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    jit = jax.jit

    def note(function: Any, *, compiler_options: Any = None, keep_unused: bool = False) -> Any:
        if compiler_options is None:
            return jit(function, keep_unused=keep_unused)
        given.append(compiler_options)
        added = 0.25 if compiler_options else 0.125

        def compute(*given: Any) -> Any:
            *inputs, result = function(*given)
            return [*inputs, result + added]

        return jit(compute)

    graph = build(lambda x: x @ x.T, X)
    matches = find(graph, make_node(6, 16, 6, 2))
    monkeypatch.setattr(jax, "jit", note)
    (error,) = measure_options(graph, matches, [X], options=((), [OPTION]))
    assert given == [{}, dict([OPTION])]
    assert (error.ours, error.theirs) == pytest.approx((0.25, 0.125), rel=1e-4)
    assert not error.is_allowed
