"""Scattered sums in float32: which scatters are found, and what takes their place is more exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.ir.graph import Graph
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.replacements.scatter_sums import ScatterSums
from tracegraph.replacements.splice import splice_matches
from tracegraph.tracing.trace import trace_function

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(200, 4))
ROWS = RANDOM.normal(size=(20, 4))
# Some twice or more, some out of bounds at either end, one counted from the end.
INDICES = np.array([3, 3, 3, 7, 199, 200, 900, -1, -200, -201] * 2, np.int32)


def embed(table: Any, indices: Any, cotangent: Any) -> Any:
    return jax.vjp(lambda each: each[indices], table)[1](cotangent)[0]


def tied(table: Any, indices: Any, rows: Any) -> Any:
    # The gradient of a table that is used twice.
    return 2 * table + embed(jnp.zeros_like(table), indices, rows)


def add(mode: str | None) -> Callable[..., Any]:
    return lambda table, indices, rows: table.at[indices].add(rows, mode=mode)


def add_by_hand(table: Any, indices: Any, rows: Any) -> Any:
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(table, indices[:, None], rows, numbers, mode="fill")


FUNCTIONS = {
    "embed": embed,
    "tied": tied,
    "add": add(None),
    "clip": add("clip"),
    "drop": add("drop"),
    # Negative indices are out of bounds here.
    "by_hand": add_by_hand,
    "grid": lambda table, indices, rows: table.at[indices.reshape(4, 5)].add(
        rows.reshape(4, 5, 4), mode="drop"
    ),
    "elements": lambda table, indices, rows: table.at[indices, 1].add(rows[:, 0], mode="drop"),
    "columns": lambda table, indices, rows: table.at[:, indices % 4].add(rows[0, 0]),
    "windows": lambda table, indices, rows: table.at[indices, 1:3].add(rows[:, 1:3], mode="drop"),
}


def build(function: Any, *args: Any) -> Graph:
    return run_passes(trace_function(function, args, {}, name="f").graph, DEFAULT_PASSES)[0]


def replace(function: Any, *args: Any) -> Graph:
    graph = build(function, *args)
    replaced = splice_matches(graph, ScatterSums().find(graph, None))
    verify_graph(replaced)
    return replaced


def make_arguments(dtype: Any, rows: int = 200, index_type: Any = np.int32) -> list[Any]:
    table = jnp.asarray(TABLE[:rows], dtype)
    return [table, jnp.asarray(INDICES.astype(index_type)), jnp.asarray(ROWS, dtype)]


def measure(got: Any, wanted: Any) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [200, 40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_not_larger_than_those_of_xla(name: str, rows: int, dtype: Any) -> None:
    function = FUNCTIONS[name]
    args = make_arguments(dtype, rows)
    replaced = replace(function, *args)
    with jax.enable_x64(True):
        wide = [args[0].astype(jnp.float64), args[1], args[2].astype(jnp.float64)]
        wanted = np.asarray(function(*wide))
    ours, theirs = jax.jit(lambda *args: evaluate_graph(replaced, *args)[0])(*args), function(*args)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    rounding = float(jnp.finfo(dtype).eps) / 2 * np.max(np.abs(wanted))
    assert measure(ours, wanted) <= max(measure(theirs, wanted), rounding)


def test_many_updates_of_one_row_do_not_stagnate() -> None:
    table, count = jnp.zeros((4096, 2), jnp.bfloat16), 512
    args = table, jnp.full(count, 5, jnp.int32), jnp.ones((count, 2), jnp.bfloat16)
    (ours,) = evaluate_graph(replace(add(None), *args), *args)
    assert np.asarray(ours[5]).tolist() == [512.0, 512.0]
    # In 16 bits 256 + 1 is 256.
    assert float(jax.jit(add(None))(*args)[5, 0]) < 512.0


@pytest.mark.parametrize("index_type", [np.uint8, np.int16, np.uint32])
def test_indices_of_any_integer_type_are_taken(index_type: Any) -> None:
    args = make_arguments(jnp.bfloat16)
    args[1] = jnp.asarray(np.abs(INDICES) % 200).astype(index_type)
    (ours,) = evaluate_graph(replace(add(None), *args), *args)
    assert measure(ours, add(None)(*args)) < 0.05


def test_infinities_and_nans_stay_where_they_are() -> None:
    table, indices, rows = make_arguments(jnp.bfloat16)
    wrong = {(0, 0): jnp.inf, (1, 0): -jnp.inf, (2, 1): jnp.nan, (3, 2): jnp.inf}
    for place, value in wrong.items():
        rows = rows.at[place].set(value)
    args = table, indices, rows
    (ours,) = evaluate_graph(replace(add(None), *args), *args)
    theirs = np.asarray(add(None)(*args), np.float32)
    assert np.isfinite(np.asarray(ours, np.float32)).tolist() == np.isfinite(theirs).tolist()
    assert np.isnan(np.asarray(ours, np.float32)[3, :2]).all()
    assert np.isposinf(ours[7, 2])


def test_few_touched_rows_need_no_array_of_all_rows_in_32_bits() -> None:
    def count_wide(rows: int) -> int:
        graph = replace(embed, *make_arguments(jnp.bfloat16, rows))
        shapes = [
            value.shape for op in graph.ops for value in op.results if value.dtype == "float32"
        ]
        return shapes.count((rows, 4))

    assert (count_wide(200), count_wide(159)) == (0, 2)


def test_a_sum_with_an_array_is_updated_in_its_place() -> None:
    args = make_arguments(jnp.bfloat16)
    (match,) = ScatterSums().find(build(tied, *args), None)
    assert match.op.name == "add"
    doubled = match.inputs[0]
    graph = replace(tied, *args)
    assert doubled.aval.shape == (200, 4)
    # Neither a fill nor a sum of all rows is left.
    assert [op.name for op in graph.ops for each in op.results if each.shape == (200, 4)] == [
        "mul",
        "scatter",
    ]

    def shared(table: Any, indices: Any, rows: Any) -> Any:
        other = jnp.exp(table)
        return other + jnp.zeros_like(table).at[indices].add(rows), other

    (match,) = ScatterSums().find(build(shared, *args), None)
    assert match.op.name == "scatter-add"


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param(add(None), jnp.float32, id="32-bits"),
        pytest.param(lambda t, i, r: t.at[i].set(r), jnp.bfloat16, id="set"),
        pytest.param(
            lambda t, i, r: t.at[i].add(r, unique_indices=True), jnp.bfloat16, id="unique"
        ),
        pytest.param(lambda t, i, _: t.at[i].add(1), jnp.int16, id="integers"),
    ],
)
def test_what_needs_no_replacement_is_left(function: Any, dtype: Any) -> None:
    assert ScatterSums().find(build(function, *make_arguments(dtype)), None) == []


def test_a_planted_fault_is_an_error_that_a_test_finds() -> None:
    args = make_arguments(jnp.bfloat16)
    graph = build(add(None), *args)
    (match,) = ScatterSums().find(graph, None)

    def forget_owner(operand: Any, indices: Any, updates: Any) -> Any:
        return (operand.at[indices[:, 0]].set(operand[indices[:, 0]] + updates),)

    broken = splice_matches(graph, [dataclasses.replace(match, compute=forget_owner)])
    wanted = evaluate_graph(graph, *args)[0]
    assert measure(evaluate_graph(broken, *args)[0], wanted) > 0.5
