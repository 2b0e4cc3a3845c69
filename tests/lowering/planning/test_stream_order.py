"""The declared order of streams against the bytes that steps share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import spec
from tracegraph.lowering.device_program import BufferUse, Copy, DeviceProgram, ExecutableCall
from tracegraph.lowering.planning import stream_order as stream_order_module
from tracegraph.lowering.planning.step_order import find_ancestors
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.errors import CaptureError, InternalError, TracegraphError


def make_call(name: str, reads: Any = (), writes: Any = (), stream: int = 0) -> ExecutableCall:
    def as_use(use: Any) -> BufferUse:
        return BufferUse(use, 0, 64) if isinstance(use, str) else BufferUse(*use)

    return ExecutableCall(name, None, tuple(map(as_use, reads)), tuple(map(as_use, writes)), stream)


def make_program(*steps: Any, edges: Any = ()) -> DeviceProgram:
    names = dict.fromkeys(use.buffer for step in steps for use in (*step.reads, *step.writes))
    return DeviceProgram("f", tuple(map(spec, names)), steps, tuple(edges), (), ())


@st.composite
def programs(draw: st.DrawFn) -> DeviceProgram:
    uses = st.builds(BufferUse, st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 4))
    some_uses = st.lists(uses, max_size=2).map(tuple)
    steps = [
        ExecutableCall(f"s{index}", None, draw(some_uses), draw(some_uses))
        for index in range(draw(st.integers(0, 8)))
    ]
    return make_program(*steps)


def find_conflicts(program: DeviceProgram) -> set[tuple[int, int]]:
    """Slow and obvious: every pair with a common byte that one of them writes."""

    def list_bytes(uses: Any) -> set[tuple[str, int]]:
        return {(use.buffer, use.offset + i) for use in uses for i in range(use.nbytes)}

    reads = [list_bytes(step.reads) for step in program.steps]
    writes = [list_bytes(step.writes) for step in program.steps]
    return {
        (first, second)
        for second in range(len(reads))
        for first in range(second)
        if writes[first] & (reads[second] | writes[second]) or reads[first] & writes[second]
    }


def report(program: DeviceProgram) -> str:
    """Returns where the error of an order says that waits are missing; empty for no error."""
    try:
        verify_order(program)
    except TracegraphError as error:
        return error.where
    return ""


RAW, WAR, WAW = "read after write", "write after read", "write after write"


@pytest.mark.parametrize(
    ("steps", "hazards"),
    [
        ([make_call("a", [], ["x"]), make_call("b", ["x"])], [(RAW, 0, 1)]),
        ([make_call("a", ["x"]), make_call("b", [], ["x"])], [(WAR, 0, 1)]),
        ([make_call("a", [], ["x"]), make_call("b", [], ["x"])], [(WAW, 0, 1)]),
        ([make_call("a", ["x"]), make_call("b", ["x"])], []),
        ([make_call("a", [], ["x"]), make_call("b", ["y"])], []),
        ([make_call("a", [], [("x", 0, 8)]), make_call("b", [("x", 8, 8)])], []),
        ([make_call("a", [], [("x", 0, 9)]), make_call("b", [("x", 8, 8)])], [(RAW, 0, 1)]),
        ([make_call("a", [], [("x", 0, 9)]), make_call("b", [("x", 3, 0)])], []),
        ([make_call("a", ["x"], ["x"]), make_call("b", ["x"], ["x"])],
         [(RAW, 0, 1), (WAR, 0, 1), (WAW, 0, 1)]),
        # `b` overwrites all that `a` wrote, so only `b` matters to `c`.
        ([make_call("a", [], ["x"]), make_call("b", [], ["x"]), make_call("c", ["x"])],
         [(WAW, 0, 1), (RAW, 1, 2)]),
        # `b` overwrites half of it, so both do.
        ([make_call("a", [], ["x"]), make_call("b", [], [("x", 0, 32)]), make_call("c", ["x"])],
         [(WAW, 0, 1), (RAW, 0, 2), (RAW, 1, 2)]),
        # `c` waits for `b`, and through it for `a`.
        ([make_call("a", [], ["x"]), make_call("b", ["x"]), make_call("c", [], ["x"])],
         [(RAW, 0, 1), (WAR, 1, 2)]),
        ([Copy("a", BufferUse("y", 0, 8), BufferUse("x", 0, 8)), make_call("b", [], ["y"])],
         [(WAR, 0, 1)]),
    ],
)  # fmt: skip
def test_the_waits_that_are_missing_are_named(steps: list[Any], hazards: list[Any]):
    named = report(make_program(*steps)).split("; ")
    assert [
        f"{kind} of `{'y' if isinstance(steps[0], Copy) else 'x'}`" for kind, _, _ in hazards
    ] == [each.partition("): ")[2].rpartition("): ")[2] for each in named if each]
    assert [(f"step {first} ", f"step {second} ") for _, first, second in hazards] == [
        (each[each.index("step ") :][:7], each[each.rindex("step ") :][:7])
        for each in named
        if each
    ]


@settings(max_examples=150)
@given(programs(), st.data())
def test_the_check_of_the_order_finds_what_a_look_at_every_pair_finds(
    program: DeviceProgram, data: st.DataObject
):
    count = len(program.steps)
    pairs = [(first, second) for second in range(count) for first in range(second)]
    edges = [pair for pair in pairs if data.draw(st.booleans())]
    ancestors = find_ancestors(count, edges)
    is_ordered = all(ancestors[second] >> first & 1 for first, second in find_conflicts(program))
    assert bool(report(make_program(*program.steps, edges=edges))) is not is_ordered


def test_a_missing_wait_that_is_not_found_is_an_error_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(stream_order_module, "find_edges", lambda steps, addresses: ())
    steps = make_call("a", [], ["x"]), make_call("b", ["x"], stream=1)
    assert report(make_program(*steps)).endswith("step 1 `b` (stream 1): read after write of `x`")


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
    with pytest.raises(InternalError, match="please report this text"):
        verify_order(make_program(make_call("a", [], ["x"]), make_call("b", ["x"])))
