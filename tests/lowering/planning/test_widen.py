"""Levels: which steps are side by side, and which wait for memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import kernel, make_frame, spec, use, xla_programs
from tracegraph.lowering.assemble import XlaRegion, assemble
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import DeviceProgram, ExecutableCall
from tracegraph.lowering.planning import widen as widen_module
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.planning.widen import widen

PLENTY = 1 << 20


def program(*steps: Any, outputs: str = "y") -> DeviceProgram:
    """Returns steps one after another, with the input ``x``; every buffer takes 256 bytes."""
    frame = make_frame([spec("x")], [spec(name) for name in outputs.split()])
    listed = {buffer.name for buffer in frame.buffers}
    named = dict.fromkeys(each.buffer for step in steps for each in step.writes)
    more = [spec(name) for name in named if name not in listed]
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    return dataclasses.replace(frame, buffers=(*frame.buffers, *more), steps=steps, edges=edges)


def show(wide: DeviceProgram) -> str:
    """Returns the levels, as ``ab c``."""
    depth = [0] * len(wide.steps)
    for first, second in wide.edges:
        depth[second] = max(depth[second], depth[first] + 1)
    levels = [""] * (max(depth) + 1)
    for step, level in zip(wide.steps, depth, strict=True):
        levels[level] += step.name
    return " ".join(levels)


TWO_CHAINS = program(
    kernel("a", "x", "a"),
    kernel("b", "a", "b"),
    kernel("c", "b", "y"),
    kernel("d", "x", "d"),
    kernel("e", "d", "e"),
    kernel("f", "e", "z"),
    outputs="y z",
)


# What is made again of ``x`` for each of three stages, as for the layers of a checkpointed model.
STAGES = program(
    kernel("a", "x", "a"),
    kernel("m", "x", "m"),
    kernel("b", "a m", "b"),
    kernel("n", "x", "n"),
    kernel("c", "b n", "c"),
    kernel("o", "x", "o"),
    kernel("d", "c o", "y"),
)


def find_depth(wide: DeviceProgram) -> int:
    """Returns how many nodes the longest chain of the planned graph has."""
    (stage,) = build_graph(wide, plan_memory("f", find_lifetimes(wide))).stages
    depth = [1] * len(stage.nodes)
    for first, second in sorted(stage.edges, key=lambda edge: edge[1]):
        depth[second] = max(depth[second], depth[first] + 1)
    return max(depth)


def test_reuse_of_memory_makes_the_chain_longer_one_after_another_but_not_in_levels():
    assert find_depth(TWO_CHAINS) > 3
    wide = widen(TWO_CHAINS, PLENTY).dense
    assert show(wide) == "ad be cf"
    assert find_depth(wide) == 3


def test_what_needs_more_memory_waits_until_it_is_due():
    # All at once, the four of the first level would be alive together.
    assert show(widen(STAGES, PLENTY).dense) == "am bn co d"


def test_what_needs_no_more_memory_is_due_at_once():
    # ``s`` ends the life of what it reads; nothing waits for it.
    steps = [
        kernel("a", "x", "a e"),
        kernel("b", "a", "b"),
        kernel("c", "b", "c"),
        kernel("d", "c", "y"),
        kernel("s", "e", "z"),
    ]
    assert show(widen(program(*steps, outputs="y z"), PLENTY).dense) == "a bs c d"


def test_what_xla_has_ahead_of_the_longest_chain_is_due():
    # ``s`` adds to the memory, and stands between ``b`` and ``c``.
    steps = [
        kernel("a", "x", "a"),
        kernel("b", "a", "b"),
        kernel("s", "a", "z"),
        kernel("c", "a b", "c"),
        kernel("d", "c", "d"),
        kernel("e", "a d", "y"),
    ]
    assert show(widen(program(*steps, outputs="y z"), PLENTY).dense) == "a b c ds e"


def test_bytes_rest_for_a_level_where_there_is_room():
    wide = widen(STAGES, PLENTY)
    assert wide.roomy.steps == wide.dense.steps
    roomy, dense = ({each.name: each.last for each in find_lifetimes(order)} for order in wide)
    # ``a`` and ``m`` are read in the second level, which ends with step 3, the third one with 5.
    assert [dense[name] for name in "am"] == [3, 3]
    assert [roomy[name] for name in "am"] == [5, 5]


def test_steps_wait_for_room():
    # The input takes one buffer of 256 bytes, a step what it reads and writes.
    assert show(widen(TWO_CHAINS, 2 * 256).dense) == "a b c d e f"
    assert show(widen(TWO_CHAINS, 3 * 256).dense) == "ad b c e f"
    assert show(widen(TWO_CHAINS, 5 * 256).dense) == "ad be cf"


def test_without_any_room_the_order_is_xla_s():
    wide = widen(TWO_CHAINS, 0).dense
    assert wide.steps == TWO_CHAINS.steps
    assert wide.edges == TWO_CHAINS.edges


def test_a_level_has_a_greatest_width(monkeypatch: Any):
    monkeypatch.setattr(widen_module, "MAX_WIDTH", 2)
    steps = [kernel(name, "x", name) for name in "abcde"]
    wide = widen(program(*steps, outputs="a b c d e"), PLENTY)
    assert show(wide.dense) == "ab cd e"


def test_programs_with_calls_stay_as_they_are():
    call = ExecutableCall("e", None, (use("x"),), (use("y"),), is_captured=False)
    eager = program(call, kernel("a", "x", "t"))
    assert widen(eager, PLENTY) == (eager, eager)


def test_a_program_without_steps():
    assert widen(program(outputs=""), PLENTY).roomy.steps == ()


@settings(max_examples=60)
@given(xla_programs(), st.integers(0, 4000))
def test_all_steps_stay_in_an_order_that_the_values_allow(drawn: Any, budget_bytes: int):
    compiled, region, donated = drawn
    names = [each.name for each in region.inputs[:donated]]
    frame = make_frame(region.inputs, region.outputs, names)
    serial = assemble([XlaRegion(region, compiled, donated)], (), into=frame)
    wide, dense = widen(serial, budget_bytes)
    assert sorted(map(repr, wide.steps)) == sorted(map(repr, serial.steps))
    verify_order(wide)
    verify_order(dense)
    # Steps that share bytes keep their order.
    position = {id(step): index for index, step in enumerate(wide.steps)}
    for second, after in enumerate(serial.steps):
        for before in serial.steps[:second]:
            is_bound = any(
                one.overlaps(other) and one.nbytes and other.nbytes
                for one, other in [
                    *((w, r) for w in before.writes for r in (*after.reads, *after.writes)),
                    *((r, w) for r in before.reads for w in after.writes),
                ]
            )
            assert not is_bound or position[id(before)] < position[id(after)]
