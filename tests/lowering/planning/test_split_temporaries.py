"""Parts of XLA's allocations: what is joined, what is apart, and where accesses lie in a part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.fakes.gpu_programs import copy, fill, kernel, use, xla_programs
from tracegraph.lowering.planning.split_temporaries import (
    Part,
    Split,
    find_whole_peak,
    split_allocations,
)
from tracegraph.lowering.xla.program import AllocationKind


def split(*steps: Any, results: str = "", is_whole: bool = False) -> Split:
    return split_allocations(
        steps, {"t", "u"}, [use(each) for each in results.split()], is_whole=is_whole
    )


CASES = {
    "a write begins a part": (
        [kernel("a", "x", "t"), kernel("b", "t", "x"), kernel("c", "", "t"), kernel("d", "t", "x")],
        [Part("t", 0, 64), Part("t", 0, 64)],
    ),
    "neighbours are apart": (
        [kernel("a", "", "t[0:256]"), kernel("b", "", "t[256:512]"), kernel("c", "t[0:256]", "x")],
        [Part("t", 0, 256), Part("t", 256, 256)],
    ),
    "a read of both joins them": (
        [kernel("a", "", "t[0:256]"), kernel("b", "", "t[256:512]"), kernel("c", "t[0:512]", "x")],
        [Part("t", 0, 512)],
    ),
    "an update keeps the old part": (
        [kernel("a", "", "t[0:256]"), kernel("b", "t[0:256]", "t[128:192]")],
        [Part("t", 0, 256)],
    ),
    "a write in the middle is apart until both are read": (
        [
            kernel("a", "", "t[0:256]"),
            kernel("b", "t[0:256]", "x"),
            kernel("c", "", "t[64:128]"),
            kernel("d", "t[0:64] t[64:128]", "x"),
        ],
        [Part("t", 0, 256), Part("t", 0, 128)],
    ),
    "the part that is left is read with the new one": (
        [
            kernel("a", "", "t[0:256]"),
            kernel("b", "", "t[64:128]"),
            kernel("c", "t[0:256]", "x"),
        ],
        [Part("t", 0, 256)],
    ),
    "allocations are never joined": (
        [kernel("a", "", "t u"), kernel("b", "t u", "x")],
        [Part("t", 0, 64), Part("u", 0, 64)],
    ),
    "an address keeps its remainder by 256": (
        [kernel("a", "", "t[528:592]"), kernel("b", "t[528:592]", "x")],
        [Part("t", 512, 80)],
    ),
    "overlapping writes of one step stay together": (
        [kernel("a", "", "t[0:64] t[32:96]")],
        [Part("t", 0, 96)],
    ),
    "a read beyond what was written reaches over it": (
        [kernel("a", "", "t[0:64]"), kernel("b", "t[0:128]", "x")],
        [Part("t", 0, 128)],
    ),
    "an empty range is left out": (
        [kernel("a", "t[80:80]", "t[0:64]")],
        [Part("t", 0, 64)],
    ),
    "later steps of an instruction go on with its bytes": (
        [copy("sort", "x", "t"), kernel("sort", "x", "t"), kernel("b", "t", "x")],
        [Part("t", 0, 64)],
    ),
    "a memset and an update by atomics": (
        [fill("sum", "t"), kernel("sum", "x", "t"), kernel("b", "t", "x")],
        [Part("t", 0, 64)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parts(case: str):
    steps, parts = CASES[case]
    assert sorted(split(*steps).parts, key=repr) == sorted(parts, key=repr)


def test_each_step_finds_the_part_that_it_needs():
    found = split(
        kernel("a", "", "t"),
        kernel("b", "t", "u"),
        kernel("c", "u", "t"),
        kernel("d", "t x", "x"),
    )
    first, second, third = (found.steps[index] for index in (0, 1, 2))
    assert first[use("t")] == second[use("t")] != third[use("t")]
    assert second[use("u")] == third[use("u")]
    # Other buffers are left out.
    assert found.steps[3] == {use("t"): third[use("t")]}


def test_results_are_read_at_the_end():
    steps = [kernel("a", "", "t[0:256]"), kernel("b", "", "t[256:512]")]
    found = split(*steps, results="t[0:512]")
    assert found.parts == (Part("t", 0, 512),)
    assert found.results == {use("t[0:512]"): 0}


@pytest.mark.parametrize("case", CASES)
def test_whole_allocations_are_one_part_each(case: str):
    found = split(*CASES[case][0], is_whole=True)
    holders = [part.allocation for part in found.parts]
    assert len(holders) == len(set(holders))


@settings(max_examples=100)
@given(xla_programs())
def test_every_use_lies_inside_its_part(drawn: Any):
    program, _, _ = drawn
    names = {a.name for a in program.allocations if a.kind is not AllocationKind.PARAMETER}
    for is_whole in (False, True):
        found = split_allocations(program.steps, names, (), is_whole=is_whole)
        for step, part_of in zip(program.steps, found.steps, strict=True):
            uses = {each for each in (*step.reads, *step.writes) if each.buffer in names}
            assert part_of.keys() == uses
            for each in uses:
                part = found.parts[part_of[each]]
                assert part.allocation == each.buffer
                assert part.offset <= each.offset
                assert each.offset + each.nbytes <= part.offset + part.nbytes


def test_whole_allocations_live_from_their_first_use_to_their_last():
    first, middle = kernel("a", "", "t[528:592]"), kernel("b", "t[528:592]", "u[0:1]")
    last = kernel("c", "u[0:1]", "t[0:16]")
    steps = [first, middle, last]
    # `t` from 0 to 592 over all steps, `u` beside it; what is not named does not count.
    assert find_whole_peak(steps, {"t", "u"}) == 768 + 256
    assert find_whole_peak(steps, {"u"}) == 256
    assert find_whole_peak([first], {"t"}) == 256
    assert find_whole_peak([first, last], set()) == 0
