"""Which ops are known to become work that no graph on a GPU holds, and which a refusal names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tracegraph as tg
from tracegraph.capturing.partition import find_marked_op, list_region_ops
from tracegraph.capturing.unlowered import find_refused, find_unlowered
from tracegraph.ir.graph import Graph
from tracegraph.runtime.errors import RefusedWork

X = jnp.ones((4, 4))


def seed(x: Any) -> Any:
    """Returns numbers that XLA draws with a seed of its own."""
    return lax.rng_uniform(0.0, 1.0, x.shape)


def trace(function: Any) -> Graph:
    captured: Any = tg.capture(function, mode="partial")
    return captured.trace(X).graph


def list_names(function: Any) -> list[str]:
    graph = trace(function)
    return [graph.ops[index].name for index in find_unlowered(graph)]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: jnp.abs(seed(x)) + 1, ["rng_uniform"]),
        (lambda x: jnp.linalg.solve(x, x), []),
        (lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), []),
        (lambda x: jnp.linalg.cholesky(x), []),
        (lambda x: lax.scan(lambda c, y: (c + y, y), x[0], x), []),
        (lambda x: lax.map(seed, x[None]), ["scan"]),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: c * jnp.linalg.cholesky(x), x), []),
        (lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"), []),
        (lambda x: lax.fori_loop(0, 1, lambda i, c: c * seed(c), x), ["scan"]),
        (lambda x: lax.fori_loop(0, 1, lambda i, c: c * i, x), []),
        (lambda x: lax.scan(lambda c, y: (c + y, y), x[0], x, unroll=True), []),
        (lambda x: jnp.linalg.cholesky(x[:0, :0]), []),
        (lambda x: jnp.sort(x) @ x, []),
    ],
)
def test_ops_are_known_by_name(function: Any, names: list[str]) -> None:
    assert list_names(function) == names


def test_the_reason_names_the_inner_op_and_the_line() -> None:
    graph = trace(lambda x: jax.checkpoint(lambda y: seed(y) * y)(x))
    (violation,) = find_unlowered(graph).values()
    assert violation.rule == "unsupported"
    name = graph.ops[0].name
    assert violation.what == (
        f"`rng_uniform` inside `{name}` becomes work that no graph on a GPU holds yet: rng_seed"
    )
    assert violation.where.startswith("tests/tracegraph/capturing/test_unlowered.py:")


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("jit(region0)/tracegraph_op12/sin", 12),
        ("tracegraph_op3", 3),
        ("jit(region0)/tracegraph_op7/while/body/tracegraph_op9", 7),
        ("jit(region0)/sin", None),
        ("jit(region0)/my_tracegraph_op12/sin", None),
        ("jit(region0)/tracegraph_op12x/sin", None),
        ("", None),
    ],
)
def test_marks_are_read(path: str, index: int | None) -> None:
    assert find_marked_op(path) == index


def find(graph: Graph, *refused: RefusedWork, cut: tuple[int, ...] = (), is_precise: bool = True):
    return find_refused(graph, refused, cut, is_precise=is_precise)


def test_a_refusal_that_names_its_op_cuts_this_op() -> None:
    graph = trace(lambda x: jnp.sin(x * 2) + 1)
    sine = RefusedWork("region0", "sine", "calls it", "jit(region0)/tracegraph_op1/sin")
    other = RefusedWork("region0", "odd")
    assert list(find(graph, sine)) == [1]
    assert list(find(graph, other, sine)) == [1]
    assert sorted(find(graph, sine, is_precise=False)) == [0, 1, 2]
    assert sorted(find(graph, other)) == [0, 1, 2]
    reasons = [each.what for each in find(graph, other, sine, is_precise=False).values()]
    assert "`mul` is in one region with work that no graph on a GPU holds yet: odd" in reasons
    assert "`sin` becomes work that no graph on a GPU holds yet: sine" in reasons


def test_only_the_refused_region_is_cut() -> None:
    graph = trace(lambda x: jnp.sin(jnp.cos(x) * 2) + 1)
    assert list_region_ops(graph, [1]) == {"region0": [0], "region1": [1], "region2": [2, 3]}
    assert sorted(find(graph, RefusedWork("region2", "odd"), cut=(1,))) == [2, 3]


@pytest.mark.parametrize(
    "work",
    [
        RefusedWork("region7", "odd"),
        RefusedWork("region7", "odd", "", "jit(region0)/tracegraph_op99/sin"),
        RefusedWork("region7", "odd", "", "jit(region0)/tracegraph_op0/cos"),
    ],
)
def test_a_refusal_that_lies_in_no_op_cuts_nothing(work: RefusedWork) -> None:
    assert find(trace(jnp.cos), work, cut=(0,)) == {}


def test_neighbours_make_one_eager_region() -> None:
    graph = trace(lambda x: jnp.sin(jnp.cos(x) * 2) + 1)
    assert list_region_ops(graph, [1, 2]) == {"region0": [0], "region1": [1, 2], "region2": [3]}
