"""Passing values: which get memory of their own, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, kernel, make_frame, run_steps, spec
from tracegraph.lowering.device_program import ConditionalStep, DeviceProgram, DeviceStep
from tracegraph.lowering.planning import rename_values
from tracegraph.lowering.planning.rename_values import rename_passing_values
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse

LIMIT = 1 << 20


def program(*steps: Any) -> DeviceProgram:
    """Steps one after another: ``x`` and ``w`` are donated, ``y`` a result, t a temporary."""
    frame = make_frame([spec("x"), spec("w")], [spec("x"), spec("w"), spec("y")], ["x", "w"])
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    buffers = (*frame.buffers, spec("t"))
    return dataclasses.replace(frame, buffers=buffers, steps=steps, edges=edges)


def show(found: DeviceProgram) -> list[str]:
    texts = []
    for step in found.steps:
        reads, writes = (
            " ".join(f"{e.buffer}[{e.offset}:{e.offset + e.nbytes}]" for e in uses)
            for uses in (step.reads, step.writes)
        )
        texts.append(f"{reads} -> {writes}")
    return texts


# A gradient in the memory of another leaf, whose old value is kept by a copy.
KEEP, GRADIENT = copy("c", "x", "t"), kernel("g", "w", "x[0:32]")
UPDATE, OTHER = kernel("u", "x[0:32] w", "w"), kernel("o", "t", "x")


def test_a_value_that_passes_gets_a_buffer_of_its_own() -> None:
    found = rename_passing_values(program(KEEP, GRADIENT, UPDATE, OTHER), LIMIT)
    assert show(found) == [
        "x[0:64] -> t[0:64]",
        "w[0:64] -> x.passing.1.0[0:32]",
        "x.passing.1.0[0:32] w[0:64] -> w[0:64]",
        "t[0:64] -> x[0:64]",
    ]
    assert [buffer.nbytes for buffer in found.buffers if "passing" in buffer.name] == [32]
    assert found.edges == program(KEEP, GRADIENT, UPDATE, OTHER).edges
    verify_order(found)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((KEEP, GRADIENT, UPDATE), id="it-is-a-result"),
        pytest.param((KEEP, GRADIENT, UPDATE, kernel("o", "t x", "x")), id="read-by-the-next"),
        pytest.param((KEEP, GRADIENT, UPDATE, kernel("o", "t", "x[0:16]")), id="half-overwritten"),
        pytest.param(
            (KEEP, GRADIENT, kernel("u", "x w", "w"), OTHER), id="read-with-more-around-it"
        ),
        pytest.param((KEEP, kernel("g", "x", "x[0:32]"), UPDATE, OTHER), id="made-in-its-place"),
        pytest.param(
            (KEEP, kernel("g", "x[32:64]", "x[0:32]"), UPDATE, OTHER), id="made-beside-its-place"
        ),
        pytest.param(
            (
                KEEP,
                GRADIENT,
                ConditionalStep(
                    "if", Construct.IF, ((kernel("in", "x[0:32]", "y"),),), kernel("s", "w", "")
                ),
                OTHER,
            ),
            id="read-in-a-branch",
        ),
    ],
)
def test_what_must_stay_where_it_is_stays(steps: Any) -> None:
    assert rename_passing_values(program(*steps), LIMIT) == program(*steps)


def test_large_values_and_temporaries_stay() -> None:
    steps = program(KEEP, GRADIENT, UPDATE, OTHER)
    assert rename_passing_values(steps, 31) == steps
    inner = program(kernel("a", "x", "t"), kernel("b", "t", "y"), kernel("c", "x", "t"))
    assert rename_passing_values(inner, LIMIT) == inner


def test_several_values_may_pass_one_after_another() -> None:
    steps = [KEEP, GRADIENT, kernel("r", "x[0:32]", "y"), GRADIENT, UPDATE, OTHER]
    found = rename_passing_values(program(*steps), LIMIT)
    names = [buffer.name for buffer in found.buffers if "passing" in buffer.name]
    assert names == ["x.passing.3.0", "x.passing.1.0"]


def test_a_value_that_a_smaller_passing_one_overwrites_passes_too() -> None:
    whole, part = kernel("a", "w", "x"), kernel("b", "w", "x[0:16]")
    steps = [KEEP, whole, kernel("r", "x", "y"), part, kernel("s", "x[0:16]", "y"), OTHER]
    found = rename_passing_values(program(*steps), LIMIT)
    passing = [buffer.nbytes for buffer in found.buffers if "x.passing" in buffer.name]
    assert passing == [16, 64]


def draw_steps(seed: int) -> list[DeviceStep]:
    """Returns steps over pieces of few buffers, so that most kinds of overlap occur."""
    rng = random.Random(seed)
    ends = (0, 64), (0, 32), (32, 64), (16, 48)
    pieces = [f"{name}[{start}:{end}]" for name in "xwt" for start, end in ends]
    return [
        kernel(f"k{number}", " ".join(rng.sample(pieces, rng.randint(0, 2))), rng.choice(pieces))
        for number in range(12)
    ]


def run(steps: DeviceProgram) -> dict[tuple[str, int], Any]:
    memory: Any = {(name, i): f"{name}{i}" for name in "xw" for i in range(64)}
    run_steps(steps.steps, memory, None)
    return {key: token for key, token in memory.items() if key[0] in "xw"}


def find_differing(count: int) -> tuple[int, int]:
    """Returns of how many random programs values were renamed, and how many then differ."""
    renamed = differing = 0
    for seed in range(count):
        before = program(*draw_steps(seed))
        after = rename_passing_values(before, LIMIT)
        renamed += after != before
        differing += run(after) != run(before)
    return renamed, differing


def test_random_programs_compute_the_same() -> None:
    renamed, differing = find_differing(500)
    assert (renamed > 100, differing) == (True, 0)


@pytest.mark.parametrize(
    ("owner", "check", "verdict"),
    [
        (rename_values, "_is_within", True),
        (BufferUse, "contains", True),
        (rename_values, "_overlaps", False),
    ],
)
def test_without_a_check_random_programs_differ(
    monkeypatch: pytest.MonkeyPatch, owner: Any, check: str, *, verdict: bool
) -> None:
    found = getattr(owner, check)

    def be_lenient(*args: Any) -> bool:
        # Steps that read two ranges are taken for steps that read none of the value.
        return verdict if check != "_overlaps" else found(*args) and len(args[0]) == 1

    monkeypatch.setattr(owner, check, be_lenient)
    assert find_differing(500)[1]
