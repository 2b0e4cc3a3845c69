"""Piece loops: one kernel that adds or multiplies pieces of arrays for several small loops.

It is written as PTX, see Note [Kernels as PTX]: a compiler of C++ would take longer than the kernel
saves in most loops. A sum of PTX that names its rounding is never made one with a product, so each
operation gives the bits that XLA's kernels give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracegraph.lowering.kernels.loops.conditions import FIRST_LINES

THREADS = 256
SYMBOL = "piece_loops"
# Of 32-bit floats: what IEEE 754 defines to the last bit.
OPERATIONS = {"add": "add.rn.f32", "subtract": "sub.rn.f32", "multiply": "mul.rn.f32"}
_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where in an array a loop finds its elements: in rows, one after the other.

    Attributes:
        argument: number of the array among the arguments of a kernel.
        offset: of the first element, in elements.
        columns: elements of a row.
        pitch: from one row to the next, in elements.
    """

    argument: int
    offset: int
    columns: int
    pitch: int

    def find_end(self, count: int) -> int:
        """Returns the first element behind all that a loop of so many reads.

        Example:
            >>> Piece(argument=0, offset=2, columns=3, pitch=10).find_end(6)
            15
        """
        last = count - 1
        return self.offset + last // self.columns * self.pitch + last % self.columns + 1


@dataclasses.dataclass(frozen=True)
class PieceLoop:
    """What is computed for each element, in 32-bit floats.

    Values are numbered: first the pieces, then one per operation.

    Attributes:
        count: of the elements.
        pieces: that are read.
        ops: one of `OPERATIONS` and the numbers of two earlier values each.
        results: for each array that is written the number of its value and of the argument.
    """

    count: int
    pieces: tuple[Piece, ...]
    ops: tuple[tuple[str, int, int], ...]
    results: tuple[tuple[int, int], ...]


def write_piece_loops(loops: Sequence[PieceLoop], places: Sequence[Sequence[int]]) -> bytes:
    """Returns the PTX of a kernel of one thread per element, and one row of blocks per loop.

    Args:
        loops: what each computes.
        places: for each argument of each loop the number of the kernel's parameter.
    """
    count = max(place for each in places for place in each) + 1
    values = max(len(loop.pieces) + len(loop.ops) for loop in loops)
    lines = [
        ".address_size 64",
        f".visible .entry {SYMBOL}({', '.join(f'.param .u64 p{i}' for i in range(count))})",
        "{",
        ".reg .pred %is;",
        f".reg .f32 %v<{values}>;",
        ".reg .b32 %loop, %index, %row, %rest;",
        ".reg .b64 %flat, %place, %array;",
        "mov.u32 %row, %ctaid.x;",
        "mov.u32 %index, %tid.x;",
        f"mad.lo.u32 %index, %row, {THREADS}, %index;",
        f"mul.wide.u32 %flat, %index, {_BYTES};",
        "mov.u32 %loop, %ctaid.y;",
    ]
    for number in range(len(loops)):
        lines += [f"setp.eq.u32 %is, %loop, {number};", f"@%is bra LOOP{number};"]
    lines.append("ret;")
    for number, (loop, own) in enumerate(zip(loops, places, strict=True)):
        lines += [f"LOOP{number}:", *_write_loop(loop, own)]
    return FIRST_LINES + "\n".join([*lines, "}", "\0"]).encode()


def _write_loop(loop: PieceLoop, places: Sequence[int]) -> list[str]:
    lines = [f"setp.ge.u32 %is, %index, {loop.count};", "@%is ret;"]
    for number, piece in enumerate(loop.pieces):
        lines += [
            *_find_element(piece, loop.count),
            f"ld.param.u64 %array, [p{places[piece.argument]}];",
            "add.u64 %array, %array, %place;",
            f"ld.global.f32 %v{number}, [%array+{_BYTES * piece.offset}];",
        ]
    for number, (opcode, left, right) in enumerate(loop.ops, start=len(loop.pieces)):
        lines.append(f"{OPERATIONS[opcode]} %v{number}, %v{left}, %v{right};")
    for value, argument in loop.results:
        lines += [
            f"ld.param.u64 %array, [p{places[argument]}];",
            "add.u64 %array, %array, %flat;",
            f"st.global.f32 [%array], %v{value};",
        ]
    return [*lines, "ret;"]


def _find_element(piece: Piece, count: int) -> list[str]:
    """Returns what sets the place to the bytes ahead of an element, less those of the offset."""
    if piece.columns >= count:
        return ["mov.u64 %place, %flat;"]
    # A division by a power of two, as most are, takes one instruction, others a dozen.
    shift = piece.columns.bit_length() - 1
    is_power = piece.columns == 1 << shift
    divide = f"shr.u32 %row, %index, {shift};"
    return [
        divide if is_power else f"div.u32 %row, %index, {piece.columns};",
        f"mul.lo.u32 %rest, %row, {piece.columns};",
        "sub.u32 %rest, %index, %rest;",
        f"mad.lo.u32 %rest, %row, {piece.pitch}, %rest;",
        f"mul.wide.u32 %place, %rest, {_BYTES};",
    ]
