"""Plans of whole programs: which order is chosen, and how much more memory it may take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import allocation, copy, kernel, make_frame, make_region, spec
from tracegraph.lowering import plan_program as planning
from tracegraph.lowering.assemble import XlaRegion
from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.plan_program import plan_program
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import MemoryPlan, find_least_bytes, plan_memory
from tracegraph.lowering.planning.widen import Wide
from tracegraph.lowering.xla.program import AllocationKind, XlaProgram

FRAME = make_frame([spec("x")], [spec("y")])
CHAIN = dataclasses.replace(
    FRAME,
    buffers=(*FRAME.buffers, *map(spec, "abc")),
    steps=tuple(kernel(after, before, after) for before, after in ["xa", "ab", "bc", "cy"]),
    edges=((0, 1), (1, 2), (2, 3)),
)
# Nothing follows anything, so that all temporaries are alive at once.
APART = dataclasses.replace(CHAIN, edges=())


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets, of what must be held, that levels were filled with."""
    found: list[int] = []
    lifetimes = find_lifetimes(CHAIN)

    def widen(_: DeviceProgram, budget_bytes: int) -> Wide:
        found.append(round(100 * budget_bytes / find_least_bytes(lifetimes)))
        return Wide(APART, CHAIN if len(found) > 1 else APART)

    monkeypatch.setattr(planning, "_order_serially", lambda *_: (CHAIN, lifetimes))
    monkeypatch.setattr(planning, "_keep_whole", lambda *_: None)
    monkeypatch.setattr(planning, "widen", widen)
    return found


def plan() -> Any:
    """Returns the order that was chosen."""
    program, memory = plan_program([], (), FRAME)
    assert memory.arena_bytes == plan_memory("f", find_lifetimes(program)).arena_bytes
    return program


def test_what_takes_too_much_memory_is_filled_again_with_less(budgets: list[int]) -> None:
    # An arena of 1024 bytes, 1280 where each temporary has its own.
    assert plan() is CHAIN
    assert budgets == [102, 95]


@pytest.mark.parametrize("limit", ["ROOMY_LIMIT", "WIDE_LIMIT"])
def test_each_order_has_a_limit_of_what_must_be_held(
    limit: str, budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, limit, 1.25)
    assert plan() is APART
    assert budgets == [102]


@pytest.mark.usefixtures("budgets")
def test_where_nothing_fits_steps_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "widen", lambda *_: Wide(APART, APART))
    assert plan() is CHAIN


def test_what_takes_no_more_than_the_serial_plan_is_accepted(
    budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces may fit together no better in XLA's own order."""

    def plan_badly(name: str, lifetimes: Any, **wanted: int) -> MemoryPlan:
        made = plan_memory(name, lifetimes, **wanted)
        return dataclasses.replace(made, arena_bytes=1280)

    monkeypatch.setattr(planning, "plan_memory", plan_badly)
    program, memory = plan_program([], (), FRAME)
    assert (program, memory.arena_bytes) == (CHAIN, 1280)
    # The third time within the arena of the serial plan.
    assert budgets == [102, 95, 125]


STEPS = [kernel("a", "#p", "#t"), kernel("b", "#t", "#t[256:320]")]
STEPS += [kernel("c", "#t #t[256:320]", "#o")]


def plan_both(
    monkeypatch: pytest.MonkeyPatch, waste: int, *steps: DeviceStep
) -> tuple[list[str], int, int]:
    """Returns the temporaries of the program taken, its bytes, and how many plans kept XLA's.

    Args:
        waste: bytes that each plan of split temporaries loses.
        steps: of the program; by default `STEPS`.
    """
    inputs, outputs = [spec("x"), spec("y")], [spec("n")]
    allocations = (
        allocation("#p", AllocationKind.PARAMETER, parameter=0),
        allocation("#q", AllocationKind.PARAMETER, parameter=1),
        allocation("#o", AllocationKind.OUTPUT),
        allocation("#t", AllocationKind.TEMPORARY, 2048),
    )
    program = XlaProgram("r", allocations, steps or tuple(STEPS), ("#o",))
    whole: list[str] = []

    def plan(name: str, lifetimes: Any, **wanted: int) -> MemoryPlan:
        lifetimes = list(lifetimes)
        made = plan_memory(name, lifetimes, **wanted)
        is_split = sum(".temp." in each.name for each in lifetimes) > 1
        whole.extend([name] * (not is_split))
        return dataclasses.replace(made, arena_bytes=made.arena_bytes + waste * is_split)

    monkeypatch.setattr(planning, "plan_memory", plan)
    region = XlaRegion(make_region("r", inputs, outputs), program)
    taken, best = plan_program([region], (), make_frame(inputs, outputs))
    temporaries = [buffer.name for buffer in taken.buffers if ".temp." in buffer.name]
    return temporaries, best.arena_bytes, len(whole)


def test_temporaries_are_split_where_that_is_as_small_as_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = plan_both(monkeypatch, 0)
    assert found == (["r.temp.0", "r.temp.1"], 5 * 256, 0)


def test_temporaries_stay_whole_where_that_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    temporaries, arena_bytes, _ = plan_both(monkeypatch, 256)
    assert (temporaries, arena_bytes) == (["r.temp.0"], 5 * 256)


def test_temporaries_stay_split_for_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    temporaries, _, whole = plan_both(monkeypatch, 25)
    assert (len(temporaries), whole) == (2, 0)


def test_whole_temporaries_that_cannot_be_smaller_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA's allocation has a hole, which the split temporaries do without."""
    far = [kernel("far", "#p", "#t[1024:1088]"), kernel("near", "#t[1024:1088]", "#t")]
    temporaries, arena_bytes, whole = plan_both(monkeypatch, 256, *far, *STEPS)
    assert (len(temporaries), arena_bytes, whole) == (2, 6 * 256, 0)


@pytest.mark.parametrize("large", [False, True])
def test_copies_are_forwarded_unless_more_must_be_held(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that is read where it is keeps what it is a piece of."""
    nbytes = 1024 if large else 64
    steps = [
        kernel("make", "#p", f"#t[0:{nbytes}]"),
        copy("piece", "#t", "#t[1024:1088]"),
        kernel("more", "#q", "#t[0:512]"),
        kernel("end", "#t[0:512] #t[1024:1088]", "#o"),
    ]
    temporaries, arena_bytes, _ = plan_both(monkeypatch, 0, *steps)
    assert len(temporaries) == (3 if large else 2)
    assert arena_bytes == 3 * 256 + (1280 if large else 768)
