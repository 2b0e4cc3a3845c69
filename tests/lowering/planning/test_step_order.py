"""The order of steps: ancestors, what is unordered, and the fewest edges."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegraph.lowering.planning.step_order import (
    find_ancestors,
    find_unordered,
    is_chain,
    reduce_edges,
)
from tracegraph.runtime.errors import InternalError


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 12))
    pairs = [(first, second) for second in range(count) for first in range(second)]
    return count, draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []


def find_all_orders(count: int, edges: Any) -> set[tuple[int, int]]:
    """Warshall's closure: slow and obvious."""
    ordered = set(edges)
    for middle in range(count):
        for first in range(count):
            for second in range(count):
                if (first, middle) in ordered and (middle, second) in ordered:
                    ordered.add((first, second))
    return ordered


def as_pairs(ancestors: tuple[int, ...]) -> set[tuple[int, int]]:
    return {
        (first, second)
        for second, bits in enumerate(ancestors)
        for first in range(len(ancestors))
        if bits >> first & 1
    }


def test_ancestors_of_a_diamond():
    assert find_ancestors(4, [(0, 1), (0, 2), (1, 3), (2, 3)]) == (0, 0b1, 0b1, 0b111)


@given(st.integers(0, 9), st.data())
def test_a_chain_orders_all_steps(count: int, data: st.DataObject):
    edges = [(first, first + 1) for first in range(count - 1)]
    assert is_chain(count, edges)
    assert find_unordered(count, edges) == (0,) * count
    if edges:
        edges.remove(data.draw(st.sampled_from(edges)))
        assert not is_chain(count, edges)


def test_no_steps_have_no_order():
    assert find_ancestors(0, []) == ()
    assert find_unordered(0, []) == ()
    assert reduce_edges(0, []) == ()


@settings(max_examples=100)
@given(edge_lists())
def test_ancestors_are_the_closure(case: tuple[int, list[tuple[int, int]]]):
    count, edges = case
    assert as_pairs(find_ancestors(count, edges)) == find_all_orders(count, edges)


@settings(max_examples=100)
@given(edge_lists())
def test_unordered_is_what_the_closure_leaves(case: tuple[int, list[tuple[int, int]]]):
    count, edges = case
    ordered = find_all_orders(count, edges)
    ordered |= {(second, first) for first, second in ordered} | {(i, i) for i in range(count)}
    everything = {(one, other) for one in range(count) for other in range(count)}
    assert as_pairs(find_unordered(count, edges)) == everything - ordered


@settings(max_examples=100)
@given(edge_lists())
def test_reduced_edges_are_the_fewest_with_the_same_order(
    case: tuple[int, list[tuple[int, int]]],
):
    count, edges = case
    reduced = reduce_edges(count, edges)
    assert list(reduced) == sorted(set(reduced))
    assert find_all_orders(count, reduced) == find_all_orders(count, edges)
    for edge in reduced:
        rest = [other for other in reduced if other != edge]
        assert edge not in find_all_orders(count, rest)


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (-1, 1), (0, 3)])
@pytest.mark.parametrize("function", [find_ancestors, find_unordered, reduce_edges])
def test_an_edge_that_does_not_go_forward_is_refused(function: Any, edge: tuple[int, int]):
    with pytest.raises(InternalError, match=f"edge {edge[0]} -> {edge[1]} does not go forward"):
        function(3, [edge])
