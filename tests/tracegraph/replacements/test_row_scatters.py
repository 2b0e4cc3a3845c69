"""Scatters of one value per row: which are found, and that what replaces them has their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.tracegraph.replacements.few_rows.test_rule import build, evaluate
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import row_scatters
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.replacements.rules import RULES
from tracegraph.replacements.splice import splice_matches

SHAPE = (3, 4, 12)
# Out of bounds at either end, counted from the end, twice the same.
PICKS = np.array([[0, 11, 5, 5], [-1, 3, 12, 40], [-12, -13, 2, 7]], np.int32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scatters, "MIN_ELEMENTS", 0)


def take(logits: Any, picks: Any) -> Any:
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), picks[..., None], -1)
    return -taken.astype(jnp.float32).mean()


def take_rows(logits: Any, picks: Any) -> Any:
    flat = jax.nn.log_softmax(logits.reshape(-1, SHAPE[-1]))
    return -flat[jnp.arange(flat.shape[0]), picks.ravel()].astype(jnp.float32).sum()


def take_first_axis(logits: Any, picks: Any) -> Any:
    return (jnp.take_along_axis(logits.transpose(2, 0, 1), picks[None], 0) ** 2).sum()


def take_clipped(logits: Any, picks: Any) -> Any:
    return (jnp.take_along_axis(logits, picks[..., None], -1, mode="clip") ** 2).sum()


def take_windows(logits: Any, picks: Any) -> Any:
    # A place of each row of the first axis, and all of the second axis.
    return (logits[jnp.arange(3), :, picks[:, 0]] ** 2).sum()


GRADIENTS = [take, take_rows, take_first_axis, take_clipped, take_windows]


def add(logits: Any, picks: Any) -> Any:
    """To what is there already, also a zero with a sign."""
    first, second = jnp.arange(3)[:, None], jnp.arange(4)
    signed = jnp.where(logits > 0, logits, -0.0)
    return signed.at[first, second, picks].add(-0.0 * logits[..., 0], mode="drop")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{each.__name__: jax.grad(each) for each in GRADIENTS},
    "add": add,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_replaces_a_scatter_has_its_bits(name: str, dtype: Any) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), dtype)
    graph = build(FUNCTIONS[name], logits, jnp.asarray(PICKS))
    (match,) = RowScatters().find(graph, None)
    replaced = splice_matches(graph, [match])
    verify_graph(replaced)
    assert not [op for op in replaced.ops if op.name == "scatter-add"]
    args = logits, jnp.asarray(PICKS)
    known, again = evaluate(graph, args), evaluate(replaced, args)
    (wanted,), (found,) = (
        [values[each] for each in one.outputs]
        for one, values in ((graph, known), (replaced, again))
    )
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), strict=True)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    (right,) = match.reference(*[known[each] for each in match.inputs])
    assert right.dtype == jnp.float32
    assert np.abs(np.asarray(right) - np.asarray(known[match.results[0]], np.float32)).max() < 0.02


def embed(table: Any, picks: Any) -> Any:
    return (table[0][picks % 4] ** 2).sum()


def take_three(logits: Any, picks: Any) -> Any:
    return (jnp.take_along_axis(logits, picks[..., :3][:, None], -1) ** 2).sum()


def take_shuffled(logits: Any, picks: Any) -> Any:
    # Two picks may be of one row.
    return (logits[picks[:, 0] % 3, 0, picks[:, 1]] ** 2).sum()


def take_part(logits: Any, picks: Any) -> Any:
    return (logits[jnp.arange(2), 0, picks[:2, 0]] ** 2).sum()


@pytest.mark.parametrize(
    "function", [embed, take_three, take_shuffled, take_part], ids=lambda each: each.__name__
)
def test_rows_with_several_values_or_none_stay_scatters(function: Any) -> None:
    logits = jnp.ones(SHAPE)
    graph = build(jax.grad(function), logits, jnp.asarray(PICKS))
    assert [op for op in graph.ops if op.name == "scatter-add"]
    assert RowScatters().find(graph, None) == []


def test_small_arrays_and_integers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(picks: Any) -> Any:
        return jnp.zeros((4, 12), jnp.int32).at[jnp.arange(4), picks[0]].add(1)

    assert RowScatters().find(build(count, jnp.asarray(PICKS)), None) == []
    monkeypatch.setattr(row_scatters, "MIN_ELEMENTS", 1 << 16)
    graph = build(jax.grad(take), jnp.ones(SHAPE), jnp.asarray(PICKS))
    assert RowScatters().find(graph, None) == []


def test_sixteen_bits_of_a_loss_are_one_choice_and_no_sum() -> None:
    """The rule for sums comes after this one."""
    graph = build(jax.grad(take), jnp.ones(SHAPE, jnp.bfloat16), jnp.asarray(PICKS))
    for rule in RULES:
        found = rule.find(graph, None)
        assert bool(found) == isinstance(rule, RowScatters)
        graph = splice_matches(graph, found)


def test_a_place_counted_by_another_axis_is_another_row() -> None:
    """The first index counts the rows of the second axis."""

    def cross(table: Any, picks: Any, updates: Any) -> Any:
        numbers = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
        indices = jnp.stack([picks, jnp.arange(4)], -1)
        return lax.scatter_add(table, indices, updates, numbers, mode="drop")

    args = jnp.ones((12, 4)), jnp.asarray(PICKS[1]), jnp.arange(4.0) + 1
    graph = build(cross, *args)
    (match,) = RowScatters().find(graph, None)
    known = evaluate(graph, args)
    (found,) = match.compute(*[known[each] for each in match.inputs])
    np.testing.assert_array_equal(found, cross(*args))
