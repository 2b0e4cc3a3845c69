"""Small kernels of one function become one, as far as nothing on the way forbids it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.fakes.gpu_programs import make_frame, spec, use
from tracegraph.lowering import merge_loops as merge_loops_module
from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.element_loops import (
    ElementLoop,
    ElementOperand,
    LoopFunction,
    LoopOp,
)
from tracegraph.lowering.merge_loops import MAX_ELEMENTS, MAX_PARAMETERS, MIN_STEPS, merge_loops
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode, LaunchShape

EACH, SINGLE = (ElementOperand("F32", is_single=flag) for flag in (False, True))
UPDATE = LoopFunction(
    (EACH, EACH, SINGLE),
    (LoopOp("multiply", "F32", (1, 2)), LoopOp("subtract", "F32", (0, 3))),
    (4,),
)
OTHER = dataclasses.replace(UPDATE, results=(3,))
OWN = KernelCode("loop", b"code")


def update(
    number: int,
    *,
    function: LoopFunction = UPDATE,
    count: int = 4,
    waits: bool = True,
    reads: str = "",
) -> DeviceStep:
    """Computes ``p<number> -= g<number> * rate``, as XLA gives it: the result is the operand."""
    state = use(f"p{number}")
    gradient, rate = use(reads or f"g{number}"), use("rate")
    node = KernelNode(
        f"update.{number}",
        OWN,
        LaunchShape((1, 1, 1), (4, 1, 1)),
        (state, gradient, rate, state),
        (True, False, False, True),
        waits,
    )
    loop = ElementLoop(function, count, (0, 1, 2, 3))
    return DeviceStep(node, (state, gradient, rate), (state,), loop=loop)


def cast(number: int) -> DeviceStep:
    """Computes ``c<number>`` of ``w<number>``: one that the step behind it reads."""
    node = KernelNode(
        f"cast.{number}",
        OWN,
        LaunchShape((1, 1, 1), (4, 1, 1)),
        (use(f"w{number}"), use(f"c{number}")),
        (False, True),
        True,
    )
    function = LoopFunction((EACH,), (LoopOp("convert", "BF16", (0,)),), (1,))
    loop = ElementLoop(function, 4, (0, 1))
    return DeviceStep(node, (use(f"w{number}"),), (use(f"c{number}"),), loop=loop)


def make_layers(count: int) -> list[DeviceStep]:
    """Returns casts, each with the step that reads it right behind it."""
    pairs = ((cast(number), touch(f"c{number}", f"h{number}")) for number in range(count))
    return [step for pair in pairs for step in pair]


def touch(reads: str, writes: str) -> DeviceStep:
    """A kernel of which nothing is known."""
    node = KernelNode(
        f"{reads}->{writes}",
        OWN,
        LaunchShape((1, 1, 1), (1, 1, 1)),
        tuple(use(name) for name in f"{reads} {writes}".split()),
        (False,) * len(reads.split()) + (True,) * len(writes.split()),
    )
    return DeviceStep(node, tuple(map(use, reads.split())), tuple(map(use, writes.split())))


def program(*steps: Any) -> DeviceProgram:
    names = sorted({each.buffer for step in steps for each in step.ranges})
    frame = make_frame([spec(name) for name in names], [])
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    return dataclasses.replace(frame, steps=steps, edges=edges)


@pytest.fixture
def sources() -> list[str]:
    return []


@pytest.fixture
def merge(sources: list[str]) -> Any:
    def compile_kernel(source: str, options: tuple[str, ...]) -> CompiledSource:
        assert "--fmad=false" in options
        sources.append(source)
        return CompiledSource(b"machine code", "")

    def run(*steps: Any) -> list[str]:
        before = program(*steps)
        found = merge_loops(before, compile_kernel)
        verify_order(found)
        assert all(step.loop is None for step in found.steps if isinstance(step, DeviceStep))
        return [f"{step.name} {len(step.writes)}" for step in found.steps]

    return run


def test_equal_functions_become_one_kernel_at_the_place_of_the_last(
    merge: Any, sources: list[str]
) -> None:
    steps = [update(number) for number in range(MIN_STEPS)]
    between = [touch(f"g{number}", f"h{number}") for number in range(MIN_STEPS)]
    mixed = [each for pair in zip(steps, between, strict=True) for each in pair]
    names = merge(*mixed)
    assert names == [
        *(f"{each.name} 1" for each in between[:-1]),
        f"update.0 {MIN_STEPS}",
        f"{between[-1].name} 1",
    ]
    (source,) = sources
    cases = re.findall(r"case (\d+): count = (\d+); (.*) break;", source)
    assert [(int(case), int(count)) for case, count, _ in cases] == [(i, 4) for i in range(8)]
    # The state is one parameter, operand and result; the rate is one of all loops.
    assert cases[0][2] == "x0 = p0; x1 = p1; x2 = p2; y0 = p0;"
    assert cases[3][2] == "x0 = p7; x1 = p8; x2 = p2; y0 = p7;"


def test_the_merged_kernel_says_what_it_reads_and_writes(merge: Any) -> None:
    del merge
    steps = [update(number) for number in range(MIN_STEPS)]
    (merged,) = merge_loops(program(*steps), lambda *_: CompiledSource(b"machine code", "")).steps
    assert isinstance(merged, DeviceStep)
    node = merged.node
    assert isinstance(node, KernelNode)
    assert node.shape == LaunchShape((1, MIN_STEPS, 1), (256, 1, 1))
    assert len(node.parameters) == 2 * MIN_STEPS + 1
    written = {each.buffer for each, is_written in node.uses if is_written}
    assert written == {f"p{number}" for number in range(MIN_STEPS)}
    assert {each.buffer for each in merged.writes} == written
    assert {each.buffer for each in merged.reads} == {each.buffer for each in node.ranges}
    assert node.begins_with_wait


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(touch("p0", "x"), id="reads-what-it-writes"),
        pytest.param(touch("x", "p0"), id="writes-what-it-writes"),
        pytest.param(touch("x", "g0"), id="writes-what-it-reads"),
        pytest.param(touch("x", "rate"), id="writes-what-all-read"),
    ],
)
def test_what_would_get_other_bytes_ends_a_group(merge: Any, between: DeviceStep) -> None:
    steps = [update(number) for number in range(2 * MIN_STEPS)]
    names = merge(*steps[:MIN_STEPS], between, *steps[MIN_STEPS:])
    assert names == [
        f"update.0 {MIN_STEPS}",
        f"{between.name} 1",
        f"update.{MIN_STEPS} {MIN_STEPS}",
    ]


def test_loops_that_depend_on_one_another_are_not_merged(merge: Any) -> None:
    chain = [update(number, reads=f"p{number - 1}") for number in range(1, MIN_STEPS + 1)]
    assert len(merge(*chain)) == MIN_STEPS
    # Nor those that read what another one overwrites.
    chain = [update(number, reads=f"p{number + 1}") for number in range(MIN_STEPS)]
    assert len(merge(*chain)) == MIN_STEPS


def test_a_reader_of_what_a_loop_reads_is_no_obstacle(merge: Any) -> None:
    steps = [update(number) for number in range(MIN_STEPS)]
    assert len(merge(steps[0], touch("g0 rate", "x"), *steps[1:])) == 2


def test_few_large_or_unlike_loops_stay(merge: Any, sources: list[str]) -> None:
    few = [update(number) for number in range(MIN_STEPS - 1)]
    large = [update(number, count=MAX_ELEMENTS + 1) for number in range(10, 10 + MIN_STEPS)]
    unlike = [update(number, function=OTHER) for number in range(30, 30 + MIN_STEPS - 1)]
    early = [update(number, waits=False) for number in range(50, 50 + MIN_STEPS - 1)]
    sizes = [update(number, count=300) for number in range(70, 70 + MIN_STEPS - 1)]
    steps = [*few, *large, *unlike, *early, *sizes]
    assert merge(*steps) == [f"{step.name} 1" for step in steps]
    assert sources == []


def test_a_kernel_has_no_more_parameters_than_a_gpu_takes(merge: Any, sources: list[str]) -> None:
    count = MAX_PARAMETERS
    names = merge(*(update(number) for number in range(count)))
    most = (MAX_PARAMETERS - 1) // 2
    assert names == [f"update.0 {most}", f"update.{most} {most}", "update.498 1", "update.499 1"]
    heads = [source.count("float *p") for source in sources]
    assert heads == [MAX_PARAMETERS - 1] * 2


def test_temporaries_that_would_wait_for_it_end_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_loops_module, "MAX_HELD_BYTES", 64 * MIN_STEPS)
    before = program(*(update(number) for number in range(2 * MIN_STEPS)))
    # As long as gradients are arguments, they are there all the time.
    assert len(merge_loops(before, lambda *_: CompiledSource(b"machine code", "")).steps) == 1
    kept = tuple(each for each in before.inputs if not each.buffer.name.startswith("g"))
    before = dataclasses.replace(before, inputs=kept)
    after = merge_loops(before, lambda *_: CompiledSource(b"machine code", ""))
    assert [len(step.writes) for step in after.steps] == [MIN_STEPS, MIN_STEPS]


def test_updates_beside_other_work_do_not_wait_for_the_last(merge: Any) -> None:
    backward = [(touch("x", f"g{number}"), touch("x", "y")) for number in range(MIN_STEPS)]
    updates = [update(number) for number in range(MIN_STEPS)]
    layers = [(*pair, step) for pair, step in zip(backward, updates, strict=True)]
    steps = [step for layer in layers for step in layer]
    assert merge(*steps) == [f"{step.name} 1" for step in steps]
    # With nothing between them they are merged.
    last = [step for pair in backward for step in pair]
    assert merge(*last, *updates)[len(last) :] == [f"update.0 {MIN_STEPS}"]


def test_what_is_read_at_once_is_merged_at_the_place_of_the_first(merge: Any) -> None:
    layers = make_layers(MIN_STEPS)
    readers = [f"{step.name} 1" for step in layers[1::2]]
    assert merge(touch("x", "y"), *layers) == ["x->y 1", f"cast.0 {MIN_STEPS}", *readers]


@pytest.mark.parametrize(
    ("between", "is_obstacle"),
    [
        pytest.param(touch("x", f"w{MIN_STEPS - 1}"), True, id="writes-what-it-reads"),
        pytest.param(touch(f"c{MIN_STEPS - 1}", "x"), True, id="reads-what-it-writes"),
        pytest.param(touch("x", f"c{MIN_STEPS - 1}"), True, id="writes-what-it-writes"),
        pytest.param(touch("x", "w0"), False, id="writes-what-the-first-has-read"),
        pytest.param(touch(f"w{MIN_STEPS - 1}", "x"), False, id="reads-what-it-reads"),
    ],
)
def test_what_would_give_other_bytes_keeps_a_step_from_moving_ahead(
    merge: Any, between: DeviceStep, *, is_obstacle: bool
) -> None:
    layers = make_layers(MIN_STEPS)
    names = merge(*layers[:2], between, *layers[2:])
    assert (f"cast.0 {MIN_STEPS}" in names) != is_obstacle
    # A write in front of the first is no obstacle.
    assert merge(between, *layers)[1] == f"cast.0 {MIN_STEPS}"


def test_results_that_would_wait_end_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_loops_module, "MAX_HELD_BYTES", 64 * MIN_STEPS)
    before = program(*make_layers(2 * MIN_STEPS))
    kept = tuple(each for each in before.inputs if not each.buffer.name.startswith("c"))
    before = dataclasses.replace(before, inputs=kept)
    after = merge_loops(before, lambda *_: CompiledSource(b"machine code", ""))
    merged = [len(step.writes) for step in after.steps if step.name.startswith("cast")]
    assert merged == [MIN_STEPS, MIN_STEPS]


def test_programs_on_several_streams_are_left(merge: Any) -> None:
    steps = [update(number) for number in range(MIN_STEPS)]
    steps[3] = dataclasses.replace(steps[3], stream=1)
    assert len(merge(*steps)) == MIN_STEPS
