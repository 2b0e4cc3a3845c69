"""Lanes: no more branches than a device launches well, and nothing that is ordered less."""

from __future__ import annotations

import random

import pytest

from tracegraph.lowering.planning import lanes
from tracegraph.lowering.planning.lanes import FEWEST, MOST, arrange_in_lanes
from tracegraph.lowering.planning.step_order import find_ancestors, find_unordered
from tracegraph.runtime.errors import InternalError


def draw_graph(seed: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Returns the times and edges of a random graph, some of them wide."""
    rng = random.Random(seed)
    count, fan_in = rng.randint(1, 80), rng.randint(0, 3)
    edges = {
        (first, second)
        for second in range(count)
        for first in rng.sample(range(second), min(second, rng.randint(0, fan_in)))
    }
    return [rng.choice([0.7, 1.5, 30.0]) for _ in range(count)], sorted(edges)


def measure_width(count: int, edges: list[tuple[int, int]]) -> int:
    """Returns how many chains cover a graph, by Dilworth the most steps that may run at once."""
    ancestors = find_ancestors(count, edges)
    matched: dict[int, int] = {}

    def match(second: int, seen: set[int]) -> bool:
        for first in range(count):
            if ancestors[second] >> first & 1 and first not in seen:
                seen.add(first)
                if first not in matched or match(matched[first], seen):
                    matched[first] = second
                    return True
        return False

    return count - sum(match(second, set()) for second in range(count))


@pytest.mark.parametrize("has_two", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_are_narrow_and_keep_their_order(seed, has_two):
    times, edges = draw_graph(seed)
    order, arranged = arrange_in_lanes(times, edges, has_two=has_two)
    assert sorted(order) == list(range(len(times)))
    place = {old: new for new, old in enumerate(order)}
    ancestors = find_ancestors(len(times), arranged)
    for first, second in edges:
        assert ancestors[place[second]] >> place[first] & 1
    assert measure_width(len(times), list(arranged)) <= (2 if has_two else MOST)


@pytest.mark.parametrize("width", [1, 2, FEWEST])
def test_a_narrow_graph_keeps_its_edges(width):
    """Chains side by side, in turns: each has a lane of its own."""
    edges = {(index, index + width) for index in range(20 * width - width)}
    order, arranged = arrange_in_lanes([1.0] * 20 * width, sorted(edges))
    assert {(order[first], order[second]) for first, second in arranged} == edges


def test_the_longest_chain_comes_first():
    """Six steps of one time: 0, 2, 4 and 5 are a chain; 3 makes 5 wait, and for 1 nothing waits."""
    edges = [(0, 1), (0, 2), (0, 3), (2, 4), (3, 5), (4, 5)]
    assert arrange_in_lanes([1.0] * 6, edges).order == (0, 2, 4, 3, 5, 1)


def test_of_the_others_comes_first_what_the_most_work_waits_for():
    """A chain of one long step; beside it chains of one, two and three short ones."""
    edges = [(2, 3), (4, 5), (5, 6)]
    assert arrange_in_lanes([9.0, *[1.0] * 6], edges).order == (0, 4, 2, 5, 1, 3, 6)


def test_as_many_lanes_as_are_kept_busy():
    """Long chains side by side keep as many lanes busy, up to the most."""
    for width, wanted in ((6, 6), (12, 12), (100, MOST)):
        edges = [(index, index + width) for index in range(3 * width)]
        _, arranged = arrange_in_lanes([5.0] * 4 * width, edges)
        assert measure_width(4 * width, list(arranged)) == wanted


def test_the_longest_chain_never_waits_for_a_lane():
    """One chain of 30, and 60 steps that wait for nothing: no step of the chain waits for them."""
    chain = [(index, index + 1) for index in range(29)]
    order, arranged = arrange_in_lanes([1.0] * 90, chain)
    ancestors = find_ancestors(90, arranged)
    last = order.index(29)
    assert {order[i] for i in range(90) if ancestors[last] >> i & 1} == set(range(29))
    assert any(find_unordered(90, arranged))


def test_an_order_that_is_lost_is_found(monkeypatch):
    """Planted: a reduction that drops the edge which says most."""
    monkeypatch.setattr(lanes, "reduce_edges", lambda _, edges: tuple(sorted(edges))[1:])
    with pytest.raises(InternalError, match="does not wait for step 0 any more"):
        arrange_in_lanes([1.0] * 40, [(0, 1)])
