"""Reused arguments: which copies come later, and which values lie in arguments meanwhile."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, fill, kernel, make_frame, run_steps, spec, use
from tracegraph.lowering.device_program import ConditionalStep, Copy, DeviceProgram, ExecutableCall
from tracegraph.lowering.planning import memory_plan, reuse_arguments, split_temporaries
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import find_least_bytes
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.definition.graph_nodes import Construct

# Arguments that are updated, and temporaries.
ARGUMENTS, TEMPORARIES = "pq", "tuvw"
SIZES = {"x": 2, "z": 1, "p": 4, "q": 4, "t": 4, "u": 4, "v": 4, "w": 4}


@pytest.fixture(autouse=True)
def bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each byte count, not only each 256."""
    monkeypatch.setattr(memory_plan, "ALIGNMENT", 1)
    monkeypatch.setattr(split_temporaries, "ALIGNMENT", 1)


def program(*steps: Any) -> DeviceProgram:
    """Steps one after another: ``p`` and ``q`` are updated, ``x`` is read, ``z`` a result."""
    specs = {name: spec(name, nbytes) for name, nbytes in SIZES.items()}
    inputs, outputs = [specs[name] for name in "xpq"], [specs[name] for name in "pqz"]
    frame = make_frame(inputs, outputs, ARGUMENTS)
    used = {each.buffer for step in steps for each in (*step.reads, *step.writes)}
    buffers = (*frame.buffers, *(specs[name] for name in TEMPORARIES if name in used))
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    return dataclasses.replace(frame, buffers=buffers, steps=steps, edges=edges)


def whole(names: str) -> str:
    return " ".join(f"{name}[0:{SIZES[name]}]" for name in names)


def step(name: str, reads: str, writes: str) -> Any:
    return kernel(name, whole(reads), whole(writes))


def show(found: DeviceProgram) -> list[str]:
    """Returns each step with the buffers that it reads and writes."""
    return [
        f"{each.name}: {' '.join(read.buffer for read in each.reads)} -> "
        f"{' '.join(written.buffer for written in each.writes)}"
        for each in found.steps
    ]


def reuse(steps: DeviceProgram) -> DeviceProgram:
    found = reuse_arguments.reuse_arguments(steps)
    verify_order(found)
    return found


def count_least(steps: DeviceProgram) -> int:
    return find_least_bytes(find_lifetimes(steps))


# XLA copies p, and lays a value into it; q is dead after its first reader.
COPIED = (
    copy("c", whole("p"), whole("t")),
    step("a", "q", "u"),
    step("b", "u", "p"),
    step("d", "pu", "v"),
    step("e", "tuv", "p"),
    step("f", "p", "q"),
    step("g", "p", "z"),
)


# The old value is updated in place, in part, and read again.
UPDATED = (COPIED[0], kernel("h", whole("x"), "p[0:2]"), step("i", "p", "z"), *COPIED[1:])


def test_a_copy_moves_to_its_reader_and_values_into_idle_arguments() -> None:
    before = program(*COPIED)
    found = reuse(before)
    assert show(found) == [
        "a: q -> u",
        "b: u -> p.value.1",
        "d: p.value.1 u -> q",
        "c: p -> t",
        "e: t u q -> p",
        "f: p -> q",
        "g: p -> z",
    ]
    assert (count_least(before), count_least(found)) == (23, 19)
    assert run(found) == run(before)


def test_a_copy_stays_ahead_of_what_updates_the_argument() -> None:
    found = reuse(program(*UPDATED))
    assert [each.name for each in found.steps][:2] == ["c", "h"]
    assert "d: p u -> q" in show(found)
    assert run(found) == run(program(*UPDATED))


def test_an_argument_that_is_read_late_is_not_idle() -> None:
    late = step("h", "qv", "z")
    found = reuse(program(*COPIED[:5], late, *COPIED[5:]))
    assert not any("q" in each.split("-> ")[1] for each in show(found)[:5])


LOOP = ConditionalStep("loop", Construct.WHILE, ((step("in", "p", "z"),),), kernel("s", "x", ""))
STAY = {
    "nothing is copied": COPIED[1:4],
    "what is copied is no argument": (step("a", "q", "u"), copy("c", whole("u"), whole("t"))),
    "what is copied is not updated": (copy("c", "x[0:2]", "t[0:2]"), step("b", "t", "z")),
    "a part is copied": (copy("c", "p[0:2]", "t[0:2]"), step("b", "q", "p"), step("e", "t", "q")),
    "the argument is updated in place": (COPIED[0], step("b", "p", "p"), step("e", "t", "z")),
    "the old value is needed behind the new one's first byte": (
        COPIED[0],
        kernel("b", "q[0:4]", "p[0:2]"),
        kernel("d", "p[2:4]", "z[0:1]"),
        step("e", "t", "q"),
    ),
    "a region is called": (*COPIED, ExecutableCall("r", print, (), ())),
}


@pytest.mark.parametrize("case", STAY)
def test_a_program_that_stays(case: str) -> None:
    steps = program(*STAY[case])
    assert reuse(steps) is steps


def test_steps_on_several_streams_stay_where_they_are() -> None:
    steps = dataclasses.replace(program(*COPIED), edges=((0, 1),))
    assert reuse_arguments.reuse_arguments(steps) is steps


def test_small_arguments_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_arguments, "LARGE_SHARE", 2)
    steps = program(*COPIED)
    assert reuse(steps) is steps


def draw_program(seed: int) -> DeviceProgram:
    """Returns kernels, copies, branches and loops that use two arguments for other values too."""
    rng = random.Random(seed)

    def draw(names: str) -> str:
        name = rng.choice(names)
        start, end = rng.choice([(0, 4), (0, 4), (0, 4), (0, 2), (2, 4)])
        return f"{name}[{start}:{end}]"

    steps: list[Any] = [copy("c0", whole("p"), whole("t"))]
    steps += [fill(name, whole(name)) for name in "uvw"]
    for index in range(rng.randint(6, 12)):
        kind = rng.random()
        if kind < 0.15:
            steps.append(copy(f"c{index + 1}", whole(rng.choice("pq")), whole(rng.choice("uvw"))))
        elif kind < 0.25:
            target = whole(rng.choice("pqtuvw"))
            source = whole(rng.choice("tuvw"))
            steps.append(Copy(f"o{index}", use(source), use(target)))
        else:
            reads = " ".join(draw("pqtuvw") for _ in range(rng.randint(1, 2)))
            made: Any = kernel(f"k{index}", reads, draw("pqpqtuvw"))
            if rng.random() < 0.15:
                construct = rng.choice([Construct.IF, Construct.WHILE])
                setter = kernel(f"s{index}", draw("tuvw"), "")
                made = ConditionalStep(f"n{index}", construct, ((made,),), setter)
            steps.append(made)
    steps.append(step("z", rng.choice("tuvw"), "z"))
    return program(*steps)


def run(steps: DeviceProgram) -> dict[tuple[str, int], Any]:
    memory: Any = {(name, i): f"{name}{i}" for name in "xpq" for i in range(SIZES[name])}
    run_steps(steps.steps, memory, None)
    return {key: token for key, token in memory.items() if key[0] in "pqz"}


def find_differing(count: int) -> tuple[int, int]:
    """Returns of how many random programs arguments were reused, and how many then differ."""
    reused = differing = 0
    for seed in range(count):
        before = draw_program(seed)
        found = reuse(before)
        if found is before:
            continue
        reused += 1
        assert count_least(found) < count_least(before)
        differing += run(found) != run(before)
    return reused, differing


def test_random_programs_compute_the_same() -> None:
    reused, differing = find_differing(2000)
    assert (reused > 100, differing) == (True, 0)


def test_a_copy_behind_an_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_arguments, "_writes", lambda *_: False)
    _, differing = find_differing(1000)
    assert differing
