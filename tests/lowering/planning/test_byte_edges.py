"""Edges from bytes of the arena, against every pair of steps that shares one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import kernel, spec, use
from tracegraph.lowering.device_program import DeviceStep, ExecutableCall, Step
from tracegraph.lowering.planning.byte_edges import find_edges, lay_apart, verify_edges
from tracegraph.lowering.planning.step_order import find_ancestors, reduce_edges
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import InternalError

# Two buffers that share the bytes from 40 to 64 of the arena.
ADDRESSES = {"a": 0, "b": 40, "c": 256}


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    ranges = st.builds(
        BufferUse, st.sampled_from("abc"), st.sampled_from([0, 8, 30, 60]), st.integers(0, 40)
    )
    uses = st.lists(ranges, max_size=2).map(tuple)
    count = draw(st.integers(0, 9))
    return [ExecutableCall(f"s{index}", None, draw(uses), draw(uses)) for index in range(count)]


def list_bytes(uses: Sequence[BufferUse]) -> set[int]:
    return {ADDRESSES[each.buffer] + each.offset + i for each in uses for i in range(each.nbytes)}


def find_pairs(steps: Sequence[Step]) -> set[tuple[int, int]]:
    """Slow and obvious: every pair with a common byte that one of them writes."""
    reads = [list_bytes(step.reads) for step in steps]
    writes = [list_bytes(step.writes) for step in steps]
    return {
        (first, second)
        for second in range(len(steps))
        for first in range(second)
        if writes[first] & (reads[second] | writes[second]) or reads[first] & writes[second]
    }


@settings(max_examples=150)
@given(step_lists())
def test_every_pair_that_shares_a_byte_is_ordered_and_no_other(steps: list[Step]):
    edges = find_edges(steps, ADDRESSES)
    pairs = find_pairs(steps)
    assert pairs >= set(edges)
    ancestors = find_ancestors(len(steps), edges)
    assert all(ancestors[second] >> first & 1 for first, second in pairs)
    verify_edges(steps, reduce_edges(len(steps), edges), ADDRESSES, name="f")


@settings(max_examples=100)
@given(step_lists(), st.randoms(use_true_random=False))
def test_the_check_agrees_with_all_pairs_when_an_edge_is_lost(steps: list[Step], random):
    edges = list(reduce_edges(len(steps), find_edges(steps, ADDRESSES)))
    if not edges:
        return
    edges.remove(random.choice(edges))
    ancestors = find_ancestors(len(steps), edges)
    assert not all(ancestors[second] >> first & 1 for first, second in find_pairs(steps))
    with pytest.raises(InternalError, match="does not wait for it"):
        verify_edges(steps, edges, ADDRESSES, name="f")


def test_a_buffer_that_takes_the_bytes_of_another_waits_for_all_its_uses():
    steps = [
        kernel("make", "", "a"),
        kernel("read", "a[40:50]", "c[0:8]"),
        kernel("also", "a[44:64]", "c[8:16]"),
        kernel("reuse", "", "b[0:8]"),
        kernel("apart", "", "b[30:40]"),
    ]
    # `reuse` takes bytes 40 to 48, which both have read; `apart` lies behind them.
    assert find_edges(steps, ADDRESSES) == ((0, 1), (0, 2), (1, 3), (2, 3))


@pytest.mark.parametrize("missing", range(4))
def test_a_lost_edge_is_found(missing: int):
    steps = [
        kernel("make", "", "a"),
        kernel("read", "a", "c[0:8]"),
        kernel("also", "a", "c[8:16]"),
        kernel("overwrite", "", "a"),
    ]
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    verify_edges(steps, edges, ADDRESSES, name="f")
    left = edges[:missing] + edges[missing + 1 :]
    with pytest.raises(InternalError, match="does not wait for it") as raised:
        verify_edges(steps, left, ADDRESSES, name="f")
    first, second = edges[missing]
    assert f"`{steps[second].name}` shares bytes with `{steps[first].name}`" in raised.value.what
    assert raised.value.where == f"graph of `f`, steps {first} and {second}"


def test_readers_run_side_by_side_and_empty_ranges_touch_nothing():
    steps = [kernel("a", "a", "b[30:40]"), kernel("b", "a", "c"), empty("e"), empty("f")]
    assert find_edges(steps, ADDRESSES) == ()
    verify_edges(steps, (), ADDRESSES, name="f")


def empty(name: str) -> DeviceStep:
    nothing = BufferUse("a", 8, 0)
    return DeviceStep(kernel(name, "a[8:8]", "a[8:8]").node, (nothing,), (nothing,))


def test_a_step_does_not_wait_for_itself():
    assert find_edges([kernel("a", "a c", "a c")], ADDRESSES) == ()
    verify_edges([kernel("a", "a c", "a c")], (), ADDRESSES, name="f")
    assert use("a[8:8]").nbytes == 0


def test_buffers_that_lie_apart_share_no_byte():
    addresses = lay_apart([spec("a", 64), spec("nothing", 0), spec("b", 8), spec("c", 1)])
    assert addresses == {"a": 0, "nothing": 64, "b": 64, "c": 72}
    steps = [kernel(name, "", f"{name}[0:{nbytes}]") for name, nbytes in (("a", 64), ("b", 8))]
    assert find_edges(steps, addresses) == ()
    verify_edges(steps, (), addresses, name="f")
