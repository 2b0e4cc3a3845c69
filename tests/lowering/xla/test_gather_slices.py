"""Gathered slices: one kernel copies what the iterations of a turn read; bytes are the same."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest

from tests.fakes.gpu_programs import kernel
from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice, read_slice
from tracegraph.lowering.xla import gather_slices as module
from tracegraph.lowering.xla.gather_slices import gather_slices
from tracegraph.runtime.definition.nodes import BufferUse

PIECE, TURNS, COUNT = 256, 3, 4
ARRAY, COUNTER = BufferUse("array", 0, PIECE * TURNS * COUNT), BufferUse("counter", 0, 4)
PLACE = BufferUse("place", 0, PIECE)


def make_slice(
    index: int, *, stride: int = PIECE, first: int = 0, place: BufferUse = PLACE
) -> DeviceStep:
    source = MovingUse(ARRAY, place.nbytes, first + index * stride, COUNT * stride)
    return copy_slice(f"slice@{index}", source, MovingUse(place, place.nbytes, 0), COUNTER)


def make_body(index: int) -> list[GraphStep]:
    return [
        make_slice(index),
        kernel("work", "state place[0:256]", "state"),
        kernel("save", "place[0:128]", "out"),
    ]


def make_backward(index: int) -> list[GraphStep]:
    step = make_slice(index, stride=-PIECE, first=ARRAY.nbytes - PIECE)
    return [step, *make_body(index)[1:]]


class Temporaries:
    """Adds temporaries and remembers their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, nbytes: int) -> BufferUse:
        self.sizes.append(nbytes)
        return BufferUse(f"added{len(self.sizes)}", 0, nbytes)


def gather(make: Callable[[int], list[GraphStep]]) -> tuple[list[list[GraphStep]], list[int]]:
    temporaries = Temporaries()
    return gather_slices([make(i) for i in range(COUNT)], TURNS, temporaries.add), temporaries.sizes


def run(iterations: Sequence[Sequence[GraphStep]]) -> list[dict[str, bytes]]:
    """Returns all memory after each turn; a kernel writes what its name and its inputs tell."""
    memory: dict[str, bytearray] = defaultdict(lambda: bytearray(8192))
    for name in ("array", "b"):
        memory[name] = bytearray(random.Random(name).randbytes(8192))
    after = []
    for turn in range(TURNS):
        for step in (step for steps in iterations for step in steps):
            copied = read_slice(step)
            if copied is not None:
                source, target = copied.source.find(turn), copied.target.find(turn)
                value = memory[source.buffer][source.offset : source.offset + source.nbytes]
                memory[target.buffer][target.offset : target.offset + target.nbytes] = value
                continue
            read = [memory[u.buffer][u.offset : u.offset + u.nbytes] for u in step.reads]
            digest = zlib.crc32(step.name.encode() + b"".join(read))
            for use in step.writes:
                value = random.Random(digest).randbytes(use.nbytes)
                memory[use.buffer][use.offset : use.offset + use.nbytes] = value
        after.append({k: bytes(v) for k, v in memory.items() if not k.startswith("added")})
    return after


@pytest.mark.parametrize("make", [make_body, make_backward])
def test_one_kernel_copies_what_all_but_the_last_iteration_read(
    make: Callable[[int], list[GraphStep]],
) -> None:
    steps, sizes = gather(make)
    assert sizes == [PIECE * (COUNT - 1)]
    assert [len(each) for each in steps] == [3, 2, 2, 3]
    names = [step.name for each in steps for step in each if read_slice(step) is not None]
    assert names == ["slice@gathered", f"slice@{COUNT - 1}"]
    assert run(steps) == run([make(index) for index in range(COUNT)])


def test_several_arrays_each_have_a_kernel() -> None:
    other = BufferUse("other", 256, 512)

    def make(index: int) -> list[GraphStep]:
        source = MovingUse(BufferUse("b", 0, 8192), 512, index * 512, COUNT * 512)
        second = copy_slice("second", source, MovingUse(other, 512, 0), COUNTER)
        return [second, *make_body(index), kernel("more", "other[256:768] state", "state")]

    steps, sizes = gather(make)
    assert sizes == [512 * (COUNT - 1), PIECE * (COUNT - 1)]
    assert [len(each) for each in steps] == [5, 3, 3, 5]
    assert run(steps) == run([make(index) for index in range(COUNT)])


STAYS: dict[str, Callable[[int], list[GraphStep]]] = {
    "the array is written": lambda i: [*make_body(i), kernel("w", "", "array[0:4]")],
    "the place is written too": lambda i: [*make_body(i), kernel("w", "", "place[0:4]")],
    "the place is read before": lambda i: [kernel("r", "place[0:4]", "x"), *make_body(i)],
    "more than the place is read": lambda i: [*make_body(i), kernel("r", "place[0:300]", "x")],
    "the pieces are not adjacent": lambda i: [make_slice(i, stride=128)],
    "the pieces begin between": lambda i: [make_slice(i, place=BufferUse("place", 64, PIECE))],
    "the pieces are small": lambda i: [make_slice(i, stride=64, place=BufferUse("place", 0, 64))],
    "a piece is moved inside": lambda i: [make_slice(i, first=PIECE)],
    "a piece is moved inside at first": lambda i: [make_slice(i, first=-PIECE)],
    "one is no slice": lambda i: make_body(i)[i == 1 :] + [kernel("x", "", "x")] * (i == 1),
    "it is read into the array": lambda i: [
        dataclasses.replace(make_slice(i), writes=(PLACE, BufferUse("array", 0, 4)))
    ],
}


@pytest.mark.parametrize("make", STAYS.values(), ids=STAYS)
def test_what_stays(make: Callable[[int], list[GraphStep]]) -> None:
    assert gather(make) == ([make(index) for index in range(COUNT)], [])


def test_large_copies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHERED_BYTES", PIECE * (COUNT - 1) - 1)
    assert gather(make_body)[1] == []


def test_a_turn_of_two_iterations_stays() -> None:
    temporaries = Temporaries()
    iterations = [make_body(index) for index in range(2)]
    assert gather_slices(iterations, TURNS, temporaries.add) == iterations
    assert temporaries.sizes == []


def test_a_fault_in_the_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = module._move
    monkeypatch.setattr(module, "_move", lambda step, place, copy, _: move(step, place, copy, 0))
    assert run(gather(make_body)[0]) != run([make_body(index) for index in range(COUNT)])
