"""Piece loops: their PTX, run line by line, computes what the records say; CUDA takes the text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from tracegraph.lowering.kernels.loops.piece_loops import (
    OPERATIONS,
    SYMBOL,
    THREADS,
    Piece,
    PieceLoop,
    write_piece_loops,
)

NUMPY = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}
# An address is the number of an array and a byte of it.
ARRAY = 1 << 40


def run_kernel(text: bytes, arrays: list[np.ndarray], blocks: tuple[int, int]) -> None:
    """Runs each thread of a kernel on arrays of 32-bit floats."""
    lines = [line for line in text.decode().rstrip("\0").split("\n") if line]
    first = next(index for index, line in enumerate(lines) if line == "{") + 1
    body = [line.rstrip(";") for line in lines[first:-1] if not line.startswith(".reg")]
    labels = {line[:-1]: index for index, line in enumerate(body) if line.endswith(":")}
    for loop in range(blocks[1]):
        for block in range(blocks[0]):
            for thread in range(THREADS):
                special = {"%ctaid.x": block, "%ctaid.y": loop, "%tid.x": thread}
                run_thread(body, labels, special, arrays)


def run_thread(
    body: list[str], labels: dict[str, int], registers: dict[str, int], arrays: list[np.ndarray]
) -> None:
    values: dict[str, np.float32] = {}

    def read(operand: str) -> int:
        return registers[operand] if operand.startswith("%") else int(operand)

    def find(address: str) -> tuple[np.ndarray, int]:
        register, _, offset = address.strip("[]").partition("+")
        number, byte = divmod(registers[register] + int(offset or 0), ARRAY)
        array, (index, rest) = arrays[number], divmod(byte, 4)
        assert not rest
        assert 0 <= index < array.size
        return array, index

    line = 0
    while True:
        words = re.split(r"[ ,]+", body[line])
        line += 1
        if words[0].startswith("@%is"):
            words = words[1:]
            if not registers["%is"]:
                continue
        opcode, *operands = words
        match opcode:
            case "ret":
                return
            case "bra":
                line = labels[operands[0]]
            case "setp.eq.u32" | "setp.ge.u32":
                left, right = map(read, operands[1:])
                registers["%is"] = left == right if "eq" in opcode else left >= right
            case "ld.param.u64":
                registers[operands[0]] = int(operands[1].strip("[p]")) * ARRAY
            case "ld.global.f32":
                array, index = find(operands[1])
                values[operands[0]] = array[index]
            case "st.global.f32":
                array, index = find(operands[0])
                array[index] = values[operands[1]]
            case _ if opcode in OPERATIONS.values():
                name = next(each for each in OPERATIONS if OPERATIONS[each] == opcode)
                left, right = (values[each] for each in operands[1:])
                values[operands[0]] = NUMPY[name](left, right)
            case _ if not opcode.endswith(":"):
                registers[operands[0]] = compute(opcode, *map(read, operands[1:]))


def compute(opcode: str, *operands: int) -> int:
    table: dict[str, Callable[..., int]] = {
        "mov": lambda a: a,
        "shr": lambda a, b: a >> b,
        "div": lambda a, b: a // b,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "mad": lambda a, b, c: a * b + c,
    }
    return table[opcode.partition(".")[0]](*operands)


def compute_loop(loop: PieceLoop, arrays: list[np.ndarray]) -> None:
    index = np.arange(loop.count)
    values = [
        arrays[piece.argument][
            piece.offset + index // piece.columns * piece.pitch + index % piece.columns
        ]
        for piece in loop.pieces
    ]
    for opcode, left, right in loop.ops:
        values.append(NUMPY[opcode](values[left], values[right]))
    for value, argument in loop.results:
        arrays[argument][:] = values[value]


def draw_loop(generator: random.Random) -> tuple[PieceLoop, list[int]]:
    """Returns a loop, and the sizes of its arguments."""
    count = generator.choice([1, 7, 64, 300])
    pieces = []
    sizes = []
    for argument in range(generator.randrange(1, 4)):
        columns = generator.choice([each for each in (1, 2, 3, 8, 64, count) if each <= count])
        piece = Piece(argument, generator.randrange(9), columns, columns + generator.randrange(5))
        pieces.append(piece)
        sizes.append(piece.find_end(count) + generator.randrange(3))
    ops = []
    for number in range(generator.randrange(4)):
        known = len(pieces) + number
        operands = generator.randrange(known), generator.randrange(known)
        ops.append((generator.choice(sorted(OPERATIONS)), *operands))
    results = ((len(pieces) + len(ops) - 1, len(pieces)),)
    return PieceLoop(count, tuple(pieces), tuple(ops), results), [*sizes, count]


@pytest.mark.parametrize("seed", range(6))
def test_the_text_computes_what_the_records_say(seed: int) -> None:
    generator, numbers = random.Random(seed), np.random.default_rng(seed)
    drawn = [draw_loop(generator) for _ in range(generator.randrange(1, 5))]
    loops = [loop for loop, _ in drawn]
    sizes = [size for _, own in drawn for size in own]
    order = generator.sample(range(len(sizes)), len(sizes))
    arrays = [numbers.standard_normal(sizes[each]).astype(np.float32) for each in order]
    place_of = {argument: place for place, argument in enumerate(order)}
    places, first = [], 0
    for _, own in drawn:
        places.append([place_of[first + number] for number in range(len(own))])
        first += len(own)
    wanted = [array.copy() for array in arrays]
    for loop, own in zip(loops, places, strict=True):
        compute_loop(loop, [wanted[place] for place in own])
    blocks = -(-max(loop.count for loop in loops) // THREADS)
    run_kernel(write_piece_loops(loops, places), arrays, (blocks, len(loops)))
    for got, want in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_array_is_updated_in_its_place() -> None:
    loop = PieceLoop(4, (Piece(0, 0, 4, 4), Piece(1, 1, 2, 3)), (("add", 0, 1),), ((2, 2),))
    arrays = [np.arange(4, dtype=np.float32), 10 * np.arange(6, dtype=np.float32)]
    # The result has the place of the first operand.
    run_kernel(write_piece_loops([loop], [[0, 1, 0]]), arrays, (1, 1))
    assert arrays[0].tolist() == [10, 21, 42, 53]


def test_equal_loops_have_equal_code() -> None:
    loop = PieceLoop(4, (Piece(0, 0, 4, 4),), (("add", 0, 0),), ((1, 1),))
    text = write_piece_loops([loop], [[0, 1]])
    assert text == write_piece_loops([loop], [[0, 1]])
    assert f".entry {SYMBOL}(".encode() in text
    assert text != write_piece_loops([loop], [[1, 0]])
