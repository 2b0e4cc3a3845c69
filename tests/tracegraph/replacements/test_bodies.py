"""Replacements inside of loops and checkpoints: found, measured and bound in each iteration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.tracegraph.replacements.few_rows.test_rule import build
from tracegraph.capturing import fastest_variant
from tracegraph.ir.graph import Graph
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import bodies, rules
from tracegraph.replacements.bodies import change_body, compute_shared, list_bodies
from tracegraph.replacements.match import Machine, Match, OpBody
from tracegraph.replacements.place_errors import measure_places
from tracegraph.replacements.rules import find_matches, open_graph
from tracegraph.replacements.splice import splice_matches
from tracegraph.runtime.errors import InternalError

X = jnp.linspace(0.1, 1.0, 4)
WEIGHTS = jnp.linspace(1.0, 2.0, 12).reshape(3, 4)


@dataclasses.dataclass(frozen=True)
class Sines:
    """Replaces each sine.

    Attributes:
        compute: what takes its place.
        name: of the rule.
    """

    compute: Callable[[Any], Any]
    name: str = "sines"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns all sines."""
        del machine
        return [
            Match(
                op,
                op.results,
                op.operands,
                functools.partial(_call, self.compute),
                functools.partial(_call, jnp.sin),
            )
            for op in graph.ops
            if op.name == "sin"
        ]


def _call(function: Callable[[Any], Any], x: Any) -> tuple[Any]:
    return (function(x),)


@pytest.fixture(autouse=True)
def looks_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES_IN_BODIES", frozenset(["sines"]))


Wave = Callable[[Any], Any]


def scan(wave: Wave, x: Any, weights: Any) -> Any:
    return lax.scan(lambda c, w: (wave(c * w), c + w), x, weights)


def scan_backwards(wave: Wave, x: Any, weights: Any) -> Any:
    return lax.scan(lambda c, w: (wave(c * w) + x, c), x, weights, reverse=True)


def loop(wave: Wave, x: Any, weights: Any) -> Any:
    bound = weights.sum()
    return lax.while_loop(
        lambda c: (c[0] < 3) & (c[1].sum() < bound),
        lambda c: (c[0] + 1, wave(c[1]) + weights[1]),
        (0, x),
    )


def checkpoint(wave: Wave, x: Any, weights: Any) -> Any:
    layer = jax.checkpoint(lambda c, w: (wave(c * w), None))
    return lax.scan(layer, x, weights)[0]


def nested(wave: Wave, x: Any, weights: Any) -> Any:
    def layer(c: Any, w: Any) -> Any:
        inner = lax.scan(lambda d, v: (wave(d + v), d.sum()), c, jnp.stack([w, 2 * w]))
        return wave(inner[0]), inner[1]

    return lax.scan(layer, wave(x), weights)


def cutting(wave: Wave, x: Any, weights: Any) -> Any:
    table = jnp.concatenate([x, weights[0] + 1])

    def body(c: Any, w: Any) -> tuple[Any, Any]:
        return wave(c * w) + table[4:], c + table[:4]

    return lax.scan(body, x, weights, reverse=True, unroll=2)


def called(wave: Wave, x: Any, weights: Any) -> Any:
    return lax.scan(lambda c, w: (jax.jit(wave)(c) * w, None), x, weights)[0]


FUNCTIONS = [scan, scan_backwards, loop, checkpoint, nested, called, cutting]


def find(function: Any, compute: Wave = jnp.sin, *args: Any) -> tuple[Graph, list[Match]]:
    bound = functools.partial(function, jnp.sin)
    bound.__name__ = function.__name__  # type: ignore[attr-defined]
    graph = open_graph(build(bound, *(args or (X, WEIGHTS))))
    return graph, find_matches(Sines(compute), graph, None)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_iteration_has_the_replacement(function: Any) -> None:
    graph, matches = find(function, jnp.cos)
    assert len(matches) == (3 if function is nested else 1)
    replaced = splice_matches(graph, matches)
    verify_graph(replaced)
    found = jax.jit(functools.partial(evaluate_graph, replaced))(X, WEIGHTS)
    wanted = jax.tree.leaves(jax.jit(functools.partial(function, jnp.cos))(X, WEIGHTS))
    other = jax.tree.leaves(jax.jit(functools.partial(function, jnp.sin))(X, WEIGHTS))
    for one, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)
    assert any(not np.allclose(one, each) for one, each in zip(found, other, strict=True))


def test_pieces_that_kernels_read_are_cut_out_ahead_of_a_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "KERNEL_CALLS", frozenset(["add"]))
    graph, matches = find(cutting, jnp.cos)
    replaced = splice_matches(graph, matches)
    verify_graph(replaced)
    ((_, _, body),) = list_bodies(replaced)
    assert "slice" not in [op.name for op in body.ops]
    found = jax.jit(functools.partial(evaluate_graph, replaced))(X, WEIGHTS)
    wanted = jax.jit(functools.partial(cutting, jnp.cos))(X, WEIGHTS)
    for one, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)


def test_pieces_that_xla_reads_stay_in_a_scan() -> None:
    ((_, _, body),) = list_bodies(splice_matches(*find(cutting, jnp.cos)))
    assert [op.name for op in body.ops].count("slice") == 2


def test_some_matches_may_be_left() -> None:
    graph, matches = find(nested, jnp.cos)
    assert [len(each.path) for each in matches] == [0, 1, 2]
    replaced = splice_matches(graph, matches[1:2])
    found = jax.jit(functools.partial(evaluate_graph, replaced))(X, WEIGHTS)

    def layer(c: Any, w: Any) -> Any:
        inner = lax.scan(lambda d, v: (jnp.sin(d + v), d.sum()), c, jnp.stack([w, 2 * w]))
        return jnp.cos(inner[0]), inner[1]

    wanted = lax.scan(layer, jnp.sin(X), WEIGHTS)
    for one, right in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)


@pytest.mark.parametrize("function", [*FUNCTIONS[:4], called])
def test_errors_are_those_of_the_first_iteration(function: Any) -> None:
    seen = {
        scan: X * WEIGHTS[0],
        scan_backwards: X * WEIGHTS[-1],
        loop: X,
        checkpoint: X * WEIGHTS[0],
        called: X,
    }[function]

    def compute(x: Any) -> Any:
        # Other values than those have a large error.
        return jnp.sin(x) + jnp.where(jnp.abs(x - seen).max() < 1e-6, 0.25, 8.0)

    graph, matches = find(function, compute)
    (error,) = measure_places(graph, matches, [X, WEIGHTS])
    assert error.ours == pytest.approx(0.25, rel=1e-4)
    assert not error.is_allowed
    (error,) = measure_places(*find(function), [X, WEIGHTS])
    assert error.ours <= error.rounding


def test_errors_come_in_the_order_of_the_matches() -> None:
    graph, matches = find(nested, lambda x: jnp.sin(x) + 0.5)
    exact = [dataclasses.replace(each, compute=each.reference) for each in matches]
    mixed = [exact[2], matches[0], exact[1]]
    # The bodies of both are one.
    mixed = [dataclasses.replace(each, path=matches[2].path[: len(each.path)]) for each in mixed]
    errors = [each.ours for each in measure_places(graph, mixed, [X, WEIGHTS])]
    assert errors == pytest.approx([0.0, 0.5, 0.0], abs=1e-6)


def test_a_loop_that_never_runs_has_no_values() -> None:
    assert find(scan, jnp.sin, X, WEIGHTS[:0])[1] == []


def test_other_rules_look_at_the_function_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES_IN_BODIES", frozenset())
    assert [len(each.path) for each in find(nested)[1]] == [0]


TABLE = np.arange(4.0, dtype=np.float32)


def closing_over(wave: Wave, x: Any, weights: Any) -> Any:
    return lax.scan(lambda c, w: (wave(c * w) + TABLE, None), x, weights)[0]


def calling_one_that_closes_over(wave: Wave, x: Any, weights: Any) -> Any:
    inner = jax.jit(lambda c: wave(c) + TABLE)
    return lax.scan(lambda c, w: (inner(c) * w, None), x, weights)[0]


@pytest.mark.parametrize(
    ("function", "count"), [(closing_over, 1), (calling_one_that_closes_over, 0)]
)
def test_arrays_of_functions_called_inside_keep_a_body_as_it_is(function: Any, count: int) -> None:
    graph, matches = find(function, jnp.cos)
    assert len(matches) == count
    found = jax.jit(functools.partial(evaluate_graph, splice_matches(graph, matches)))(X, WEIGHTS)
    wanted = jax.jit(functools.partial(function, jnp.cos if count else jnp.sin))(X, WEIGHTS)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)


def test_a_body_holds_no_arrays() -> None:
    graph, matches = find(scan)
    (body,) = matches[0].path
    held = build(lambda c, w: (jnp.sin(c * w) + TABLE, c + w), X, X)
    assert isinstance(body, OpBody)
    assert len(held.constants) == 1
    with pytest.raises(InternalError, match="new body of `scan` holds 1 arrays"):
        change_body(body, held)
    verify_graph(graph)


def test_a_captured_loop_is_replaced_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [20e-6, 10e-6])
    rule = Sines(lambda x: lax.cos(x - np.float32(np.pi / 2)))
    monkeypatch.setattr(fastest_variant, "RULES", (rule,))
    monkeypatch.setattr("tracegraph.replacements.place_errors.PlaceError.is_allowed", True)

    def step(state: Any, weights: Any) -> Any:
        return scan(jnp.sin, state, weights)

    captured: Any = tg.capture(step, donate_argnums=0, numerics="equivalent")
    plain = jax.jit(step)
    ours, theirs = jnp.copy(X), X
    for _ in range(3):
        ours, outputs = captured(ours, WEIGHTS)
        theirs, wanted = plain(theirs, WEIGHTS)
        np.testing.assert_allclose(outputs, wanted, rtol=1e-5)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    report = captured.explain(ours, WEIGHTS)
    assert "sines: used; 20 µs without, 10 µs with (" in report
    assert "cos" in captured.explain(ours, WEIGHTS, show="ir")


def mask_in_scan(x: Any) -> Any:
    mask = jnp.tri(len(x), dtype=bool)
    return lax.scan(lambda c, w: (jnp.where(mask, c * w, -1e9), None), x, jnp.ones(3))[0]


def mask_in_loop(x: Any) -> Any:
    mask, bound = jnp.tri(len(x), dtype=bool), x.sum()
    step = lambda c: jnp.where(mask, c + bound, -1e9)  # noqa: E731  as users write it
    return lax.while_loop(lambda c: c.sum() < bound, step, x)


def mask_in_checkpoint(x: Any) -> Any:
    mask = jnp.tri(len(x), dtype=bool)
    return jax.checkpoint(lambda c: jnp.where(mask, jnp.sin(c), -1e9))(x)


@pytest.mark.parametrize("function", [mask_in_scan, mask_in_loop, mask_in_checkpoint])
def test_a_body_computes_what_depends_on_indices_alone(function: Any) -> None:
    square = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
    graph = open_graph(build(function, square))
    ((op, _, inner),) = list_bodies(graph)
    (mask,) = [value for value in inner.inputs if value.dtype == bool]
    changed = compute_shared(graph, op, open_graph(inner))
    verify_graph(changed)
    place = inner.inputs.index(mask)
    assert [value.aval for value in changed.inputs] == [value.aval for value in inner.inputs]
    assert all(changed.inputs[place] not in each.operands for each in changed.ops)
    values = [jnp.full(value.shape, 2, value.dtype) for value in inner.inputs]
    values[place] = jnp.tri(3, dtype=bool)
    # The mask that is given makes no difference any more.
    others = [*values[:place], ~values[place], *values[place + 1 :]]
    for found in (evaluate_graph(changed, *values), evaluate_graph(changed, *others)):
        for one, other in zip(found, evaluate_graph(inner, *values), strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_depends_on_arrays_is_handed_to_a_body() -> None:
    def compute(x: Any, kept: Any) -> Any:
        mask = jnp.tri(len(x), dtype=bool) & kept
        return lax.scan(lambda c, w: (jnp.where(mask, c * w, x), None), x, jnp.ones(3))[0]

    graph = open_graph(build(compute, jnp.ones((3, 3)), jnp.ones((3, 3), bool)))
    ((op, _, inner),) = list_bodies(graph)
    assert compute_shared(graph, op, inner) is inner
