"""Cells of recurrent layers as users write them; the kernels run on this machine's threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.tracegraph.replacements.few_rows.test_rule import GPU, build, evaluate, run_kernels
from tests.tracegraph.replacements.few_rows.test_small_matmuls import f32
from tracegraph.ir.graph import Graph, Op
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.bodies import enter_body, list_bodies
from tracegraph.replacements.few_rows import cells, small_matmuls
from tracegraph.replacements.few_rows.cells import open_cell
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls
from tracegraph.replacements.match import Match
from tracegraph.replacements.rules import find_matches
from tracegraph.replacements.splice import splice_matches

STEPS, ROWS, INPUTS, WIDTH = 3, 20, 16, 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that threads of this machine multiply by in time."""
    sizes = dataclasses.replace(small_matmuls.SIZES, matrix_bytes=0)
    monkeypatch.setattr(small_matmuls, "SIZES", sizes)


def give(gates: int) -> tuple[Any, ...]:
    columns = gates * WIDTH
    matrices = f32(INPUTS, columns), f32(WIDTH, columns), f32(columns)
    return f32(STEPS, ROWS, INPUTS), matrices


def run_lstm(xs: Any, weights: Any) -> Any:
    given, carried, bias = weights

    def step(state: Any, x: Any) -> Any:
        cell, hidden = state
        gates = hidden @ carried + bias + x @ given
        start, forget, change, end = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(start) * jnp.tanh(change)
        hidden = jax.nn.sigmoid(end) * jnp.tanh(cell)
        return (cell, hidden), hidden

    zeros = jnp.zeros((ROWS, WIDTH))
    return lax.scan(step, (zeros, zeros + 0.25), xs)


def run_gru(xs: Any, weights: Any) -> Any:
    given, carried, bias = weights

    def step(hidden: Any, x: Any) -> Any:
        # Each side is taken apart by itself: the reset gate scales a part of one.
        parts = jnp.split(x @ given + bias[None], 3, axis=-1)
        others = jnp.split(hidden @ carried, 3, axis=-1)
        reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(parts[:2], others[:2], strict=True))
        change = jnp.tanh(parts[2] + reset * others[2])
        return update * hidden + (1 - update) * change, None

    return lax.scan(step, jnp.full((ROWS, WIDTH), 0.5), xs, reverse=True)


def find(function: Any, *args: Any) -> tuple[Graph, list[Match]]:
    graph = build(function, *args)
    matches = find_matches(SmallMatmuls(), graph, GPU)
    verify_graph(splice_matches(graph, matches))
    return graph, matches


def get_scan(graph: Graph) -> tuple[Op, Graph]:
    ((op, _, body),) = list_bodies(graph)
    return op, body


@pytest.mark.parametrize(("run", "gates", "results"), [(run_lstm, 4, [4, 2]), (run_gru, 3, [3, 1])])
def test_a_cell_is_a_kernel_and_the_input_of_all_gates_another(
    run: Any, gates: int, results: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = give(gates)
    graph, matches = find(run, *args)
    assert [len(match.results) for match in matches] == results
    assert {value.shape for match in matches for value in match.results} == {(ROWS, WIDTH)}
    (body,) = {match.path[0] for match in matches}
    known = evaluate(graph, args)
    entered = enter_body(body, [known.get(each, each) for each in body.op.operands])
    run_kernels(monkeypatch, evaluate(body.graph, entered), matches)


def test_what_a_backward_pass_reads_of_a_cell_is_stored_by_its_kernel() -> None:
    def compute(xs: Any, weights: Any) -> Any:
        return jax.grad(lambda each: jnp.sin(run_lstm(xs, each)[1]).sum())(weights)

    graph, matches = find(compute, *give(4))
    forward = [match for match in matches if match.path[0].op is get_first_scan(graph)]
    stored = forward[-1].results
    assert len(stored) >= 8
    kept = set(forward[-1].path[0].graph.outputs) - set(forward[-1].path[0].graph.inputs)
    assert kept <= set(stored)


@pytest.mark.parametrize(
    ("cell", "stored"), [("OptimizedLSTMCell", 12), ("LSTMCell", 12), ("GRUCell", 9)]
)
def test_cells_of_flax_are_a_kernel_each_with_what_their_backward_pass_reads(
    cell: str, stored: int
) -> None:
    layer: Any = nn.RNN(getattr(nn, cell)(WIDTH))
    xs = f32(ROWS, STEPS, INPUTS)

    def compute(parameters: Any) -> Any:
        return jax.grad(lambda each: jnp.sin(layer.apply(each, xs)).sum())(parameters)

    graph, matches = find(compute, layer.init(jax.random.key(0), xs))
    forward = [match for match in matches if match.path[0].op is get_first_scan(graph)]
    assert len(forward) == 2
    assert len(forward[-1].results) == stored


def get_first_scan(graph: Graph) -> Op:
    return next(op for op, _, _ in list_bodies(graph))


def test_parts_of_matrices_are_cut_out_ahead_of_the_loop() -> None:
    graph, matches = find(run_lstm, *give(4))
    replaced = splice_matches(graph, matches)
    _, body = get_scan(replaced)
    assert "slice" not in [op.name for op in body.ops]
    # Of both matrices, and of the bias.
    assert [op.name for op in replaced.ops].count("slice") == 3 * 4


@pytest.mark.parametrize(("run", "gates"), [(run_lstm, 4), (run_gru, 3)])
def test_a_body_that_is_taken_apart_computes_the_same(run: Any, gates: int) -> None:
    args = give(gates)
    op, body = get_scan(build(run, *args))
    apart = open_cell(op, body)
    verify_graph(apart)
    assert count_matmuls(apart) == 2 * gates
    np.testing.assert_allclose(*evaluate_both(body, apart), rtol=2e-5, atol=1e-6)


def evaluate_both(body: Graph, apart: Graph) -> tuple[Any, Any]:
    arrays = [f32(*value.shape, seed=seed) for seed, value in enumerate(body.inputs)]
    first, second = (np.stack(evaluate_graph(each, *arrays)) for each in (body, apart))
    return first, second


def count_matmuls(graph: Graph) -> int:
    return [op.name for op in graph.ops].count("dot_general")


def test_a_part_that_is_cut_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(given: Any, operand: Any, axis: Any, start: int, width: int) -> Any:
        # The first part of a bias in the place of each.
        is_bias = len(operand.aval.shape) == 1
        return right(given, operand, axis, 0 if is_bias else start, width)

    op, body = get_scan(build(run_lstm, *give(4)))
    right = cells._cut
    monkeypatch.setattr(cells, "_cut", cut)
    first, second = evaluate_both(body, open_cell(op, body))
    assert np.abs(first - second).max() > 1e-2


def test_what_does_not_wait_for_the_state_comes_first() -> None:
    op, body = get_scan(build(run_lstm, *give(4)))
    apart = open_cell(op, body)
    places = [place for place, op in enumerate(apart.ops) if op.name == "dot_general"]
    rows = [apart.ops[place].operands[0].aval.shape for place in places]
    assert rows == [(ROWS, INPUTS)] * 4 + [(ROWS, WIDTH)] * 4


def test_matmuls_stay_in_one_piece_where_no_kernel_takes_the_parts() -> None:
    def step(x: Any, weights: Any) -> Any:
        carried, exact = weights
        parts = jnp.split(jnp.dot(x @ carried, exact, precision="highest"), 2, axis=-1)
        return parts[0] * parts[1], None

    def run(x: Any, weights: Any) -> Any:
        return lax.scan(lambda x, _: step(x, weights), x, length=STEPS)

    weights = f32(WIDTH, WIDTH), f32(WIDTH, 2 * WIDTH)
    graph, (match,) = find(run, f32(ROWS, WIDTH), weights)
    _, body = get_scan(graph)
    assert count_matmuls(open_cell(get_scan(graph)[0], body)) == 3
    assert count_matmuls(match.path[0].graph) == 2


def keep_all(x: Any, carried: Any) -> Any:
    product = x @ carried
    return jnp.split(product, 4, axis=-1)[0], product


def split_unevenly(x: Any, carried: Any) -> Any:
    return jnp.split(x @ carried, [WIDTH, 3 * WIDTH], axis=-1)[0], None


def split_in_eight(x: Any, carried: Any) -> Any:
    return jnp.concatenate(jnp.split(x @ carried, 8, axis=-1)[:2], axis=-1), None


def split_rows(x: Any, carried: Any) -> Any:
    first, second = jnp.split((x @ carried)[:, :WIDTH], 2)
    return jnp.concatenate([second, first]), None


@pytest.mark.parametrize("step", [keep_all, split_unevenly, split_in_eight, split_rows])
def test_other_matmuls_stay_in_one_piece(step: Any) -> None:
    def run(x: Any, carried: Any) -> Any:
        return lax.scan(lambda x, _: step(x, carried), x, length=STEPS)

    op, body = get_scan(build(run, f32(ROWS, WIDTH), f32(WIDTH, 4 * WIDTH)))
    assert open_cell(op, body) is body


def test_a_loop_that_is_no_scan_stays_as_it_is() -> None:
    def run(x: Any, carried: Any, count: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            parts = jnp.split(x @ carried, 2, axis=-1)
            return parts[0] * parts[1]

        return lax.fori_loop(0, count, step, x)

    op, body = get_scan(build(run, f32(ROWS, WIDTH), f32(WIDTH, 2 * WIDTH), 3))
    assert open_cell(op, body) is body
