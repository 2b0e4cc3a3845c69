"""Declared order and byte-range hazards of steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegraph.lowering.device_program import (
    BufferUse,
    Copy,
    DeviceProgram,
    ExecutableCall,
)
from tracegraph.lowering.planning.stream_order import (
    Hazard,
    HazardKind,
    find_ancestors,
    find_hazards,
    reduce_edges,
    verify_order,
)
from tracegraph.runtime.errors import CaptureError

RAW, WAR, WAW = HazardKind


def make_call(name: str, reads: Any = (), writes: Any = (), stream: int = 0) -> ExecutableCall:
    def as_use(use: Any) -> BufferUse:
        return BufferUse(use, 0, 64) if isinstance(use, str) else BufferUse(*use)

    return ExecutableCall(name, None, tuple(map(as_use, reads)), tuple(map(as_use, writes)), stream)


def make_program(*steps: Any, edges: Any = ()) -> DeviceProgram:
    return DeviceProgram("f", (), steps, tuple(edges), (), ())


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 12))
    pairs = [(first, second) for second in range(count) for first in range(second)]
    return count, draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []


@st.composite
def programs(draw: st.DrawFn) -> DeviceProgram:
    uses = st.builds(BufferUse, st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 4))
    some_uses = st.lists(uses, max_size=2).map(tuple)
    steps = [
        ExecutableCall(f"s{index}", None, draw(some_uses), draw(some_uses))
        for index in range(draw(st.integers(0, 8)))
    ]
    return make_program(*steps)


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


def test_no_steps_have_no_order():
    assert find_ancestors(0, []) == ()
    assert reduce_edges(0, []) == ()
    assert find_hazards(make_program()) == ()
    verify_order(make_program())


@settings(max_examples=100, deadline=None)
@given(edge_lists())
def test_ancestors_are_the_closure(case: tuple[int, list[tuple[int, int]]]):
    count, edges = case
    assert as_pairs(find_ancestors(count, edges)) == find_all_orders(count, edges)


@settings(max_examples=100, deadline=None)
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
@pytest.mark.parametrize("function", [find_ancestors, reduce_edges])
def test_an_edge_that_does_not_go_forward_is_refused(function: Any, edge: tuple[int, int]):
    with pytest.raises(CaptureError, match=f"edge {edge[0]} -> {edge[1]} does not go forward") as e:
        function(3, [edge])
    assert e.value.fix == "internal error in tracegraph: please report this text"


@pytest.mark.parametrize(
    ("steps", "hazards"),
    [
        ([make_call("a", [], ["x"]), make_call("b", ["x"])], [Hazard(RAW, 0, 1, "x")]),
        ([make_call("a", ["x"]), make_call("b", [], ["x"])], [Hazard(WAR, 0, 1, "x")]),
        ([make_call("a", [], ["x"]), make_call("b", [], ["x"])], [Hazard(WAW, 0, 1, "x")]),
        ([make_call("a", ["x"]), make_call("b", ["x"])], []),
        ([make_call("a", [], ["x"]), make_call("b", ["y"])], []),
        ([make_call("a", [], [("x", 0, 8)]), make_call("b", [("x", 8, 8)])], []),
        ([make_call("a", [], [("x", 0, 9)]), make_call("b", [("x", 8, 8)])],
         [Hazard(RAW, 0, 1, "x")]),
        ([make_call("a", [], [("x", 0, 9)]), make_call("b", [("x", 3, 0)])], []),
        ([make_call("a", ["x"], ["x"]), make_call("b", ["x"], ["x"])],
         [Hazard(RAW, 0, 1, "x"), Hazard(WAR, 0, 1, "x"), Hazard(WAW, 0, 1, "x")]),
        # `b` overwrites all that `a` wrote, so only `b` matters to `c`.
        ([make_call("a", [], ["x"]), make_call("b", [], ["x"]), make_call("c", ["x"])],
         [Hazard(WAW, 0, 1, "x"), Hazard(RAW, 1, 2, "x")]),
        # `b` overwrites half of it, so both do.
        ([make_call("a", [], ["x"]), make_call("b", [], [("x", 0, 32)]), make_call("c", ["x"])],
         [Hazard(WAW, 0, 1, "x"), Hazard(RAW, 0, 2, "x"), Hazard(RAW, 1, 2, "x")]),
    ],
)  # fmt: skip
def test_hazards(steps: list[ExecutableCall], hazards: list[Hazard]):
    assert list(find_hazards(make_program(*steps))) == hazards


def test_a_copy_reads_its_source_and_writes_its_target():
    copy = Copy("c", BufferUse("x", 0, 8), BufferUse("y", 0, 8))
    program = make_program(make_call("a", [], ["x"]), copy, make_call("b", ["y"]))
    assert find_hazards(program) == (Hazard(RAW, 0, 1, "x"), Hazard(RAW, 1, 2, "y"))


@settings(max_examples=150, deadline=None)
@given(programs())
def test_hazards_order_the_same_steps_as_all_conflicting_pairs(program: DeviceProgram):
    def touches(uses: Any, others: Any) -> bool:
        return any(
            one.buffer == other.buffer
            and set(range(one.offset, one.offset + one.nbytes))
            & set(range(other.offset, other.offset + other.nbytes))
            for one in uses
            for other in others
        )

    count = len(program.steps)
    conflicts = {
        (first, second)
        for second in range(count)
        for first in range(second)
        if touches(program.steps[first].writes, program.steps[second].reads)
        or touches(program.steps[first].reads, program.steps[second].writes)
        or touches(program.steps[first].writes, program.steps[second].writes)
    }
    found = {(hazard.first, hazard.second) for hazard in find_hazards(program)}
    assert found <= conflicts
    assert find_all_orders(count, found) == find_all_orders(count, conflicts)


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_the_check_of_the_order_finds_what_a_look_at_every_hazard_finds(
    program: DeviceProgram, data: st.DataObject
):
    count = len(program.steps)
    pairs = [(first, second) for second in range(count) for first in range(second)]
    edges = [pair for pair in pairs if data.draw(st.booleans())]
    needed = {(hazard.first, hazard.second) for hazard in find_hazards(program)}
    program = make_program(*program.steps, edges=edges)
    if needed <= find_all_orders(count, edges):
        verify_order(program)
        return
    with pytest.raises(CaptureError):
        verify_order(program)


def test_steps_side_by_side_may_touch_different_bytes_of_a_buffer():
    steps = [make_call("a", [], [("x", 0, 8)]), make_call("b", [], [("x", 8, 8)], stream=1)]
    verify_order(make_program(*steps))
    steps.append(make_call("c", [("x", 4, 8)], stream=2))
    with pytest.raises(CaptureError) as raised:
        verify_order(make_program(*steps, edges=[(0, 2)]))
    assert raised.value.where == (
        "`f`, step 1 `b` (stream 1), step 2 `c` (stream 2): read after write of `x`"
    )


def test_order_through_a_third_step_covers_a_hazard():
    steps = make_call("a", [], ["x"]), make_call("wait"), make_call("b", ["x"], stream=1)
    verify_order(make_program(*steps, edges=[(0, 1), (1, 2)]))


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (((), "x"), ("x", ()), "`b` on stream 1 reads `x` without waiting for `a` on stream 0, "
                               "which writes it"),
        (("x", ()), ((), "x"), "`b` on stream 1 overwrites `x` without waiting for `a` on stream "
                               "0, which reads it"),
        (((), "x"), ((), "x"), "`b` on stream 1 overwrites `x` without waiting for `a` on stream "
                               "0, which writes it"),
    ],
)  # fmt: skip
def test_a_missing_wait_is_named(first: Any, second: Any, what: str):
    program = make_program(make_call("a", *first), make_call("b", *second, stream=1))
    with pytest.raises(CaptureError) as raised:
        verify_order(program)
    error = raised.value
    assert error.what == what
    assert error.where.startswith("`f`, step 0 `a` (stream 0), step 1 `b` (stream 1): ")
    assert error.why.startswith("streams run side by side")
    assert error.fix.startswith("let stream 1 wait for stream 0 before `b`")
    assert error.anchor == "stream-wait"


def test_all_missing_waits_are_reported_at_once():
    steps = [make_call("a", [], ["x"])]
    steps += [make_call(f"b{index}", ["x"], stream=index) for index in range(1, 11)]
    with pytest.raises(CaptureError) as raised:
        verify_order(make_program(*steps))
    assert raised.value.where.count("read after write of `x`") == 8
    assert raised.value.where.endswith("and 2 more")


def test_a_missing_edge_within_one_stream_is_an_internal_error():
    with pytest.raises(CaptureError, match="please report this text"):
        verify_order(make_program(make_call("a", [], ["x"]), make_call("b", ["x"])))
