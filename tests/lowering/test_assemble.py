"""Assembly: whose buffer each of XLA's allocations becomes, and programs that still do the same."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import (
    allocation,
    fill,
    kernel,
    list_traces,
    make_frame,
    make_region,
    run_steps,
    shuffle_order,
    spec,
    use,
    xla_programs,
)
from tracegraph.lowering import build_graph as build_graph_module
from tracegraph.lowering.assemble import XlaRegion, assemble
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import Copy, DeviceProgram, DeviceStep, ExecutableCall
from tracegraph.lowering.plan_program import _find_whole_peak
from tracegraph.lowering.planning import forward_copies as forward_copies_module
from tracegraph.lowering.planning import lanes
from tracegraph.lowering.planning.drop_steps import drop_unread
from tracegraph.lowering.planning.forward_copies import forward_copies
from tracegraph.lowering.planning.lanes import Arrangement, arrange_in_lanes
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.planning.widen import widen
from tracegraph.lowering.request import BufferSpec, OutputSpec, Place
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.definition.nodes import FillNode
from tracegraph.runtime.errors import InternalError, UnsupportedError

PARAMETER, CONSTANT = AllocationKind.PARAMETER, AllocationKind.CONSTANT
OUTPUT, TEMPORARY, UNUSED = (
    AllocationKind.OUTPUT,
    AllocationKind.TEMPORARY,
    AllocationKind.UNUSED,
)
P = (allocation("#p", PARAMETER, parameter=0), allocation("#q", PARAMETER, parameter=1))
CONTENT = allocation("#c", CONSTANT, content=bytes(64))
X, Y = spec("x"), spec("y")


def place(
    steps: Sequence[DeviceStep],
    more: Sequence[Allocation],
    results: Sequence[tuple[str, BufferSpec]],
    *,
    in_place: int = 0,
    parameter_bytes: int = 64,
    **options: Any,
) -> DeviceProgram:
    """Assembles one region with the inputs ``x`` and ``y``; results are allocation and buffer."""
    outputs = [buffer for _, buffer in results]
    first = dataclasses.replace(P[0], nbytes=parameter_bytes)
    allocations = (first, *P[1:], *more)
    program = XlaProgram("r", allocations, tuple(steps), tuple(name for name, _ in results))
    region = XlaRegion(make_region("r", [X, Y], outputs), program, in_place)
    donated = [each.name for each in (X, Y)[:in_place]]
    return assemble([region], (), into=make_frame([X, Y], outputs, donated), **options)


def show(program: DeviceProgram) -> list[str]:
    """Returns the steps as text: name(reads) -> writes."""

    def name(each: Any) -> str:
        is_plain = each.offset == 0 and each.nbytes == 64
        return each.buffer if is_plain else f"{each.buffer}[{each.offset}:+{each.nbytes}]"

    return [
        f"{step.name}({' '.join(map(name, step.reads))}) -> {' '.join(map(name, step.writes))}"
        for step in program.steps
    ]


def test_a_result_lies_in_its_own_buffer_and_the_rest_in_temporaries():
    steps = [kernel("a", "#p #q", "#t"), kernel("b", "#t #c", "#o")]
    more = [allocation("#o", OUTPUT), allocation("#t", TEMPORARY, 128), CONTENT]
    program = place(steps, more, [("#o", spec("n"))])
    assert show(program) == ["a(x y) -> r.temp.0", "b(r.temp.0 r.constant.0) -> n"]
    buffers = {buffer.name: buffer for buffer in program.buffers}
    assert list(buffers) == ["x", "y", "n", "r.constant.0", "r.temp.0"]
    assert buffers["r.constant.0"].content == bytes(64)
    assert buffers["r.temp.0"].nbytes == 64
    assert program.edges == ((0, 1),)


def test_an_input_is_updated_in_place():
    steps = [kernel("a", "#p #q", "#p"), kernel("b", "#p", "#o")]
    results = [("#p", X), ("#o", spec("n"))]
    program = place(steps, [allocation("#o", OUTPUT)], results, in_place=1)
    assert show(program) == ["a(x y) -> x", "b(x) -> n"]


COPIED = {
    "two results in one place": (
        [kernel("a", "#p", "#o")],
        [("#o", spec("n")), ("#o", spec("m"))],
        ["a(x) -> n", "copy_m(n) -> m"],
    ),
    "an input is returned under another name": ([], [("#p", spec("n"))], ["copy_n(x) -> n"]),
    "a constant is the result": ([], [("#c", spec("n"))], ["copy_n(r.constant.0) -> n"]),
    "XLA does not update in place": (
        [kernel("a", "#p", "#o"), kernel("b", "#p", "#n")],
        [("#o", X), ("#n", spec("n"))],
        ["a(x) -> r.temp.0", "b(x) -> n", "copy_x(r.temp.0) -> x"],
    ),
    "the old value of an updated input is a result, too": (
        [kernel("a", "#p", "#o")],
        [("#o", X), ("#p", spec("n"))],
        ["a(x) -> r.temp.0", "copy_n(x) -> n", "copy_x(r.temp.0) -> x"],
    ),
    "the result is the beginning of more": (
        [kernel("a", "#p", "#o[0:128]")],
        [("#o", spec("n"))],
        ["a(x) -> r.temp.0[0:+128]", "copy_n(r.temp.0) -> n"],
    ),
}


@pytest.mark.parametrize("case", COPIED)
def test_a_result_that_lies_elsewhere_is_copied_at_the_end(case: str):
    steps, results, text = COPIED[case]
    more = [allocation("#o", OUTPUT, 128), allocation("#n", OUTPUT), CONTENT]
    assert show(place(steps, more, results, in_place=1)) == text


def test_other_values_in_a_result_s_allocation_are_temporaries():
    steps = [
        kernel("a", "#p", "#o[0:128]"),
        kernel("b", "#o[0:128]", "#t"),
        kernel("c", "#t", "#o"),
    ]
    more = [allocation("#o", OUTPUT, 128), allocation("#t", TEMPORARY)]
    program = place(steps, more, [("#o", spec("n"))])
    assert show(program) == [
        "a(x) -> r.temp.0[0:+128]",
        "b(r.temp.0[0:+128]) -> r.temp.1",
        "c(r.temp.1) -> n",
    ]
    # As XLA laid it out the result's buffer is too small for what was there before.
    whole = place(steps, more, [("#o", spec("n"))], is_whole=True)
    assert show(whole)[-1] == "copy_n(r.temp.0) -> n"


def test_what_xla_leaves_undefined_is_zero():
    more = [allocation("#o", OUTPUT), allocation("#t", TEMPORARY), allocation("#e", OUTPUT)]
    results = [("#o", spec("n")), ("#e", spec("e"))]
    program = place([kernel("a", "#t", "#o")], more, results)
    assert show(program) == ["empty_r.temp.0() -> r.temp.0", "empty_e() -> e", "a(r.temp.0) -> n"]
    fills = [step.node for step in program.steps if isinstance(step, DeviceStep)][:2]
    assert all(isinstance(node, FillNode) for node in fills)


def test_a_buffer_that_is_read_beyond_what_was_written_is_zero_first():
    steps = [kernel("a", "#p", "#t[0:32]"), kernel("b", "#t", "#o"), kernel("c", "#u", "#u")]
    more = [allocation("#o", OUTPUT), TEMP, allocation("#u", TEMPORARY)]
    program = place(steps, more, [("#o", spec("n"))])
    # `c` may only write what it is said to read, too.
    assert [step.name for step in program.steps] == ["empty_r.temp.0", "a", "b", "c"]


def test_empty_ranges_have_an_address_and_no_order():
    more = [allocation("#o", OUTPUT, 0), allocation("#u", UNUSED, 0), TEMP]
    results = [("#o", spec("n", 0)), ("#u", spec("m", 0))]
    step = kernel("a", "#p #t[8:8] #o[0:0] #u[0:0]", "#t")
    # XLA's reader names no empty range, but the kernel has a parameter for it.
    step = dataclasses.replace(step, reads=(use("#p"),))
    program = place([step], more, results)
    plan = plan_memory("f", find_lifetimes(program))
    assert show(program) == ["a(x) -> r.temp.0"]
    (moved,) = program.steps
    assert isinstance(moved, DeviceStep)
    assert moved.node.arguments == ("x", "r.empty", "r.temp.0")
    assert plan.arena_bytes == 3 * 256
    assert build_graph(program, plan).edge_count == 0


TEMP = allocation("#t", TEMPORARY, 512)


def test_an_address_in_a_part_keeps_its_remainder_by_256():
    steps = [kernel("a", "#p", "#t[272:336]"), kernel("b", "#t[272:336]", "#o")]
    program = place(steps, [allocation("#o", OUTPUT), TEMP], [("#o", spec("n"))])
    assert show(program)[0] == "a(x) -> r.temp.0[16:+64]"


def test_regions_wait_for_each_other_through_those_without_steps():
    def region(name: str, *steps: DeviceStep, stream: int) -> XlaRegion:
        program = XlaProgram("r", (*P, TEMP), steps, ())
        placed = dataclasses.replace(make_region(name, [X, Y], []), place=Place(stream))
        return XlaRegion(placed, program)

    regions = [
        region("a", kernel("a", "#p", "#t"), kernel("b", "#t", "#t"), stream=1),
        region("empty", stream=0),
        region("c", kernel("c", "#p", "#t"), stream=2),
        ExecutableCall("e", None, (use("x"),), (use("t"),), 3, is_captured=False),
    ]
    frame = dataclasses.replace(
        make_frame([X, Y], [spec("t")]), steps=(Copy("update_y", use("t"), use("y")),)
    )
    program = assemble(regions, [(0, 1), (1, 2), (2, 3)], into=frame)
    assert [step.name for step in program.steps] == ["a", "b", "c", "e", "update_y"]
    assert [step.stream for step in program.steps] == [1, 1, 2, 3, 0]
    assert program.edges == ((0, 1), (1, 2), (1, 4), (2, 3), (2, 4), (3, 4))
    assert [b.name for b in program.buffers] == ["x", "y", "t", "a.temp.0", "c.temp.0"]
    verify_order(program)


def test_values_of_less_than_a_byte_are_refused():
    packed = BufferSpec("n", (64,), np.dtype(np.uint8))
    with pytest.raises(UnsupportedError, match=r"`n` takes 64 bytes as uint8\[64\], but 32") as it:
        place([kernel("a", "#p", "#o[0:32]")], [allocation("#o", OUTPUT, 32)], [("#o", packed)])
    assert it.value.where == "argument or result of `r`"


def test_results_are_counted():
    program = XlaProgram("r", P, (), ("#p",))
    region = XlaRegion(make_region("r", [X, Y], []), program)
    with pytest.raises(InternalError, match="has 1 results, not 0"):
        assemble([region], (), into=make_frame([X, Y], []))


def make_drawn(drawn: Any) -> tuple[XlaRegion, DeviceProgram]:
    program, region, donated = drawn
    names = [each.name for each in region.inputs[:donated]]
    frame = make_frame(region.inputs, region.outputs, names)
    return XlaRegion(region, program, donated), frame


@settings(max_examples=80)
@given(xla_programs(), st.integers(0, 99))
def test_random_programs_give_the_same_in_every_order_of_the_graph(drawn: Any, seed: int):
    program, region, donated = drawn
    compiled, frame = make_drawn(drawn)
    expected = {(f"#p{i}", b): f"{i}.{b}" for i in range(len(region.inputs)) for b in range(3)}
    run_steps(program.steps, expected, None)
    split, whole = (assemble([compiled], (), into=frame, is_whole=w) for w in (False, True))
    wide, narrow = widen(split, 1 << 20).roomy, widen(split, 0).dense
    # Bytes are drawn, so that no piece starts at a multiple of the usual alignment.
    with unittest.mock.patch.object(forward_copies_module, "ALIGNMENT", 1):
        forwarded = forward_copies(drop_unread(split)).program
    plan = plan_memory("f", find_lifetimes(whole))
    assert plan.arena_bytes >= plan.kept_bytes + _find_whole_peak([compiled])
    for assembled in (split, whole, wide, narrow, forwarded, widen(forwarded, 1 << 20).dense):
        verify_order(assembled)
        plan = plan_memory("f", find_lifetimes(assembled))
        # The graph has the steps in the order of its lanes.
        dealt: list[Sequence[int]] = []

        def keep_order(times: Any, edges: Any, *, has_two: bool, dealt: Any = dealt) -> Arrangement:
            arranged = arrange_in_lanes(times, edges, has_two=has_two)
            dealt.append(arranged.order)
            return arranged

        with (
            unittest.mock.patch.object(build_graph_module, "arrange_in_lanes", keep_order),
            unittest.mock.patch.multiple(lanes, FEWEST=1, MOST=2),
        ):
            definition = build_graph(assembled, plan)
        edges = definition.stages[0].edges if definition.stages else ()
        # What was in the arena before must not show.
        memory: Any = {("arena", i): "poison" for i in range(plan.arena_bytes)}
        for i, each in enumerate(region.inputs):
            memory |= {("arena", plan.offsets[each.name] + b): f"{i}.{b}" for b in range(3)}
        order = shuffle_order(len(assembled.steps), edges, seed)
        nodes = definition.stages[0].nodes if definition.stages else ()
        steps = [assembled.steps[dealt[0][index]] for index in order]
        run_steps(steps, memory, plan.offsets, [nodes[index] for index in order])
        for name, each in zip(program.outputs, region.outputs, strict=True):
            for b in range(each.nbytes):
                wanted = expected.get((name, b))
                found = memory["arena", plan.offsets[each.name] + b]
                assert wanted is None or found == wanted, (assembled, name, b)
        for trace, wanted in list_traces(expected).items():
            assert (isinstance(wanted, list) and None in wanted) or memory[trace] == wanted
        # Inputs that are not updated keep their values.
        for i, each in enumerate(region.inputs[donated:], donated):
            found = [memory["arena", plan.offsets[each.name] + b] for b in range(3)]
            assert found == [f"{i}.{b}" for b in range(3)]


def test_a_zeroed_result_is_filled_where_the_kernel_adds_to_it():
    steps = [fill("z", "#t"), kernel("z", "#p #t", "#t"), kernel("b", "#t", "#o")]
    program = place(steps, [allocation("#o", OUTPUT), TEMP], [("#o", spec("n"))])
    assert show(program) == [
        "z() -> r.temp.0",
        "z(x r.temp.0) -> r.temp.0",
        "b(r.temp.0) -> n",
    ]
    assert program.outputs == (OutputSpec(spec("n")),)
