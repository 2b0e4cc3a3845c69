"""Piece fusions: an instruction of XLA's that adds pieces of arrays → PieceLoop.

Only what is known to give the same bits in another kernel: sums, or else products, of elements in
32 bits. XLA may round a product once with the sum that it is a part of, so the two do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.lowering.kernels.loops.piece_loops import OPERATIONS, Piece, PieceLoop
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.loop_fusions import list_fused

# They change neither values nor their order, as long as layouts are of rows.
_VIEWS = frozenset(["bitcast", "reshape", "copy"])
_SUMS = frozenset(["add", "subtract"])
# Offset, columns and pitch of elements, as of a `Piece`.
_Rows: TypeAlias = tuple[int, int, int]
# Whether an operation computes it, and its number among those or among the pieces.
_Value: TypeAlias = tuple[bool, int]
# Sizes and places are computed in 32 bits.
_MOST_BYTES = 1 << 31
# Values are followed by calls within one another, of which Python allows a thousand.
MAX_OPS = 64


def read_piece_fusion(
    instruction: Any, computations: Mapping[int, Mapping[str, Any]]
) -> PieceLoop | None:
    """Returns what a kernel computes for each element; None where it is of another form.

    Args:
        instruction: of XLA's program, that the kernel computes; None where that is not known.
        computations: the instructions of every computation, by its number.

    Returns:
        A loop whose arguments are the fusion's operands, and after them its results.
    """
    fused = list_fused(instruction, computations)
    if not fused:
        return None
    try:
        return _Reader(fused).read()
    except _OtherFormSignal:
        return None


class _OtherFormSignal(Exception):
    """A fusion is not of the form that is looked for."""


class _Reader:
    """Reads the instructions of one fused computation.

    Args:
        instructions: each after its operands, the root last.

    Raises:
        _OtherFormSignal: there are too many.
    """

    def __init__(self, instructions: Sequence[Any]) -> None:
        self._root = instructions[-1]
        self._places = {each.id: place for place, each in enumerate(instructions)}
        self._instructions = instructions
        self._parameters = sum(each.opcode == "parameter" for each in instructions)
        if len(instructions) > MAX_OPS + self._parameters:
            raise _OtherFormSignal
        self._pieces: list[Piece] = []
        self._ops: list[tuple[str, _Value, _Value]] = []
        self._known: dict[tuple[int, _Rows], _Value] = {}

    def read(self) -> PieceLoop:
        """Returns the loop.

        Raises:
            _OtherFormSignal: it is none.
        """
        is_tuple = self._root.opcode == "tuple"
        roots = self._find_operands(self._root) if is_tuple else [self._root]
        counts = {math.prod(_read_dimensions(each)) for each in roots}
        if len(counts) != 1:
            raise _OtherFormSignal
        count = counts.pop()
        values = [self._visit(each, (0, count, count)) for each in roots]
        used = {opcode for opcode, *_ in self._ops}
        if not count or not (used <= _SUMS or used == {"multiply"}):
            raise _OtherFormSignal
        first = len(self._pieces)

        def number(value: _Value) -> int:
            is_op, index = value
            return first + index if is_op else index

        ops = tuple((opcode, number(a), number(b)) for opcode, a, b in self._ops)
        results = tuple(
            (number(value), self._parameters + place) for place, value in enumerate(values)
        )
        return PieceLoop(count, tuple(self._pieces), ops, results)

    def _visit(self, instruction: Any, rows: _Rows) -> _Value:
        """Returns the value of those elements of an instruction that are asked for."""
        key = instruction.id, rows
        if key not in self._known:
            self._known[key] = self._read(instruction, rows)
        return self._known[key]

    def _read(self, instruction: Any, rows: _Rows) -> _Value:
        dimensions, opcode = _read_dimensions(instruction), instruction.opcode
        if opcode == "parameter":
            number = instruction.parameter_number
            if not 0 <= number < self._parameters:
                raise _OtherFormSignal
            return False, self._add_piece(Piece(number, *rows))
        operands = self._find_operands(instruction)
        if not operands:
            raise _OtherFormSignal
        if opcode in _VIEWS:
            if math.prod(_read_dimensions(operands[0])) != math.prod(dimensions):
                raise _OtherFormSignal
            return self._visit(operands[0], rows)
        if opcode == "slice":
            count = math.prod(dimensions)
            if rows != (0, count, count):
                raise _OtherFormSignal
            return self._visit(operands[0], _find_rows(instruction, _read_dimensions(operands[0])))
        if opcode not in OPERATIONS or len(operands) != 2:
            raise _OtherFormSignal
        left, right = (self._visit(each, rows) for each in operands)
        self._ops.append((opcode, left, right))
        return True, len(self._ops) - 1

    def _add_piece(self, piece: Piece) -> int:
        if piece not in self._pieces:
            self._pieces.append(piece)
        return self._pieces.index(piece)

    def _find_operands(self, instruction: Any) -> list[Any]:
        own = self._places[instruction.id]
        places = [self._places.get(each, own) for each in instruction.operand_ids]
        if not all(place < own for place in places):
            raise _OtherFormSignal
        return [self._instructions[place] for place in places]


def _read_dimensions(instruction: Any) -> tuple[int, ...]:
    """Returns the dimensions of an array of 32-bit floats that lies in memory row by row."""
    shape = instruction.shape
    dimensions = tuple(shape.dimensions)
    if read_name(shape, "element_type") != "F32":
        raise _OtherFormSignal
    if list(shape.layout.minor_to_major) != list(reversed(range(len(dimensions)))):
        raise _OtherFormSignal
    if 4 * math.prod(dimensions) > _MOST_BYTES:
        raise _OtherFormSignal
    return dimensions


def _find_rows(instruction: Any, source: tuple[int, ...]) -> _Rows:
    """Returns where the elements of a slice lie in an array of these dimensions."""
    parts = instruction.slice_dimensions
    if len(parts) != len(source) or any(part.stride != 1 for part in parts):
        raise _OtherFormSignal
    sizes = [part.limit - part.start for part in parts]
    pitches = [math.prod(source[place + 1 :]) for place in range(len(source))]
    offset = sum(part.start * pitch for part, pitch in zip(parts, pitches, strict=True))
    cut = [place for place, size in enumerate(sizes) if size != source[place]]
    last = max(cut, default=0)
    # Rows follow one another only where none but the first dimension and that of a row is cut.
    if set(cut) - {0, last}:
        raise _OtherFormSignal
    columns = math.prod(sizes[last:])
    return offset, columns, source[last] * pitches[last] if source else columns
