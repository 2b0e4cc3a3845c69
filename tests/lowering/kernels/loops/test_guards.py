"""The kernels that keep a loop's state: their text is run here, word by word."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fakes.ptx_runner import run_node
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.loops.guards import end_turn, keep_state
from tracegraph.runtime.definition.nodes import BufferUse, ConditionHandle, KernelNode

HANDLE = 77
# Pieces of 16, 4 and 1 bytes per word; one of them begins in the middle.
SIZES = {"a": (0, 4112), "b": (4, 20), "c": (3, 7)}


def launch(step: DeviceStep, memory: dict[str, Any], values: dict[int, int]) -> None:
    node: Any = step.node
    for use, is_written in node.uses:
        assert use in (step.writes if is_written else step.reads)
    parameters = tuple(
        (ctypes.addressof(memory[each.buffer]) + each.offset).to_bytes(8, "little")
        if isinstance(each, BufferUse)
        else each
        for each in node.bind(HANDLE).parameters
        if not isinstance(each, ConditionHandle)
    )
    run_node(node, values, parameters)


def make_memory(*names: str) -> dict[str, Any]:
    """Returns buffers of 8 KB at multiples of 16, each with bytes of its own."""
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        raw = ctypes.create_string_buffer(8192 + 16)
        skipped = -ctypes.addressof(raw) % 16
        found[name] = (ctypes.c_char * 8192).from_buffer(raw, skipped)
        found[name][:] = bytes(np.random.default_rng(number).integers(0, 256, 8192, np.uint8))
    return found


def read(memory: dict[str, Any], use: BufferUse) -> bytes:
    return memory[use.buffer][use.offset : use.offset + use.nbytes]


def list_pieces(prefix: str = "") -> list[BufferUse]:
    return [BufferUse(prefix + name, *where) for name, where in SIZES.items()]


def test_the_state_is_kept() -> None:
    memory = make_memory(*"abc", *(f"kept.{name}" for name in SIZES))
    before = {name: each[:] for name, each in memory.items()}
    pairs = list(zip(list_pieces(), list_pieces("kept."), strict=True))
    step = keep_state("keep", pairs)
    launch(step, memory, {})
    for source, target in pairs:
        assert read(memory, target) == read(memory, source)
        # Nothing around it has changed.
        first, end = target.offset, target.offset + target.nbytes
        assert memory[target.buffer][:first] == before[target.buffer][:first]
        assert memory[target.buffer][end:] == before[target.buffer][end:]
    assert {name: memory[name][:] for name in SIZES} == {name: before[name] for name in SIZES}


def make_end(count: int) -> tuple[DeviceStep, list[BufferUse], list[list[BufferUse]]]:
    flags = [BufferUse("flags", index, 1) for index in range(count)]
    kept = [list_pieces(f"kept{index}.") for index in range(count - 1)]
    pieces = [
        (piece, [each[number] for each in kept]) for number, piece in enumerate(list_pieces())
    ]
    return end_turn("turn", flags, pieces), flags, kept


@pytest.mark.parametrize(
    ("flags", "ended_after"),
    [
        ((1, 1, 1, 1), None),
        ((1, 1, 1, 0), None),
        ((0, 0, 0, 0), 0),
        # What comes after the end means nothing.
        ((0, 1, 1, 1), 0),
        ((1, 0, 1, 0), 1),
        ((1, 255, 0, 1), 2),
        ((0, 1), 0),
        ((2, 0), None),
    ],
)
def test_the_state_is_as_it_was_at_the_end_of_the_loop(
    flags: Sequence[int], ended_after: int | None
) -> None:
    step, places, kept = make_end(len(flags))
    names = {use.buffer for use in (*step.reads, *step.writes)}
    memory = make_memory(*sorted(names))
    memory["flags"][: len(flags)] = bytes(flags)
    before = {name: each[:] for name, each in memory.items()}
    values: dict[int, int] = {}
    launch(step, memory, values)
    assert values == {HANDLE: int(all(flags))}
    for number, piece in enumerate(list_pieces()):
        wanted = before[piece.buffer]
        if ended_after is not None:
            source = kept[ended_after][number]
            content = before[source.buffer][source.offset : source.offset + source.nbytes]
            end = piece.offset + piece.nbytes
            wanted = wanted[: piece.offset] + content + wanted[end:]
        assert memory[piece.buffer][:] == wanted
    for name in names - set(SIZES):
        assert memory[name][:] == before[name]
    assert len(places) == len(flags)


def test_a_loop_without_a_state_only_ends() -> None:
    step = end_turn("turn", [BufferUse("flags", 0, 1), BufferUse("flags", 1, 1)], [])
    memory = make_memory("flags")
    for flags in ((1, 1), (0, 1), (1, 0)):
        memory["flags"][:2] = bytes(flags)
        values: dict[int, int] = {}
        launch(step, memory, values)
        assert values == {HANDLE: int(all(flags))}


def test_a_wrong_word_is_found() -> None:
    """The runner refuses what a GPU would: an access of 16 bytes at a multiple of 4."""
    step = keep_state("keep", [(BufferUse("a", 0, 32), BufferUse("b", 0, 32))])
    assert isinstance(step.node, KernelNode)
    memory = make_memory("a", "b")
    moved = step.move(lambda use: use._replace(offset=4))
    with pytest.raises(AssertionError, match="is no multiple of 16"):
        launch(moved, memory, {})
