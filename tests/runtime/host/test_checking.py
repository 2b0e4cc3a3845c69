"""Checking mode: a missing wait and a stale read give a wrong result, correct graphs never do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.definitions import (
    make_call,
    make_copy,
    make_definition,
    make_replay,
    make_stage,
    replay_once,
)
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.host.checking import draw_order, find_scratch

jax.config.update("jax_platforms", "cpu")
X = np.arange(1, 5, dtype=np.float32)
LAUNCHES = 20

# The fork of a capture on three streams: a -> (b, c) -> d.
FORK = (
    make_call("a", lambda x: x + 1, "x", "t"),
    make_call("b", lambda t: t * 2, "t", "u"),
    make_call("c", lambda t: t * 3, "t", "v"),
    make_call("d", lambda u, v: u + v, "u v", "y"),
)
FORK_EDGES = ((0, 1), (0, 2), (1, 3), (2, 3))


def launch_often(definition: GraphDefinition, *, is_checking: bool = True) -> list[np.ndarray]:
    """Returns the first result of many launches, each on the same input."""
    replay = make_replay(definition, is_checking=is_checking)
    return [replay_once(replay, X)[0] for _ in range(LAUNCHES)]


def count_wrong(results: Sequence[np.ndarray], expected: Any) -> int:
    return sum(not np.array_equal(result, expected) for result in results)


def fork(edges: Sequence[tuple[int, int]]) -> GraphDefinition:
    return make_definition(make_stage(*FORK, edges=edges))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(0, 8))
    pairs = [(first, second) for second in range(count) for first in range(second)]
    return count, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []


@settings(max_examples=60)
@given(graphs(), st.integers(0, 5))
def test_an_order_has_every_node_once_and_respects_every_edge(graph: Any, seed: int):
    count, edges = graph
    order = draw_order(count, edges, random.Random(seed))
    assert sorted(order) == list(range(count))
    assert all(order.index(first) < order.index(second) for first, second in edges)


def test_every_allowed_order_is_drawn():
    generator = random.Random(0)
    orders = {tuple(draw_order(4, FORK_EDGES, generator)) for _ in range(40)}
    assert orders == {(0, 1, 2, 3), (0, 2, 1, 3)}
    assert len({tuple(draw_order(3, (), generator)) for _ in range(100)}) == 6


def test_declared_edges_give_the_right_result_in_every_order():
    assert count_wrong(launch_often(fork(FORK_EDGES)), (X + 1) * 5) == 0


@pytest.mark.parametrize("missing", FORK_EDGES)
def test_a_missing_edge_gives_a_wrong_result(missing: tuple[int, int]):
    definition = fork([edge for edge in FORK_EDGES if edge != missing])
    assert count_wrong(launch_often(definition), (X + 1) * 5) > 0
    # Without the checking mode nodes run in program order, and it would not be noticed.
    assert count_wrong(launch_often(definition, is_checking=False), (X + 1) * 5) == 0


@pytest.mark.parametrize("edges", [(), ((0, 1),)])
def test_an_input_that_is_overwritten_too_early_gives_a_wrong_result(edges: Any):
    read = make_call("a", lambda s: s + 0, "s", "y")
    write = make_call("b", lambda x: x * 0, "x", "s")
    definition = make_definition(
        make_stage(read, write, edges=edges), inputs="s x", outputs="y s", residents=["s"]
    )
    replay = make_replay(definition, is_checking=True)
    wrong = 0
    for _ in range(LAUNCHES):
        y, s = replay_once(replay, X, X)
        wrong += not np.array_equal(y, X)
        np.testing.assert_array_equal(s, X * 0)
    assert bool(wrong) is not bool(edges)


def test_a_result_of_the_last_replay_does_not_pass_for_that_of_this_one():
    # `b` reads a result that `a` may not have written yet.
    first = make_call("a", lambda x: x + 1, "x", "y")
    second = make_call("b", lambda y: y * 2, "y", "z")
    definition = make_definition(make_stage(first, second), outputs="z y")
    wrong = [z for z in launch_often(definition) if not np.array_equal(z, (X + 1) * 2)]
    assert wrong
    assert all(np.isnan(z).all() for z in wrong)


def chain(offsets: dict[str, int] | None) -> GraphDefinition:
    nodes = (
        make_call("a", lambda x: x + 1, "x", "t"),
        make_call("b", lambda t: t * 2, "t", "u"),
        make_call("c", lambda t, u: t + u, "t u", "y"),
    )
    edges = ((0, 1), (1, 2))
    return make_definition(make_stage(*nodes, edges=edges), offsets=offsets)


def test_buffers_that_overlap_while_both_live_give_a_wrong_result():
    expected = (X + 1) * 3
    assert count_wrong(launch_often(chain(None)), expected) == 0
    overlapping = {"x": 0, "t": 4096, "u": 4096, "y": 8192}
    assert count_wrong(launch_often(chain(overlapping)), expected) == LAUNCHES


def test_a_read_after_the_end_of_a_lifetime_meets_poison():
    # `u` starts where `t` ends, but its plan says that `t` is dead: nothing reads it by name.
    nodes = (
        make_call("a", lambda x: x + 1, "x", "t"),
        make_call("b", lambda t: t * 2, "t", "y"),
        make_call("c", lambda stale: stale * 1, "stale", "z"),
    )
    definition = make_definition(
        make_stage(*nodes, edges=((0, 1), (1, 2))),
        outputs="z y",
        offsets={"x": 0, "t": 4096, "stale": 4096, "y": 8192, "z": 12288},
    )
    assert all(np.isnan(z).all() for z in launch_often(definition))
    in_order = launch_often(definition, is_checking=False)
    np.testing.assert_array_equal(in_order, [X + 1] * LAUNCHES)


def test_values_that_a_later_stage_reads_are_not_poisoned():
    seen: list[Any] = []

    def look(t: Any) -> Any:
        seen.append(np.asarray(t))
        return np.asarray(t) * 2

    definition = make_definition(
        make_stage(FORK[0]),
        make_stage(CallNode("e", look, ("t",), ("u",)), is_captured=False),
        make_stage(make_call("c", lambda t, u: t + u, "t u", "y")),
    )
    assert count_wrong(launch_often(definition), (X + 1) * 3) == 0
    np.testing.assert_array_equal(seen, [X + 1] * LAUNCHES)


def test_resident_state_survives_from_one_launch_to_the_next():
    compute = make_call("a", lambda s, x: s + x, "s x", "n")
    definition = make_definition(
        make_stage(compute, make_copy("n", "s"), edges=[(0, 1)]),
        inputs="s x",
        outputs="s",
        residents=["s"],
    )
    replay = make_replay(definition, is_checking=True)
    replay.load([(0, X), (1, X)])
    for count in range(2, 6):
        replay.launch()
        np.testing.assert_array_equal(replay.copy_outputs(), [X * count])


def test_scratch_is_what_is_neither_input_nor_output():
    assert find_scratch(fork(FORK_EDGES)) == ["t", "u", "v"]


def test_an_empty_buffer_needs_no_poison():
    kind = jax.ShapeDtypeStruct((0,), np.float32)
    node = CallNode("e", lambda x: (np.zeros(0, np.float32), x), ("x",), ("t", "y"))
    use = CallNode("g", lambda t: (), ("t",), ())
    definition = make_definition(
        make_stage(node, is_captured=False),
        make_stage(use, is_captured=False),
        types={"t": kind},
    )
    assert count_wrong(launch_often(definition), X) == 0
