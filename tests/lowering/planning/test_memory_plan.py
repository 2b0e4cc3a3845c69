"""Offsets in the arena: planned, verified, printed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import GOLDEN
from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.memory_plan import (
    ALIGNMENT,
    NEARLY_LEAST,
    PLACEMENT_ORDERS,
    MemoryPlan,
    align,
    format_plan,
    plan_memory,
    verify_plan,
)
from tracegraph.runtime.errors import InternalError

TRAIN_STEP = (
    Lifetime("state['params']['dense_1']['kernel']", 65536, 0, 5, is_kept=True),
    Lifetime("state['params']['dense_1']['bias']", 512, 0, 5, is_kept=True),
    Lifetime("batch", 100_000, 0, 5, is_kept=True),
    Lifetime("activations_0", 40_000, 0, 2),
    Lifetime("activations_1", 30_000, 1, 4),
    Lifetime("cotangent_1", 30_000, 3, 4),
    Lifetime("mask", 0, 1, 2),
    Lifetime("loss", 4, 4, 5, is_kept=True),
)


def make_many(count: int, *, steps: int, whole: int = 0, seed: int = 0) -> list[Lifetime]:
    numbers = random.Random(seed)
    lifetimes = []
    for index in range(count):
        first, last = sorted((numbers.randrange(steps), numbers.randrange(steps)))
        if index < whole:
            first, last = 0, steps - 1
        lifetimes.append(Lifetime(f"b{index}", numbers.randrange(1 << 16), first, last))
    return lifetimes


@st.composite
def lifetime_lists(draw: st.DrawFn) -> list[Lifetime]:
    steps = draw(st.integers(1, 12))
    spans = st.tuples(st.integers(0, steps - 1), st.integers(0, steps - 1)).map(sorted)
    sizes = st.one_of(st.integers(0, 2000), st.sampled_from([0, 1, 255, 256, 257, 512]))
    rows = draw(st.lists(st.tuples(sizes, spans, st.booleans()), max_size=25))
    return [
        # What is kept lives to the end.
        Lifetime(f"b{i}", size, span[0], steps - 1 if is_kept else span[1], is_kept=is_kept)
        for i, (size, span, is_kept) in enumerate(rows)
    ]


def mark_bytes(plan: MemoryPlan) -> int:
    """Marks each byte of each buffer at each step: slow and obvious. Returns the greatest end."""
    greatest = 0
    marked: dict[tuple[int, int], str] = {}
    for lifetime in plan.lifetimes:
        offset = plan.offsets[lifetime.name]
        for step in range(lifetime.first, lifetime.last + 1):
            for byte in range(offset, offset + lifetime.nbytes):
                assert (step, byte) not in marked, (lifetime.name, marked[step, byte])
                marked[step, byte] = lifetime.name
                greatest = max(greatest, byte + 1)
    return greatest


@settings(max_examples=100)
@given(lifetime_lists())
def test_random_plans_are_right(lifetimes: list[Lifetime]):
    plan = plan_memory("f", lifetimes)
    verify_plan(plan)
    assert mark_bytes(plan) <= plan.arena_bytes
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in plan.offsets.values())
    assert plan.peak_bytes <= plan.arena_bytes <= plan.sum_bytes
    assert plan.lifetimes == tuple(lifetimes)
    assert plan == plan_memory("f", lifetimes)


def place_slowly(lifetimes: list[Lifetime]) -> dict[str, int]:
    """Tries every start in turn and takes that with the least room: slow and obvious."""
    blocks: dict[str, tuple[int, int, Lifetime]] = {}
    for new in lifetimes:
        size = -(-new.nbytes // ALIGNMENT)
        others = [
            (a, b)
            for a, b, other in blocks.values()
            if other.first <= new.last and new.first <= other.last
        ]
        taken = {block for a, b in others for block in range(a, b)}
        end = max(taken, default=-1) + 1
        rooms: dict[int, int] = {}
        for start in range(end):
            if start not in taken and (start == 0 or start - 1 in taken):
                rooms[start] = next(b for b in range(start, end) if b in taken) - start
        fitting = [(room, start) for start, room in rooms.items() if room >= size]
        start = min(fitting)[1] if fitting else end
        blocks[new.name] = (start, start + size, new)
    return {name: start * ALIGNMENT for name, (start, _, _) in blocks.items()}


@settings(max_examples=150)
@given(lifetime_lists())
def test_orders_are_tried_until_one_is_nearly_the_least(lifetimes: list[Lifetime]):
    # What lives during all steps is placed before any order.
    final = max((lifetime.last for lifetime in lifetimes), default=0)
    some = [
        dataclasses.replace(lifetime, is_kept=False)
        for lifetime in lifetimes
        if lifetime.nbytes and (lifetime.first, lifetime.last) != (0, final)
    ]
    if not some:
        return
    plan = plan_memory("f", [*some, Lifetime("whole", 1, 0, final)])
    placed = [place_slowly(sorted(some, key=key)) for key in PLACEMENT_ORDERS]
    ends = [max(offsets[lt.name] + align(lt.nbytes) for lt in some) for offsets in placed]
    best = 0
    for number in (1, 2):
        is_near = ends[best] + ALIGNMENT <= NEARLY_LEAST * plan.peak_bytes
        best = number if not is_near and ends[number] < ends[best] else best
    expected = placed[best]
    assert {name: offset - ALIGNMENT for name, offset in plan.offsets.items()} == {
        **expected,
        "whole": -ALIGNMENT,
    }
    assert plan.arena_bytes == ends[best] + ALIGNMENT


# Placed by size they take one block of 256 bytes more than lives at one step, and none more in the
# order of their steps.
BY_STEPS = (
    Lifetime("a", 3 * ALIGNMENT, 1, 1),
    Lifetime("b", 3 * ALIGNMENT, 1, 3),
    Lifetime("c", 4 * ALIGNMENT, 3, 5),
    Lifetime("d", 2 * ALIGNMENT, 0, 1),
)


@pytest.mark.parametrize(("whole_blocks", "excess_blocks"), [(91, 0), (92, 1), (1000, 1)])
def test_a_hundredth_is_not_searched_for(whole_blocks: int, excess_blocks: int):
    plan = plan_memory("f", [*BY_STEPS, Lifetime("whole", whole_blocks * ALIGNMENT, 0, 5)])
    assert plan.peak_bytes == (whole_blocks + 8) * ALIGNMENT
    assert plan.arena_bytes == plan.peak_bytes + excess_blocks * ALIGNMENT


def test_a_hundredth_is_searched_for_where_it_is_wanted():
    lifetimes = [*BY_STEPS, Lifetime("whole", 1000 * ALIGNMENT, 0, 5)]
    for wanted, found in ((1009, 1009), (1008, 1008), (1007, 1008)):
        plan = plan_memory("f", lifetimes, wanted_bytes=wanted * ALIGNMENT)
        assert plan.arena_bytes == found * ALIGNMENT


@settings(max_examples=150)
@given(lifetime_lists(), st.data())
def test_the_verifier_agrees_with_marking_bytes_on_random_offsets(
    lifetimes: list[Lifetime], data: st.DataObject
):
    lifetimes = [dataclasses.replace(lifetime, is_kept=False) for lifetime in lifetimes]
    offsets = {lifetime.name: ALIGNMENT * data.draw(st.integers(0, 30)) for lifetime in lifetimes}
    plan = MemoryPlan("f", tuple(lifetimes), offsets, arena_bytes=1 << 20)
    try:
        mark_bytes(plan)
    except AssertionError:
        with pytest.raises(InternalError, match="overlap while both live"):
            verify_plan(plan)
    else:
        with pytest.raises(InternalError) as raised:
            verify_plan(plan)
        assert "overlap while both live" not in raised.value.what
        assert "the arena is larger than the sum of its buffers" in raised.value.what


def test_buffers_that_never_live_together_share_bytes():
    plan = plan_memory(
        "f", [Lifetime("a", 1000, 0, 1), Lifetime("b", 1000, 2, 3), Lifetime("c", 1024, 4, 9)]
    )
    assert plan.arena_bytes == plan.peak_bytes == 1024
    assert plan.sum_bytes == 3072
    assert set(plan.offsets.values()) == {0}


def test_buffers_that_meet_at_one_step_do_not_share():
    plan = plan_memory("f", [Lifetime("a", 256, 0, 1), Lifetime("b", 256, 1, 2)])
    assert plan.arena_bytes == 512


# Each of these reaches the peak only with the feature that it is named after.
HARD_CASES = {
    "second order": [(5, 0, 0), (6, 3, 3), (3, 0, 1), (5, 1, 3)],
    "third order": [(4, 0, 0), (6, 4, 4), (4, 2, 4), (3, 0, 3)],
    "tightest gap": [
        (5, 0, 1),
        (2, 2, 3),
        (2, 0, 2),
        (5, 3, 4),
        (4, 3, 3),
        (4, 0, 0),
        (1, 1, 3),
    ],
}


@pytest.mark.parametrize("case", HARD_CASES)
def test_hard_cases_reach_the_peak(case: str):
    rows = HARD_CASES[case]
    lifetimes = [Lifetime(f"b{i}", 256 * n, a, b) for i, (n, a, b) in enumerate(rows)]
    plan = plan_memory("f", lifetimes)
    assert plan.arena_bytes == plan.peak_bytes


def test_empty_buffers_take_no_room():
    plan = plan_memory("f", [Lifetime("a", 0, 0, 5), Lifetime("b", 0, 2, 3)])
    assert plan.arena_bytes == plan.sum_bytes == plan.peak_bytes == 0
    assert plan.offsets == {"a": 0, "b": 0}


def test_no_buffers():
    plan = plan_memory("f", [])
    assert (plan.arena_bytes, plan.sum_bytes, plan.peak_bytes) == (0, 0, 0)


@pytest.mark.parametrize("whole", [0, 1900])
def test_thousands_of_buffers_come_close_to_the_peak(whole: int):
    plan = plan_memory("f", make_many(2000, steps=100, whole=whole))
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes


def test_what_is_kept_stands_below_the_scratch():
    lifetimes = [
        Lifetime("t", 256, 0, 1),
        Lifetime("x", 300, 0, 2, is_kept=True),
        Lifetime("u", 512, 2, 2),
        Lifetime("empty", 0, 1, 2, is_kept=True),
        # It could have the bytes of `t`, and would then not be safe from other graphs.
        Lifetime("y", 256, 2, 2, is_kept=True),
    ]
    plan = plan_memory("f", lifetimes)
    assert plan.offsets == {"x": 0, "empty": 0, "y": 512, "t": 768, "u": 768}
    assert (plan.kept_bytes, plan.arena_bytes, plan.peak_bytes) == (768, 1280, 1280)


def test_host_memory_is_not_in_the_arena():
    lifetimes = [
        Lifetime("a", 512, 0, 1),
        Lifetime("there", 700, 0, 2, is_kept=True, is_host=True),
        Lifetime("lent", 300, 0, 2, is_kept=True, is_lent=True),
        Lifetime("b", 300, 1, 2),
    ]
    plan = plan_memory("f", lifetimes)
    assert (plan.arena_bytes, plan.kept_bytes, plan.peak_bytes) == (1024, 0, 1024)
    assert (plan.sum_bytes, plan.host_bytes, plan.lent_bytes) == (1024, 700, 300)
    assert {name: plan.offsets[name] for name in ("there", "lent")} == {"there": 1024, "lent": 1792}
    assert any(line.split()[:3] == ["there", "host", "700"] for line in str(plan).splitlines())
    inside = dataclasses.replace(plan, offsets={**plan.offsets, "there": 256})
    with pytest.raises(InternalError, match="`there` is in host memory, and stands at 256"):
        verify_plan(inside)


GOOD = plan_memory("f", [Lifetime("a", 512, 0, 1), Lifetime("b", 300, 1, 2)])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"offsets": {"a": 0, "b": 256}}, "`a` and `b` overlap while both live"),
        ({"offsets": {"a": 0, "b": 0}}, "`a` and `b` overlap while both live"),
        ({"offsets": {"a": 0}}, "`b` has no offset"),
        ({"offsets": {"a": 0, "b": -512}}, "`b` has the negative offset -512"),
        ({"offsets": {"a": 0, "b": 516}}, "the offset 516 of `b` is not a multiple of 256"),
        ({"offsets": {"a": 0, "b": 768}}, "`b` reaches outside the arena, to 1068"),
        ({"kept_bytes": 256}, "`a` is a temporary, and stands at 0 in the kept part"),
        (
            {"lifetimes": (Lifetime("a", 512, 0, 2, is_kept=True), GOOD.lifetimes[1])},
            "`a` is kept, and reaches into the scratch, to 512",
        ),
        ({"arena_bytes": 1280}, "the arena is larger than the sum of its buffers, 1024 bytes"),
        ({"arena_bytes": 900}, "the arena is smaller than what lives at one step, 1024 bytes"),
        ({"lifetimes": (GOOD.lifetimes[0],) * 2}, "`a` has two lifetimes"),
        ({"lifetimes": (Lifetime("a", 512, 2, 1),)}, "`a` has 512 bytes and lives over steps 2..1"),
        ({"lifetimes": (Lifetime("a", -1, 0, 1),)}, "`a` has -1 bytes and lives over steps 0..1"),
    ],
)
def test_a_planted_fault_is_found(change: dict[str, Any], what: str):
    verify_plan(GOOD)
    with pytest.raises(InternalError) as raised:
        verify_plan(dataclasses.replace(GOOD, **change))
    error = raised.value
    assert error.what.startswith("the memory plan of `f` is wrong: ")
    assert what in error.what
    assert error.where.startswith("arena of ")
    assert error.why == "a replay writes to these addresses without any further check"
    assert error.fix == "internal error in tracegraph: please report this text"


def test_all_faults_are_reported_but_not_without_end():
    lifetimes = tuple(Lifetime(f"b{index}", 256, 0, 0) for index in range(9))
    with pytest.raises(InternalError, match="`b4` has no offset; and 4 more"):
        verify_plan(MemoryPlan("f", lifetimes, {}, 9 * 256))


def test_a_duplicate_name_is_never_planned():
    with pytest.raises(InternalError, match="`a` has two lifetimes"):
        plan_memory("f", [Lifetime("a", 1, 0, 0), Lifetime("a", 1, 0, 0)])


@pytest.mark.parametrize(
    ("golden_name", "plan"),
    [
        ("memory_plan_empty", plan_memory("identity", [])),
        ("memory_plan_train_step", plan_memory("train_step", TRAIN_STEP)),
        ("memory_plan_long", plan_memory("long", make_many(100, steps=500, whole=5))),
    ],
)
def test_the_table_equals_its_golden_file(golden_name: str, plan: MemoryPlan):
    assert str(plan) == format_plan(plan)
    wanted = (GOLDEN / f"{golden_name}.txt").read_text(encoding="utf-8")
    assert format_plan(plan) + "\n" == wanted


def test_a_scaled_bar_covers_every_step_of_the_lifetime():
    lifetimes = [Lifetime("all", 1, 0, 999), Lifetime("late", 1, 999, 999)]
    rows = format_plan(plan_memory("f", lifetimes)).splitlines()
    assert rows[2].endswith("  " + "█" * 60)
    assert rows[3].endswith("  " + "·" * 59 + "█")
