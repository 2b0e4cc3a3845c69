"""Fusions along rows in models as users write them; the kernels run on this machine's threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.kernels_on_host import call_on_host
from tests.tracegraph.replacements.few_rows.test_rule import GPU, build, draw, evaluate
from tests.tracegraph.replacements.row_fusions.ways import (
    LOSSES,
    NORMS,
    run_activation,
    run_loss,
    run_norm,
)
from tracegraph.ir.graph import Graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import row_scatters
from tracegraph.replacements.match import Match
from tracegraph.replacements.row_fusions import rule
from tracegraph.replacements.row_fusions.rule import RowFusions
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.replacements.rules import RULES, RULES_IN_BODIES, find_matches
from tracegraph.replacements.splice import splice_matches

SEQUENCES, LENGTH, WIDTH, WORDS = 3, 7, 64, 1032
ROWS = SEQUENCES, LENGTH
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(rule, "MIN_ROWS", 16)
    monkeypatch.setattr(row_scatters, "MIN_ELEMENTS", 0)


def run(match: Match, given: Any) -> Any:
    """Returns what the kernel of a match computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "call_kernel", call_on_host)
        return match.compute(*map(np.asarray, given))


def find(function: Any, *args: Any) -> tuple[Graph, list[Match]]:
    graph = build(function, *args)
    verify_graph(splice_matches(graph, found := RowFusions().find(graph, GPU)))
    return graph, found


def check(graph: Graph, found: list[Match], args: Any) -> None:
    """Asserts that no result is less exact than its type, or than what it replaces."""
    values = evaluate(graph, args)
    for match in found:
        given = [values[each] for each in match.inputs]
        results = run(match, given)
        for result, right, value in zip(
            results, match.reference(*given), match.results, strict=True
        ):
            assert (result.shape, result.dtype) == (value.shape, value.dtype)
            right = np.asarray(right, np.float64)
            ours, theirs = (
                np.abs(np.asarray(each, np.float64) - right).max()
                for each in (result, values[value])
            )
            scale = np.abs(right).max() * float(jnp.finfo(value.dtype).eps)
            assert ours <= max(theirs, scale * (0.5 if value.dtype.itemsize == 2 else 16))


def count_steps(found: list[Match]) -> list[tuple[int, int]]:
    """Returns how many arrays of rows each kernel stores, and how many sums of columns."""
    calls: list[Any] = [each.compute for each in found]
    return [(len(call.stored), len(call.sums)) for call in calls]


@pytest.mark.parametrize(("name", "dtype"), [*((name, BF16) for name in NORMS), ("by hand", F32)])
def test_a_norm_is_one_kernel_forward_and_one_backward(name: str, dtype: Any) -> None:
    def make(*shape: int) -> Any:
        return draw(*shape, dtype=dtype, seed=len(shape))

    x, added, way = make(*ROWS, WIDTH), make(*ROWS, WIDTH) + 1, make(*ROWS, WIDTH) - 1
    args = x, added, 1 + make(WIDTH), make(WIDTH), make(WIDTH, WIDTH), way
    graph, found = find(run_norm(NORMS[name]), *args)
    # The sum with the residual is stored for the backward pass, means and factors are not.
    assert count_steps(found) == [(2, 0), (1, 2)]
    forward, backward = found
    assert set(backward.inputs) >= {forward.results[0]}
    assert len([each for each in backward.inputs if each.aval.shape == (*ROWS, WIDTH)]) == 3
    check(graph, found, args)


@pytest.mark.parametrize(("name", "dtype"), [*((name, BF16) for name in LOSSES), ("pick", F32)])
def test_a_loss_and_its_gradient_are_one_kernel(name: str, dtype: Any) -> None:
    hidden, table = draw(*ROWS, WIDTH, dtype=dtype), draw(WIDTH, WORDS, dtype=dtype)
    targets = np.random.default_rng(0).integers(-WORDS, WORDS, ROWS).astype(np.int32)
    if name == "one hot":
        targets = targets % WORDS
    args = hidden, table, targets
    plain = build(run_loss(LOSSES[name]), *args)
    graph = splice_matches(plain, RowScatters().find(plain, GPU))
    (match,) = found = RowFusions().find(graph, GPU)
    verify_graph(splice_matches(graph, found))
    assert count_steps(found) == [(2, 0)]
    assert [each.aval.shape for each in match.inputs if each.aval.size > 64] == [(*ROWS, WORDS)]
    check(graph, found, args)


ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "tanh": jnp.tanh}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_computed_again_in_the_backward_pass(name: str) -> None:
    args = draw(*ROWS, WIDTH), draw(WIDTH, 72), draw(72), draw(72, WIDTH)
    graph, found = find(run_activation(ACTIVATIONS[name]), *args)
    # Neither its derivative nor the matmul with its bias is stored; the bias has a gradient.
    assert count_steps(found) == [(1, 0), (1, 1)]
    check(graph, found, args)


def test_without_16_bits_an_activation_forward_stays() -> None:
    args = [each.astype(F32) for each in (draw(*ROWS, 64), draw(64, 72), draw(72), draw(72, 64))]
    graph, found = find(run_activation(jnp.tanh), *args)
    assert count_steps(found) == [(1, 1)]
    check(graph, found, args)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_indices_out_of_bounds_are_what_jax_makes_of_them(mode: str) -> None:
    def compute(x: Any, targets: Any) -> Any:
        shares = jax.nn.softmax(x)
        return shares, jnp.take_along_axis(shares, targets[..., None], axis=-1, mode=mode)

    x = draw(*ROWS, 72, dtype=F32)
    targets = np.resize(np.array([0, -1, 71, 72, -73, 2000, -2000], np.int32), ROWS)
    graph, (match,) = find(compute, x, targets)
    assert count_steps([match]) == [(2, 0)]
    given = [evaluate(graph, (x, targets))[each] for each in match.inputs]
    _, picked = run(match, given)
    np.testing.assert_allclose(picked, compute(x, targets)[1], rtol=1e-5)


def test_weights_are_rounded_where_the_program_rounds_them() -> None:
    def compute(x: Any, gain: Any) -> Any:
        return x / x.sum(-1, keepdims=True) * gain.astype(BF16)

    x, gain = jnp.ones((*ROWS, 64), BF16), np.full(64, 1.00390625 * 64, np.float32)
    graph, (match,) = find(compute, x, gain)
    # It is read as it is stored: no kernel rounds it first.
    assert set(match.inputs) == set(graph.inputs)
    (result,) = run(match, (x, gain))
    assert set(np.asarray(result, np.float32).ravel()) == {1.0}


def test_rows_of_a_table_are_read_where_they_are() -> None:
    def compute(table: Any, tokens: Any, places: Any) -> Any:
        return jax.nn.softmax(table[tokens] + places)

    args = draw(40, 64), np.arange(21, dtype=np.int32).reshape(ROWS), draw(LENGTH, 64)
    graph, (match,) = find(compute, *args)
    # A position has its place in the same vector for all sequences.
    assert (1, LENGTH, 64) in [each.aval.shape for each in match.inputs]
    check(graph, [match], args)


def test_two_regions_may_read_what_a_third_one_stores() -> None:
    def compute(x: Any, y: Any, one: Any, other: Any) -> Any:
        total = x + y
        shares = jax.nn.softmax(total)
        return jax.nn.softmax(shares @ one + total), jax.nn.softmax(shares @ other - total)

    args = draw(*ROWS, 64), draw(*ROWS, 64, seed=1), draw(64, 64), draw(64, 64, seed=1)
    graph, found = find(compute, *args)
    assert count_steps(found) == [(2, 0), (2, 0)]
    assert found[0].results[0] in found[1].inputs
    check(graph, found, args)


def test_what_a_later_kernel_computes_again_is_no_kernel() -> None:
    def compute(x: Any, matrix: Any) -> Any:
        return jax.nn.softmax(x @ matrix - x.mean(-1, keepdims=True))

    args = draw(*ROWS, 64), draw(64, 64)
    graph, (match,) = find(compute, *args)
    assert set(match.results) == set(graph.outputs)
    assert graph.inputs[0] in match.inputs
    check(graph, [match], args)


def test_what_only_gets_another_shape_is_not_stored() -> None:
    def compute(x: Any) -> Any:
        y = x.reshape(*ROWS, 64)
        return jax.nn.softmax(y) + y, y, y.sum((0, 1))

    args = (draw(SEQUENCES * LENGTH, 64),)
    graph, found = find(compute, *args)
    assert count_steps(found) == [(1, 1)]
    check(graph, found, args)


def add_up_bias(x: Any) -> Any:
    """Returns a gradient as the next matmul wants it, and that of a bias."""
    y = x.reshape(*ROWS, 64)
    return y, y.sum((0, 1))


OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "along a middle axis": (lambda x: jax.nn.softmax(x, 1), (draw(32, 64, 8),)),
    "sums of columns alone": (lambda x: x.sum((0, 1)), (draw(*ROWS, 64),)),
    "sums of columns of another shape": (add_up_bias, (draw(SEQUENCES * LENGTH, 64),)),
    "rows of an odd length": (jax.nn.softmax, (draw(*ROWS, 68),)),
    "few rows": (jax.nn.softmax, (draw(8, 64),)),
    "short rows": (jax.nn.softmax, (draw(64, 56),)),
    "one pass": (lambda x, y: x * y + 1, (draw(*ROWS, 64), draw(*ROWS, 64))),
    "one sum of each row": (lambda x: x.sum(-1) + 1, (draw(*ROWS, 64),)),
    "integers": (lambda x: x - x.sum(-1, keepdims=True), (np.ones((*ROWS, 64), np.int32),)),
    "a sine": (lambda x: jnp.sin(x) / jnp.sin(x).sum(-1, keepdims=True), (draw(*ROWS, 64),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_work_stays(name: str) -> None:
    function, args = OTHERS[name]
    found = find(function, *args)[1]
    if name == "a sine":
        # XLA computes the sine, and the kernel what comes behind it.
        (match,) = found
        assert [each.aval.shape for each in match.inputs] == [(*ROWS, 64)]
        return
    assert found == []


def test_small_arrays_other_machines_and_the_host_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, found = find(jax.nn.softmax, draw(*ROWS, 64))
    assert len(found) == 1
    assert RowFusions().find(graph, None) == []
    assert RowFusions().find(graph, dataclasses.replace(GPU, architecture="8.0")) == []
    for name, bound in (("MIN_ELEMENTS", 21 * 64 + 1), ("MAX_ELEMENTS", 21 * 64 - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(rule, name, bound)
            assert RowFusions().find(graph, GPU) == []


def test_it_is_one_of_the_rules_and_looks_into_loops() -> None:
    assert RowFusions() in RULES
    assert RowFusions().name in RULES_IN_BODIES

    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jax.nn.softmax(x), None), x, None, length=3)[0]

    (match,) = find_matches(RowFusions(), build(scan, draw(*ROWS, 64)), GPU)
    assert [each.op.name for each in match.path] == ["scan"]
