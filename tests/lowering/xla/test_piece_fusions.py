"""Piece fusions: sums and products of slices are read as they are, everything else is left."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from tests.fakes.xla_programs import message_class, read_computation
from tracegraph.lowering.kernels.loops.piece_loops import Piece, PieceLoop
from tracegraph.lowering.xla.piece_fusions import read_piece_fusion


def array(number: int, opcode: str, dimensions: tuple[int, ...], rest: str = "") -> str:
    """Returns an instruction whose result lies in memory row by row."""
    sizes = " ".join(f"dimensions: {each}" for each in dimensions)
    order = " ".join(f"minor_to_major: {each}" for each in reversed(range(len(dimensions))))
    return (
        f'instructions {{ name: "i{number}" opcode: "{opcode}" id: {number} {rest} '
        f"shape {{ element_type: F32 {sizes} layout {{ {order} }} }} }}"
    )


def parameter(number: int, dimensions: tuple[int, ...]) -> str:
    return array(number, "parameter", dimensions, f"parameter_number: {number}")


def of(*operands: int) -> str:
    return " ".join(f"operand_ids: {each}" for each in operands)


def cut(operand: int, *parts: tuple[int, ...]) -> str:
    texts = [
        f"slice_dimensions {{ start: {start} limit: {limit} stride: {stride[0] if stride else 1} }}"
        for start, limit, *stride in parts
    ]
    return f"{of(operand)} {' '.join(texts)}"


def read(*instructions: str, opcode: str = "fusion") -> PieceLoop | None:
    head = f'name: "f" opcode: "{opcode}" called_computation_ids: 7'
    instruction = text_format.Parse(head, message_class("xla.HloInstructionProto")())
    computations: Mapping[int, Mapping[str, Any]] = {7: read_computation("\n".join(instructions))}
    return read_piece_fusion(instruction, computations)


MATMUL, WEIGHTS = (384, 1024), (256, 256)
SLICED = (
    parameter(0, WEIGHTS),
    parameter(1, MATMUL),
    array(2, "slice", WEIGHTS, cut(1, (0, 256), (768, 1024))),
)


def test_a_slice_of_a_matmul_is_added() -> None:
    count = 256 * 256
    assert read(*SLICED, array(3, "add", WEIGHTS, of(0, 2))) == PieceLoop(
        count,
        (Piece(0, 0, count, count), Piece(1, 768, 256, 1024)),
        (("add", 0, 1),),
        ((2, 2),),
    )


def test_views_are_looked_through_and_values_computed_once() -> None:
    found = read(
        parameter(0, (2, 3)),
        array(1, "bitcast", (6,), of(0)),
        array(2, "add", (6,), of(1, 1)),
        array(3, "subtract", (6,), of(2, 1)),
        array(4, "tuple", (), of(2, 3)),
    )
    ops = (("add", 0, 0), ("subtract", 1, 0))
    assert found == PieceLoop(6, (Piece(0, 0, 6, 6),), ops, ((1, 1), (2, 2)))


def test_what_is_sliced_is_computed_where_it_is_needed() -> None:
    found = read(
        parameter(0, (4, 8)),
        parameter(1, (4, 8)),
        array(2, "multiply", (4, 8), of(0, 1)),
        array(3, "slice", (4, 2), cut(2, (0, 4), (3, 5))),
    )
    pieces = Piece(0, 3, 2, 8), Piece(1, 3, 2, 8)
    assert found == PieceLoop(8, pieces, (("multiply", 0, 1),), ((2, 2),))


@pytest.mark.parametrize(
    "instructions",
    [
        (*SLICED, array(3, "exponential", WEIGHTS, of(2))),
        (*SLICED, array(3, "maximum", WEIGHTS, of(0, 2))),
        (
            *SLICED,
            array(3, "multiply", WEIGHTS, of(0, 2)),
            array(4, "add", WEIGHTS, of(3, 0)),
        ),
        (parameter(0, (8,)), array(1, "slice", (4,), cut(0, (0, 8, 2)))),
        (parameter(0, (3, 4, 5)), array(1, "slice", (2, 2, 2), cut(0, (0, 2), (1, 3), (2, 4)))),
        (
            parameter(0, (8,)),
            array(1, "slice", (6,), cut(0, (1, 7))),
            array(2, "slice", (4,), cut(1, (1, 5))),
        ),
        (parameter(0, (8,)), array(1, "reshape", (4,), of(0))),
        (parameter(0, (0, 4)), array(1, "add", (0, 4), of(0, 0))),
        (parameter(0, (1 << 15, 1 << 15)), array(1, "add", (1 << 15, 1 << 15), of(0, 0))),
        (
            parameter(0, (8,)),
            parameter(1, (4,)),
            array(2, "add", (8,), of(0, 0)),
            array(3, "add", (4,), of(1, 1)),
            array(4, "tuple", (), of(2, 3)),
        ),
    ],
    ids=[
        "a function",
        "a maximum",
        "a product in a sum",
        "a stride",
        "rows of rows",
        "a slice of a slice",
        "another size",
        "nothing",
        "more than 31 bits",
        "results of two sizes",
    ],
)
def test_other_fusions_are_left(instructions: tuple[str, ...]) -> None:
    assert read(*instructions) is None


@pytest.mark.parametrize(
    "instructions",
    [
        (parameter(0, (8,)), array(1, "add", (8,), of(0, 9))),
        (parameter(0, (8,)), array(1, "add", (8,), of(0, 1))),
        (parameter(0, (8,)), array(1, "copy", (8,))),
        (array(0, "parameter", (8,), "parameter_number: -1"), array(1, "add", (8,), of(0, 0))),
        (array(0, "parameter", (8,), "parameter_number: 1"), array(1, "add", (8,), of(0, 0))),
        (parameter(0, (8,)), *(array(n, "add", (8,), of(n - 1, 0)) for n in range(1, 900))),
    ],
    ids=["absent operand", "own operand", "no operand", "before", "behind", "long"],
)
def test_what_contradicts_itself_is_left(instructions: tuple[str, ...]) -> None:
    assert read(*instructions) is None


def test_other_types_layouts_and_instructions_are_left() -> None:
    whole = (*SLICED, array(3, "add", WEIGHTS, of(0, 2)))
    assert read(*(each.replace("F32", "BF16") for each in whole)) is None
    rows, columns = "minor_to_major: 1 minor_to_major: 0", "minor_to_major: 0 minor_to_major: 1"
    assert read(*(each.replace(rows, columns) for each in whole)) is None
    assert read(*whole, opcode="custom-call") is None
    assert read_piece_fusion(None, {}) is None


def test_rows_of_random_slices_are_those_of_numpy() -> None:
    generator, known = random.Random(0), 0
    for _ in range(300):
        source = tuple(generator.randrange(1, 6) for _ in range(generator.randrange(1, 5)))
        parts = []
        for size in source:
            start = generator.choice([0, generator.randrange(size)])
            parts.append((start, generator.choice([size, generator.randrange(start, size) + 1])))
        sizes = tuple(limit - start for start, limit in parts)
        found = read(parameter(0, source), array(1, "slice", sizes, cut(0, *parts)))
        if found is None:
            continue
        known += 1
        (piece,) = found.pieces
        index = np.arange(found.count)
        places = piece.offset + index // piece.columns * piece.pitch + index % piece.columns
        numbers = np.arange(np.prod(source)).reshape(source)
        wanted = numbers[tuple(slice(*part) for part in parts)]
        assert places.tolist() == wanted.ravel().tolist(), (source, parts)
        assert piece.find_end(found.count) == places[-1] + 1
    assert known > 150
