"""Random programs: passes against the interpreter, and against ``jax.jit``, bit for bit."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings

from tests.fakes.jax_programs import Step, assert_same_bits, make_arguments, make_program, programs
from tracegraph.ir.graph import Graph
from tracegraph.ir.interpreter import evaluate_graph, interpret
from tracegraph.ir.printer import print_graph
from tracegraph.ir.verifier import verify_graph
from tracegraph.passes.pipeline import DEFAULT_PASSES, Pass, run_passes
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.tracing.trace import trace_function

jax.config.update("jax_platforms", "cpu")
PASSES: tuple[Pass, ...] = (*DEFAULT_PASSES, ResolveDonation(frozenset({0, 1}), ((1, 1),)))


def trace(steps: list[Step]) -> Graph:
    return trace_function(make_program(steps), make_arguments(0), {}, name="program").graph


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
@settings(max_examples=12, derandomize=True)
@given(steps=programs)
def test_each_pass_alone_keeps_every_bit(each: Pass, steps: list[Step]) -> None:
    graph, arguments = trace(steps), make_arguments(1)
    rewritten, (report,) = run_passes(graph, (each,))
    assert report.ops_after == len(rewritten.ops)
    assert_same_bits(interpret(rewritten, *arguments), interpret(graph, *arguments))


@settings(max_examples=20, derandomize=True)
@given(steps=programs)
def test_all_passes_together_keep_every_bit(steps: list[Step]) -> None:
    graph, arguments = trace(steps), make_arguments(2)
    rewritten, _ = run_passes(graph, PASSES)
    assert_same_bits(interpret(rewritten, *arguments), interpret(graph, *arguments))


@settings(max_examples=20, derandomize=True)
@given(steps=programs)
def test_the_ops_under_jit_give_the_bits_of_jit(steps: list[Step]) -> None:
    program, arguments = make_program(steps), make_arguments(3)
    wanted = jax.tree.leaves(jax.jit(program)(*arguments))
    graph = trace(steps)
    rewritten, _ = run_passes(graph, PASSES)
    for each in (graph, rewritten):
        got = jax.jit(lambda *arrays, each=each: evaluate_graph(each, *arrays))(*arguments)
        assert_same_bits(got, wanted)


@settings(max_examples=20, derandomize=True)
@given(steps=programs)
def test_passes_settle_after_one_round(steps: list[Step]) -> None:
    graph = trace(steps)
    verify_graph(graph)
    once, _ = run_passes(graph, DEFAULT_PASSES)
    twice, _ = run_passes(once, DEFAULT_PASSES)
    assert print_graph(once) == print_graph(twice)
