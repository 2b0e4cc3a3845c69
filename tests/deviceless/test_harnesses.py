"""A fixed sample of JAX's harnesses on their way to a graph, and the table of what they hold."""

from __future__ import annotations

import collections
from typing import Any

import jax
import pytest

from tests.deviceless import __main__ as command
from tests.deviceless import building, coverage
from tests.deviceless.coverage import Figures, Outcome
from tests.fakes.xla_programs import make_copy, make_kernel, make_program

BUILT_PER_SHARD = 50


@pytest.mark.parametrize("shard", range(coverage.SHARDS))
def test_the_sample_is_built(shard: int, h200: Any) -> None:
    built = 0
    for case in coverage.draw_cases(shard):
        figures, lowered = coverage.measure(case.name, case.function, case.make_arguments(0), h200)
        assert coverage.is_expected(figures), figures
        if lowered is not None:
            built += 1
            assert building.find_faults(lowered.definition) == [], case.name
            building.check_built(lowered.definition)
    jax.clear_caches()
    # Together at least 400 programs.
    assert built >= BUILT_PER_SHARD >= 400 / coverage.SHARDS


def test_shards_are_the_sample() -> None:
    shards = [coverage.draw_cases(shard) for shard in range(coverage.SHARDS)]
    names = [case.name for shard in shards for case in shard]
    assert sorted(names) == sorted(case.name for case in coverage.draw_cases())
    assert len(set(names)) == coverage.SAMPLE_CASES >= 400


def test_thunk_kinds_are_counted_with_those_inside():
    inner = f"thunks {{ {make_copy((1, 0, 4), (3, 0, 4), 4)} }}"
    loop = f"while_thunk {{ body_thunk_sequence {{ {inner} {inner} }} }}"
    branch = f"conditional_thunk {{ branch_thunks {{ {inner} }} branch_thunks {{ {inner} }} }}"
    several = f"sequential_thunk {{ {inner} thunks {{ memzero_thunk {{ }} }} }}"
    call = 'custom_call_thunk { target_name: "lu" }'
    program = make_program(loop, branch, several, call, make_kernel(), "")
    assert collections.Counter(coverage.list_kinds(program.thunks)) == {
        "device_to_device_copy": 5,
        "while": 1,
        "conditional": 1,
        "sequential": 1,
        "memzero": 1,
        "custom_kernel": 1,
        "custom_call lu": 1,
        "unknown": 1,
    }


TABLE = """\
cases                 4
built                 1
refused               1
not captured          1
not compiled          1

thunk kind     programs    thunks     built
custom_kernel         2         3         1
while                 1         1         0

graphs: 1 with 2 nodes and 1 edges

   1 not captured: c: CaptureError: loops
   1 not compiled: d: XLA refuses
   1 refused: while (1)"""


def test_table_counts_programs_and_thunks() -> None:
    refusal = "UnsupportedError: `region0` has work that cannot be lowered: while (1)"
    figures = [
        Figures("a", Outcome.BUILT, "", {"custom_kernel": 2}, 2, 1),
        Figures("b", Outcome.REFUSED, refusal, {"custom_kernel": 1, "while": 1}),
        Figures("c", Outcome.NOT_CAPTURED, "CaptureError: loops"),
        Figures("d", Outcome.NOT_COMPILED, "XLA refuses"),
    ]
    assert coverage.format_table(figures) == TABLE


@pytest.mark.parametrize(
    ("outcome", "is_expected"),
    [
        (Outcome.BUILT, True),
        (Outcome.REFUSED, False),
        (Outcome.NOT_CAPTURED, False),
        (Outcome.NOT_COMPILED, True),
    ],
)
def test_a_refusal_is_a_fault(outcome: Outcome, is_expected: bool) -> None:
    assert coverage.is_expected(Figures("a", outcome, "reason")) is is_expected


def test_figures_replace_those_in_the_document() -> None:
    document = command.DOCUMENT.read_text()
    changed = command.replace_section(document, "new figures")
    assert "\nnew figures\n" in changed
    assert "custom_kernel " in document
    assert "custom_kernel " not in changed
    assert command.replace_section(changed, "new figures") == changed
    with pytest.raises(ValueError, match="no section between"):
        command.replace_section("no marks", "new figures")
