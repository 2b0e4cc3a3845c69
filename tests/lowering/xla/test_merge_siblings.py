"""Merged siblings: kernels that wait for the same step become one, which leaves the same bytes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.fakes.gpu_programs import kernel, use
from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.kernels.loops import piece_loops
from tracegraph.lowering.kernels.loops.piece_loops import SYMBOL, THREADS, Piece, PieceLoop
from tracegraph.lowering.xla import merge_siblings as module
from tracegraph.lowering.xla.merge_siblings import (
    MAX_ARGUMENTS,
    MAX_STEPS,
    MIN_STEPS,
    merge_siblings,
)
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode

# Of 64 bytes: each element is added to one of another array, and takes its place.
LOOP = PieceLoop(16, (Piece(0, 0, 16, 16), Piece(1, 0, 4, 4)), (("add", 0, 1),), ((2, 2),))
Memory = dict[str, np.ndarray]


def add_to(target: str, source: str, name: str) -> DeviceStep:
    """Returns a kernel of the loop."""
    step = kernel(name, f"{target} {source}", target)
    assert isinstance(step.node, KernelNode)
    parameters = (use(target), use(source), use(target))
    node = dataclasses.replace(step.node, parameters=parameters, written=(False, False, True))
    return dataclasses.replace(step, node=node)


def add(number: int, source: str = "matmul") -> DeviceStep:
    """Returns a kernel that adds an array to a gradient."""
    return add_to(f"g{number}", source, f"add.{number}@0")


def read(step: GraphStep) -> PieceLoop | None:
    return LOOP if step.name.startswith("add.") else None


def merge(*steps: GraphStep) -> list[GraphStep]:
    (merged,) = merge_siblings([steps], read, Scope(()).intern_code)
    return merged


def is_merged(step: GraphStep) -> bool:
    node = step.node if isinstance(step, DeviceStep) else None
    return isinstance(node, KernelNode) and node.code.symbol == SYMBOL


def show(steps: Sequence[GraphStep]) -> list[str]:
    return [f"{step.name}{' merged' * is_merged(step)}" for step in steps]


MATMUL = kernel("matmul@0", "x", "matmul")


def test_kernels_that_wait_for_one_step_become_one() -> None:
    steps = [MATMUL, *map(add, range(4)), kernel("last@0", "g0 g3", "y")]
    first, merged, last = merge(*steps)
    assert (first, last) == (steps[0], steps[-1])
    assert isinstance(merged, DeviceStep)
    assert isinstance(merged.node, KernelNode)
    assert merged.name == "add.0@0"
    assert merged.node.shape.grid == (1, 4, 1)
    assert merged.node.parameters == (use("g0"), use("matmul"), *map(use, ("g1", "g2", "g3")))
    assert merged.node.written == (True, False, True, True, True)
    assert set(merged.reads) == set(merged.node.parameters)
    assert set(merged.writes) == {use(f"g{number}") for number in range(4)}


def test_steps_between_them_stay_where_they_may() -> None:
    between = [kernel(f"other.{number}@0", "x", f"z{number}") for number in range(3)]
    steps = [MATMUL, add(0), between[0], add(1), between[1], add(2), between[2]]
    assert show(merge(*steps)) == [
        "matmul@0",
        "add.0@0 merged",
        "other.0@0",
        "other.1@0",
        "other.2@0",
    ]


@pytest.mark.parametrize(
    "steps",
    [
        [MATMUL, *map(add, range(MIN_STEPS - 1))],
        [MATMUL, add(0), add(1, "g0"), add(2, "g1"), add(3, "g2")],
        [MATMUL, add(0), kernel("a@0", "x", "g1"), add(1), kernel("b@0", "x", "g2"), add(2)],
        [MATMUL, add(0), kernel("a@0", "g1", "y"), add(1), kernel("b@0", "g2", "z"), add(2)],
    ],
    ids=["too few", "a chain", "written between", "read between"],
)
def test_what_waits_for_other_steps_is_no_sibling(steps: list[DeviceStep]) -> None:
    assert merge(*steps) == steps


def test_iterations_without_enough_loops_are_left_as_they_are() -> None:
    assert merge_siblings([], read, Scope(()).intern_code) == []
    steps = [[MATMUL, add(0)], [MATMUL, *map(add, range(5))]]
    assert merge_siblings(steps, read, Scope(()).intern_code) == steps


def test_many_siblings_become_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", 4)
    found = show(merge(MATMUL, *map(add, range(10))))
    assert found == ["matmul@0", "add.0@0 merged", "add.4@0 merged", "add.8@0", "add.9@0"]
    assert MAX_STEPS * MAX_ARGUMENTS * 8 <= 4096


def test_equal_iterations_have_one_kernel() -> None:
    steps = [MATMUL, *map(add, range(4))]
    found = merge_siblings([steps, steps], read, Scope(()).intern_code)
    nodes = [step.node for _, step in found if isinstance(step, DeviceStep)]
    one, other = [node.code for node in nodes if isinstance(node, KernelNode)]
    assert one is other


def test_a_kernel_of_other_arguments_is_left() -> None:
    good = add(0)
    assert isinstance(good.node, KernelNode)
    assert module._is_of(good.node, LOOP)
    more = dataclasses.replace(good.node, parameters=(*good.node.parameters, use("h")))
    short = dataclasses.replace(good.node, parameters=(use("g0"), use("m[0:60]"), use("g0")))
    small = dataclasses.replace(good.node, parameters=(use("g0"), use("m"), use("g0[0:60]")))
    packed = dataclasses.replace(good.node, parameters=(use("g0"), use("m"), b"12345678"))
    more = dataclasses.replace(more, written=(*more.written, True))
    unwritten = dataclasses.replace(good.node, written=(False, False, False))
    for node in (more, short, small, packed, unwritten):
        assert not module._is_of(node, LOOP)
    assert not module._is_of(good.node, dataclasses.replace(LOOP, count=module.MAX_ELEMENTS + 1))


def run_loop(loop: PieceLoop, uses: Sequence[BufferUse], memory: Memory) -> None:
    index = np.arange(loop.count)
    arrays = [memory[u.buffer][u.offset : u.offset + u.nbytes].view("f4") for u in uses]
    values = [
        arrays[p.argument][p.offset + index // p.columns * p.pitch + index % p.columns]
        for p in loop.pieces
    ]
    for opcode, left, right in loop.ops:
        assert opcode == "add"
        values.append(values[left] + values[right])
    for value, argument in loop.results:
        arrays[argument][: loop.count] = values[value]


def test_random_iterations_leave_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Sequence[PieceLoop], Sequence[Sequence[int]]]] = []

    def write(loops: Sequence[PieceLoop], places: Sequence[Sequence[int]]) -> bytes:
        written.append((loops, places))
        return piece_loops.write_piece_loops(loops, places)

    monkeypatch.setattr(module, "write_piece_loops", write)

    def run(steps: Sequence[GraphStep]) -> Memory:
        numbers = np.arange(48, dtype="f4")
        memory = {name: (numbers + 100 * place).view("u1") for place, name in enumerate("abc")}
        merged = iter(written)
        for step in steps:
            assert isinstance(step, DeviceStep)
            assert isinstance(step.node, KernelNode)
            if not is_merged(step):
                run_loop(LOOP, step.node.ranges, memory)
                continue
            loops, places = next(merged)
            assert step.node.shape.grid == (-(-LOOP.count // THREADS), len(loops), 1)
            # Blocks run in any order.
            for loop, own in reversed(list(zip(loops, places, strict=True))):
                run_loop(loop, [step.node.ranges[each] for each in own], memory)
        return memory

    merges = 0
    for seed in range(300):
        generator = random.Random(seed)

        def draw(generator: random.Random = generator) -> str:
            start = 64 * generator.randrange(3)
            return f"{generator.choice('abc')}[{start}:{start + 64}]"

        steps = [
            add_to(draw(), draw(), f"add.{number}") for number in range(generator.randrange(3, 9))
        ]
        written.clear()
        found = merge(*steps)
        merges += len(written)
        got, wanted = run(found), run(steps)
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted), seed
    assert merges > 20
