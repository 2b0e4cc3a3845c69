"""Forwarded copies: which pieces are used where they are, and which copies have to stay.

Random programs of whole regions are held against the oracle in tests/lowering/test_assemble.py.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, fill, kernel, make_frame, run_steps, spec, use
from tracegraph.lowering.device_program import ConditionalStep, DeviceProgram, ExecutableCall
from tracegraph.lowering.planning import forward_copies as forward_copies_module
from tracegraph.lowering.planning.forward_copies import forward_copies
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import find_least_bytes
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.errors import InternalError

BIG, SMALL = 1024, 256
# A piece of x, and one of y, at a multiple of 256.
PIECE, PLACE = "x[256:512]", "y[512:768]"


def program(*steps: Any, donated: str = "x") -> DeviceProgram:
    """Steps one after another: ``x`` is an input, ``y`` a result, both large; t and u small."""
    frame = make_frame([spec("x", BIG)], [spec("y", BIG), spec("z", SMALL)], [donated])
    more = (spec("t", SMALL), spec("u", SMALL), spec("wide", BIG))
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    buffers = (*frame.buffers, *more)
    return dataclasses.replace(frame, buffers=buffers, steps=steps, edges=edges)


def show(found: DeviceProgram) -> list[str]:
    """Returns each step with what it reads and writes."""
    texts = []
    for step in found.steps:
        reads, writes = (
            " ".join(f"{e.buffer}[{e.offset}:{e.offset + e.nbytes}]" for e in uses)
            for uses in (step.reads, step.writes)
        )
        texts.append(f"{step.name}: {reads} -> {writes}")
    return texts


T, Z = "t[0:256]", "z[0:256]"
READ = (copy("c", PIECE, T), kernel("k", T, Z))
WRITE = (kernel("k", "x[0:256]", T), copy("c", T, PLACE))


def test_a_piece_is_read_where_it_is() -> None:
    found = forward_copies(program(*READ)).program
    assert show(found) == ["k: x[256:512] -> z[0:256]"]
    assert "t" not in {spec.name for spec in found.buffers}


def test_only_a_result_that_begins_earlier_may_take_more_memory() -> None:
    assert not forward_copies(program(*READ)).may_grow
    assert forward_copies(program(*WRITE)).may_grow
    assert not forward_copies(program(fill("f", "y[0:1024]"), *WRITE)).may_grow


@pytest.mark.parametrize("steps", [READ, WRITE], ids=["read", "write"])
@pytest.mark.parametrize("name", ["x", "y", "t"])
def test_copies_from_and_to_host_memory_stay(steps: Any, name: str) -> None:
    given = program(*steps)
    buffers = tuple(dataclasses.replace(each, is_host=each.name == name) for each in given.buffers)
    found = forward_copies(dataclasses.replace(given, buffers=buffers)).program
    touches = any(
        use.buffer == name
        for step in steps
        if step.name == "c"
        for use in (*step.reads, *step.writes)
    )
    assert (len(found.steps) == 2) == touches


def test_a_piece_is_written_where_it_belongs() -> None:
    later = kernel("l", T, Z)
    found = forward_copies(program(*WRITE, later)).program
    assert show(found) == ["k: x[0:256] -> y[512:768]", "l: y[512:768] -> z[0:256]"]


def test_parts_of_a_temporary_move_with_it() -> None:
    steps = (copy("c", PIECE, T), kernel("k", "t[64:128]", Z))
    assert show(forward_copies(program(*steps)).program) == ["k: x[320:384] -> z[0:256]"]


def test_copies_of_copies_go_one_after_another() -> None:
    steps = (copy("a", PIECE, T), copy("b", T, "u[0:256]"), kernel("k", "u[0:256]", Z))
    assert show(forward_copies(program(*steps)).program) == ["k: x[256:512] -> z[0:256]"]


def test_what_a_copy_ordered_stays_in_order() -> None:
    steps = (
        kernel("first", "x[0:256]", "y[0:256]"),
        *READ,
        copy("d", "x[512:768]", "u[0:256]"),
        kernel("last", "u[0:256]", "y[0:256]"),
    )
    found = forward_copies(program(*steps)).program
    assert [step.name for step in found.steps] == ["first", "k", "last"]
    assert found.edges == ((0, 1), (1, 2))
    verify_order(found)


LOOP = ConditionalStep("loop", Construct.WHILE, ((kernel("in", T, Z),),), kernel("s", "x[0:4]", ""))
STAY = {
    "the piece is written before it is read": (
        READ[0],
        kernel("w", "z[0:4]", "x[300:301]"),
        READ[1],
    ),
    "the reader writes the piece": (READ[0], kernel("k", T, "x[300:301]")),
    "the reader updates the copy": (READ[0], kernel("k", T, T), kernel("l", T, Z)),
    "two steps write the temporary": (fill("f", T), *READ),
    "the temporary is larger": (copy("c", "x[256:384]", "t[0:128]"), kernel("k", "t[0:128]", Z)),
    "the piece starts between": (copy("c", "x[128:384]", T), kernel("k", T, Z)),
    "a result is a copy": (copy("c", PIECE, Z), kernel("k", Z, "y[0:256]")),
    "nothing reads the copy": (READ[0],),
    "the piece is in a temporary that would live longer": (
        kernel("a", "x[0:256]", "wide[0:1024]"),
        copy("c", "wide[256:512]", T),
        kernel("k", T, Z),
    ),
    "the place is read before it is written": (
        WRITE[0],
        kernel("r", PLACE, "z[0:4]"),
        WRITE[1],
    ),
    "the writer reads the place": (kernel("k", PLACE, T), WRITE[1]),
    "the place is written before the temporary is read": (
        *WRITE,
        kernel("w", "x[0:4]", "y[600:601]"),
        kernel("l", T, Z),
    ),
    "the temporary is written again": (*WRITE, kernel("w", "x[0:4]", T), kernel("l", T, Z)),
    "a memset writes to a result": (fill("f", T), WRITE[1]),
}


# What cannot be given another address, and reads a piece of ``x``.
NOT_KERNELS = {
    "a memcpy": (READ[0], copy("d", T, "y[0:256]")),
    "a loop": (READ[0], LOOP),
}


@pytest.mark.parametrize("case", NOT_KERNELS)
def test_only_kernels_use_a_piece_of_what_has_another_address_at_each_call(case: str) -> None:
    steps = program(*NOT_KERNELS[case], donated="")
    assert forward_copies(steps).program is steps
    (found,) = forward_copies(program(*NOT_KERNELS[case])).program.steps
    assert next(each for each in found.reads if each.nbytes == 256) == use(PIECE)


@pytest.mark.parametrize("case", STAY)
def test_a_copy_that_has_to_stay(case: str) -> None:
    steps = program(*STAY[case])
    assert forward_copies(steps).program is steps


def test_a_program_that_calls_regions_stays_as_it_is() -> None:
    steps = program(*READ, ExecutableCall("r", print, (), ()))
    assert forward_copies(steps).program is steps


def draw_program(seed: int) -> DeviceProgram:
    """Returns kernels and copies between two large buffers, an input and a result, and two small.

    Nearly all copies are between a small buffer and a piece of a large one.
    """
    generator = random.Random(seed)
    sizes = {"x": 6, "y": 6, "z": 2, "t": 2, "u": 2}

    def draw_piece(names: str, nbytes: int) -> str:
        name = generator.choice(names)
        start = generator.randrange(sizes[name] - nbytes + 1)
        return f"{name}[{start}:{start + nbytes}]"

    steps: list[Any] = []
    for index in range(generator.randint(3, 7)):
        piece, small = draw_piece("xy", 2), draw_piece("tu", 2)
        if generator.random() < 0.5:
            sides = (piece, small) if generator.random() < 0.6 else (small, piece)
            steps.append(copy(f"c{index}", *sides))
            continue
        reads = [
            draw_piece("xytu", generator.randint(1, 2)) for _ in range(generator.randint(1, 2))
        ]
        written = generator.choice([small, small, "z[0:2]", piece])
        step: Any = kernel(f"k{index}", " ".join(reads), written)
        if generator.random() < 0.2:
            construct = generator.choice([Construct.IF, Construct.WHILE])
            setter = kernel(f"s{index}", reads[0], "")
            step = ConditionalStep(f"n{index}", construct, ((step,),), setter)
        steps.append(step)
    frame = make_frame([spec("x", 6)], [spec("y", 6), spec("z", 2)], ["x"])
    buffers = (*frame.buffers, spec("t", 2), spec("u", 2))
    edges = tuple((i, i + 1) for i in range(len(steps) - 1))
    return dataclasses.replace(frame, buffers=buffers, steps=tuple(steps), edges=edges)


def run(steps: DeviceProgram) -> dict[tuple[str, int], Any]:
    memory: Any = {(name, i): f"{name}{i}" for name in "xy" for i in range(6)}
    run_steps(steps.steps, memory, None)
    return {key: token for key, token in memory.items() if key[0] in "xyz"}


def find_differing(count: int) -> tuple[int, int]:
    """Returns of how many random programs copies were forwarded, and how many then differ."""
    forwarded = differing = 0
    for seed in range(count):
        steps = draw_program(seed)
        found = forward_copies(steps).program
        forwarded += found is not steps
        verify_order(found)
        before, after = run(steps), run(found)
        wrong = [key for key, token in before.items() if token is not None and after[key] != token]
        differing += bool(wrong)
    return forwarded, differing


def test_random_programs_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_copies_module, "ALIGNMENT", 1)
    forwarded, differing = find_differing(2000)
    assert (forwarded > 100, differing) == (True, 0)


def test_no_more_is_alive_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_copies_module, "ALIGNMENT", 1)
    compared = 0
    for seed in range(2000):
        steps = draw_program(seed)
        begun = (fill("t", "t[0:2]"), fill("u", "u[0:2]"), *steps.steps)
        edges = tuple((i, i + 1) for i in range(len(begun) - 1))
        steps = dataclasses.replace(steps, steps=begun, edges=edges)
        try:
            before = find_least_bytes(find_lifetimes(steps))
        except InternalError:
            # It reads what it has not written.
            continue
        found = forward_copies(steps)
        if found.program is steps:
            continue
        more = find_least_bytes(find_lifetimes(found.program)) > before
        assert found.may_grow or not more, seed
        compared += 1
    assert compared > 30


@pytest.mark.parametrize("check", ["_is_written", "_is_touched"])
def test_without_a_check_random_programs_differ(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setattr(forward_copies_module, "ALIGNMENT", 1)
    monkeypatch.setattr(forward_copies_module._Forwarding, check, lambda *_: False)
    assert find_differing(500)[1]
