"""Plans of steps side by side: how much more memory is accepted, and what is tried then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import kernel, make_frame, spec
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.compile_gpu import plan_program
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.planning.widen import Wide

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
    """The budgets, of the arena, that levels were filled with."""
    found: list[int] = []
    serial = CHAIN, plan_memory("f", find_lifetimes(CHAIN))

    def widen(_: DeviceProgram, budget_bytes: int) -> Wide:
        found.append(round(100 * budget_bytes / serial[1].arena_bytes))
        return Wide(APART, CHAIN if len(found) > 1 else APART)

    monkeypatch.setattr(compile_gpu, "plan_smallest", lambda *_: serial)
    monkeypatch.setattr(compile_gpu, "widen", widen)
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


def test_bytes_may_rest_within_a_budget_of_their_own(
    budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gpu, "ROOMY_BUDGET", 1.25)
    assert plan() is APART
    assert budgets == [102]


def test_the_limit_is_of_what_must_be_held(
    budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gpu, "WIDE_LIMIT", 1.25)
    assert plan() is APART
    assert budgets == [102]


def test_where_nothing_fits_steps_follow_one_another(
    budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gpu, "widen", lambda *_: Wide(APART, APART))
    assert plan() is CHAIN
    assert budgets == []
