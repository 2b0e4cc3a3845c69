"""Splicing: new ops are in the place of old ones, with their origin, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.ir.graph import Graph, Op
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.ir.printer import print_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.replacements.match import Match
from tracegraph.replacements.splice import splice_matches
from tracegraph.runtime.errors import InternalError, UnsupportedError
from tracegraph.tracing.trace import trace_function

X = jnp.linspace(1.0, 2.0, 3)


def build(function: Any, *args: Any) -> Graph:
    return run_passes(trace_function(function, args, {}, name="f").graph, DEFAULT_PASSES)[0]


def find_ops(graph: Graph, name: str) -> list[Op]:
    return [op for op in graph.ops if op.name == name]


def double(x: Any) -> Sequence[Any]:
    return (jax.jit(lambda x: x + x)(x),)


def match_sines(graph: Graph, compute: Any = double) -> list[Match]:
    return [Match(op, op.results, op.operands, compute, compute) for op in find_ops(graph, "sin")]


def test_several_places_are_replaced_and_what_only_they_needed_goes() -> None:
    def function(x: Any) -> Any:
        with jax.named_scope("layer"):
            y = jnp.sin(jnp.exp(x))
        return jnp.sin(y) * 3, jnp.exp(x)

    graph = build(function, X)
    spliced = splice_matches(graph, match_sines(graph))
    verify_graph(spliced)
    assert [op.name for op in spliced.ops] == ["exp", "add", "add", "mul"]
    first = spliced.ops[1].origin
    assert first.scope == "layer"
    assert first.source == find_ops(graph, "sin")[0].origin.source
    got = evaluate_graph(spliced, X)
    assert jnp.allclose(got[0], 12 * jnp.exp(X))
    assert len(graph.ops) == 4


def test_replacements_are_traced_at_once_under_the_settings_of_the_caller() -> None:
    graph = build(lambda x: jnp.sin(jnp.sin(x)), X)
    both, settings = threading.Barrier(2, timeout=60), []

    def double_beside_the_other(x: Any) -> Sequence[Any]:
        # NVRTC is there in a kernel's place: one waits until the other is compiled as well.
        both.wait()
        settings.append(jax.config.read("jax_enable_x64"))
        return double(x)

    with jax.enable_x64(True):
        spliced = splice_matches(graph, match_sines(graph, double_beside_the_other))
    assert [op.name for op in spliced.ops] == ["add", "add"]
    assert settings == [True, True]


def test_an_error_of_one_replacement_is_raised_when_all_have_ended() -> None:
    graph = build(lambda x: jnp.sin(jnp.sin(x)), X)
    begun: list[str] = []
    # What has not begun by then is left out.
    both = threading.Barrier(2, timeout=60)

    def fail(x: Any) -> Sequence[Any]:
        begun.append(threading.current_thread().name)
        both.wait()
        raise UnsupportedError(
            "NVRTC is missing", where="", why="it is not there", fix="install it", anchor="cuda"
        )

    with pytest.raises(UnsupportedError, match="NVRTC is missing"):
        splice_matches(graph, match_sines(graph, fail))
    assert len(begun) == 2
    assert not {thread.name for thread in threading.enumerate()} & {*begun}
    assert len(splice_matches(graph, match_sines(graph)).ops) == 2


def test_ops_that_something_else_needs_stay() -> None:
    graph = build(lambda x: (jnp.sin(jnp.exp(x)), jnp.exp(x)), X)
    (sine,) = find_ops(graph, "sin")
    two_steps = Match(sine, sine.results, graph.inputs, lambda x: (x * 2,), lambda x: (x * 2,))
    spliced = splice_matches(graph, [two_steps])
    assert [op.name for op in spliced.ops] == ["exp", "mul"]
    only = build(lambda x: jnp.sin(jnp.exp(x)), X)
    (sine,) = find_ops(only, "sin")
    spliced = splice_matches(
        only, [Match(sine, sine.results, only.inputs, lambda x: (x * 2,), double)]
    )
    assert [op.name for op in spliced.ops] == ["mul"]


def test_a_result_of_the_graph_may_be_an_input_of_a_replacement() -> None:
    graph = build(jnp.sin, X)
    spliced = splice_matches(graph, match_sines(graph, lambda x: (x,)))
    verify_graph(spliced)
    assert (spliced.ops, spliced.outputs) == ((), spliced.inputs)


def test_nothing_to_replace_gives_the_same_graph() -> None:
    graph = build(lambda x: jnp.sin(x) * 2, X)
    assert print_graph(splice_matches(graph, [])) == print_graph(graph)


@pytest.mark.parametrize("wrong", [lambda x: (x.astype("float16"),), lambda x: (x[:2],)])
def test_a_replacement_of_another_type_is_refused(wrong: Any) -> None:
    graph = build(lambda x: jnp.sin(x) * 2, X)
    with pytest.raises(InternalError, match=r"the replacement of `sin` returns \["):
        splice_matches(graph, match_sines(graph, wrong))


def test_what_computes_a_replacement_is_not_printed() -> None:
    class Doubling:
        printed = 0

        def __call__(self, x: Any) -> Sequence[Any]:
            return double(x)

        def __repr__(self) -> str:
            Doubling.printed += 1
            return "a record with all of its matches"

    graph = build(lambda x: jnp.sin(x), X)
    spliced = splice_matches(graph, match_sines(graph, Doubling()))
    assert not find_ops(spliced, "sin")
    assert Doubling.printed == 0


def test_results_that_are_needed_before_the_last_op_come_before_that() -> None:
    def function(x: Any) -> Any:
        one = jnp.sin(x)
        between = one * 3
        return between, jnp.sin(x + 1) * between

    graph = build(function, X)
    (first, last) = find_ops(graph, "sin")
    (add,) = find_ops(graph, "add")

    def compute(x: Any, other: Any) -> Sequence[Any]:
        return jnp.sin(x), jnp.sin(other)

    results = (*first.results, *last.results)
    match = Match(last, results, (*graph.inputs, *add.results), compute, compute)
    spliced = splice_matches(graph, [match])
    verify_graph(spliced)
    assert sorted(op.name for op in spliced.ops) == ["add", "mul", "mul", "sin", "sin"]
    for one, other in zip(evaluate_graph(spliced, X), evaluate_graph(graph, X), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_replacement_that_needs_its_own_results_is_a_fault() -> None:
    graph = build(lambda x: jnp.cos(jnp.sin(x)), X)
    (sine,), (cosine,) = find_ops(graph, "sin"), find_ops(graph, "cos")

    def compute(x: Any) -> Sequence[Any]:
        return jnp.exp(x), jnp.exp(x)

    match = Match(cosine, (*sine.results, *cosine.results), sine.results, compute, compute)
    with pytest.raises(InternalError, match="needs its own results"):
        splice_matches(graph, [match])
