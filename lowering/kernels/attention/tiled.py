"""TiledAttention: attention of many rows in training, what its kernels compute and what they need.

Note [Attention in tiles]
For each group, the matmul of all rows with all columns stays in registers, and is never written:

* sums: one or two matmuls of rows and columns, as queries with keys, and in the backward pass the
  gradient of the result with values;
* row values: one after the other, each a function of sums and earlier row values that is
  added up, or of which the largest is found, along the columns. Nothing here knows a softmax;
* weights: a function of sums and row values, by which lines of a matrix are multiplied and added.

One kernel adds along the columns, see `tiled_rows`, another one along the rows, see
`tiled_columns`; it is given the row values, and none of them adds in memory.

Tensor cores give a thread the sums of two lines with two neighbours of each eight others, and take
the weights that it computes from them where they are: see "Matrix fragments for mma.m16n8k16" in
the PTX ISA, and Dao, "FlashAttention-2", 2023. Which of the added up lines is where in an
instruction is free, so that those for float32 need no exchange either. A line in shared memory is
followed by a vector of 16 bytes, so that eight lines that are read at once, and a column of them,
lie in different banks.

Sums, row values and results are added up in float32.

Note [Weights in two parts]
The program rounds weights of 16 bits before it multiplies by them, and so does XLA. Rounded in the
same way, results would be as exact as XLA's, now a little less, now a little more. What rounding
has left is multiplied, too: each instruction reads the same lines for both parts.

Note [Floats in two parts]
Of a float32 tensor cores take ten bits. So it is split in two, its first bits and those behind
them, and three of the four products of such parts are added up: nearly all bits, where XLA's
matmuls have ten unless they are told otherwise. (Ootomo and Yokota, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022.) What is
infinite has no rest: such a result is not a number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from tracegraph.lowering.kernels.device_head import TYPES
from tracegraph.lowering.kernels.element_functions import (
    FLOAT,
    ElementFunction,
    ElementLines,
)
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.matmuls.few_rows_problem import ELEMENT_BYTES, VECTOR_BYTES, WARP
from tracegraph.lowering.kernels.row_functions import REDUCTIONS

# Lines of a strip: what an instruction multiplies at once.
STRIP = 16
MAX_COLUMNS, MAX_WIDTH = 256, 128
SHARED_LIMIT = 227 << 10
# Of a multiprocessor, and of one thread.
REGISTERS, MAX_REGISTERS = 1 << 16, 255
_MATRIX_KINDS = ("BF16", "F16", "F32")
_KINDS = (*_MATRIX_KINDS, "S32", "PRED")
# Beside sums, what a thread needs for addresses and the functions.
_OTHER_REGISTERS = 64
# Two blocks of so many warps beside each other are faster than one of twice as many.
_MAX_STRIPS, _MAX_WARPS = 4, 8
# Of shared memory, that a block has for the GPU's own use.
_BLOCK_BYTES = 1 << 10


@dataclasses.dataclass(frozen=True)
class Lines:
    """Where the lines of one operand are, whose elements lie side by side.

    Attributes:
        parameter: the number of the kernel's parameter.
        base: where the first line of a group is, in elements; of ``g0``, ``g1``, ...
        stride: elements from one line to the next.
    """

    parameter: int
    base: ElementFunction
    stride: int


@dataclasses.dataclass(frozen=True)
class RowValue:
    """A value of each row, from all of its columns.

    Attributes:
        kind: ``max`` or ``sum``.
        function: of the group, ``r``, ``t``, ``sum0``, ``sum1`` and the earlier ``row0``, ...
    """

    kind: str
    function: ElementFunction


@dataclasses.dataclass(frozen=True)
class TiledAttention:
    """What the kernels of one attention have in common, see Note [Attention in tiles].

    More than six fields because these are what tells one kernel from another. Functions have the
    variables ``g0``, ``g1``, ... of a group, ``r`` of a row, ``t`` of a column, ``sum0`` and
    ``sum1``, and ``row0``, ``row1``, ...

    Attributes:
        groups: sizes of the axes of groups.
        rows: lines of the left operands of a group.
        columns: lines of its right operands.
        width: elements of a line.
        kinds: XLA's name of the type of each array that is read, in the order of the parameters.
        matmuls: one or two pairs, left and right.
        row_values: the row values.
        kind: XLA's name of the type of lines and results.
    """

    groups: tuple[int, ...]
    rows: int
    columns: int
    width: int
    kinds: tuple[str, ...]
    matmuls: tuple[tuple[Lines, Lines], ...]
    row_values: tuple[RowValue, ...]
    kind: str

    @property
    def group_count(self) -> int:
        """How many groups."""
        return math.prod(self.groups)

    @property
    def vector(self) -> int:
        """Elements that are copied at once."""
        return VECTOR_BYTES // ELEMENT_BYTES[self.kind]

    @property
    def line_bytes(self) -> int:
        """Of a line in shared memory."""
        return self.width * ELEMENT_BYTES[self.kind] + VECTOR_BYTES


@dataclasses.dataclass(frozen=True)
class ResultLines:
    """Where a result's lines are, whose elements lie side by side.

    Attributes:
        strides: elements from one group to the next, of each axis of groups, and from one line to
            the next.
        kind: XLA's name of its type: that of the lines that are added up, or ``F32``.
        base: where the first line of the first group is, in elements.
    """

    strides: tuple[int, ...]
    kind: str
    base: int = 0


@dataclasses.dataclass(frozen=True)
class Strips:
    """How the work is cut.

    Attributes:
        strips: of 16 lines, of one block.
        sharers: warps of a strip, each with a part of the other lines.
        share: other lines that a warp works on at once.
    """

    strips: int
    sharers: int
    share: int

    @property
    def warps(self) -> int:
        """How many a block has."""
        return self.strips * self.sharers

    @property
    def threads(self) -> int:
        """How many a block has."""
        return self.warps * WARP

    def repeat(self, strips: int) -> Strips:
        """Returns the same with so many strips."""
        return dataclasses.replace(self, strips=strips)


def find_tiled_problem(problem: TiledAttention) -> str:
    """Returns why there is no kernel for it, or an empty text."""
    if problem.kind not in _MATRIX_KINDS:
        return f"lines are {problem.kind}"
    if unknown := set(problem.kinds).difference(_KINDS):
        return f"arrays are {', '.join(sorted(unknown))}"
    for name in ("rows", "columns", "width"):
        if getattr(problem, name) % STRIP or not getattr(problem, name):
            return f"{getattr(problem, name)} {name} are no multiple of {STRIP}"
    if problem.columns > MAX_COLUMNS:
        return f"{problem.columns} columns are more than {MAX_COLUMNS}"
    if problem.width > MAX_WIDTH:
        return f"lines of {problem.width} elements are longer than {MAX_WIDTH}"
    if len(problem.matmuls) not in (1, 2):
        return f"there are {len(problem.matmuls)} matmuls"
    # Right operands of two matmuls, or that of one and the matrix of its weights.
    lines = 2 * problem.columns + len(problem.matmuls) * STRIP
    if lines * problem.line_bytes + count_exchanged(problem, Strips(1, 4, STRIP)) > SHARED_LIMIT:
        return f"{lines} lines of {problem.line_bytes} bytes are more than shared memory has"
    every = (each for pair in problem.matmuls for each in pair)
    return next(filter(None, (find_lines_problem(problem, each) for each in every)), "")


def find_lines_problem(problem: TiledAttention, lines: Lines) -> str:
    """Returns why an operand's lines cannot be read, or an empty text."""
    kind = problem.kinds[lines.parameter]
    if kind != problem.kind:
        return f"lines of parameter {lines.parameter} are {kind}, not {problem.kind}"
    if lines.stride % problem.vector or _find_factor(lines.base) % problem.vector:
        return f"lines of parameter {lines.parameter} begin at no multiple of {VECTOR_BYTES} bytes"
    return ""


def find_output_problem(problem: TiledAttention, output: ResultLines) -> str:
    """Returns why a result's lines cannot be written, or an empty text."""
    if output.kind not in (problem.kind, "F32"):
        return f"results are {output.kind}"
    if any(each % problem.vector for each in (*output.strides, output.base)):
        return f"lines of a result begin at no multiple of {VECTOR_BYTES} bytes"
    return ""


def _find_factor(function: ElementFunction) -> int:
    """Returns what divides a function's result for sure; zero for a result that is zero."""
    factors: list[int] = []
    for op in function.ops:
        given = [factors[number] for number in op.operands]
        if op.opcode == "constant" and op.type != FLOAT:
            factors.append(abs(int(op.detail)))
        elif op.opcode in ("int_add", "int_max", "int_min"):
            factors.append(math.gcd(*given))
        elif op.opcode == "int_mul":
            factors.append(math.prod(given))
        else:
            factors.append(1)
    return factors[function.results[0]]


def count_exchanged(problem: TiledAttention, tiling: Strips) -> int:
    """Returns the bytes through which the warps of a strip add up their row values."""
    return 4 * len(problem.row_values) * tiling.warps * STRIP


def count_parts(problem: TiledAttention, tiling: Strips) -> int:
    """Returns the bytes through which warps add up results."""
    return 4 * tiling.warps * STRIP * (problem.width + 8)


def choose_strips(lines: int, groups: int, most: int, processors: int) -> int:
    """Returns of how many strips a block is: of more where all multiprocessors have a block.

    Args:
        lines: of a group.
        groups: how many.
        most: strips that a block can have.
        processors: multiprocessors of the GPU.
    """
    count = lines // STRIP
    fitting = [each for each in range(1, most + 1) if count % each == 0]
    enough = [each for each in fitting if groups * count // each >= processors]
    return max(enough, default=1)


def find_most_strips(registers: int, sharers: int, blocks: int = 1) -> int:
    """Returns how many strips a block can have.

    Args:
        registers: of a thread, for sums.
        sharers: warps of a strip.
        blocks: that have to fit beside each other.
    """
    fitting = REGISTERS // blocks // (_add_others(registers) * WARP * sharers)
    return max(1, min(_MAX_STRIPS, _MAX_WARPS // sharers, fitting))


def count_neighbours(registers: int, tiling: Strips, shared: int) -> int:
    """Returns how many blocks a multiprocessor has at once.

    Args:
        registers: of a thread, for sums.
        tiling: of a block.
        shared: bytes of a block.
    """
    by_registers = REGISTERS // (_add_others(registers) * tiling.threads)
    return max(1, min(by_registers, SHARED_LIMIT // (shared + _BLOCK_BYTES)))


def count_parts_of_floats(problem: TiledAttention) -> int:
    """Returns how many registers a thread needs for parts: see Note [Floats in two parts]."""
    return 32 if problem.kind == "F32" else 0


def _add_others(registers: int) -> int:
    return min(registers + _OTHER_REGISTERS, MAX_REGISTERS)


def write_sizes(problem: TiledAttention, tiling: Strips, others: dict[str, int]) -> str:
    """Returns the constants of a kernel.

    Args:
        problem: what is computed.
        tiling: how it is cut.
        others: what else the kernel has, by name.
    """
    sizes = {
        "ROWS": problem.rows,
        "COLUMNS": problem.columns,
        "WIDTH": problem.width,
        "VECTOR": problem.vector,
        "MATMULS": len(problem.matmuls),
        "ROW_VALUES": len(problem.row_values),
        "STRIPS": tiling.strips,
        "SHARERS": tiling.sharers,
        "SHARE": tiling.share,
        "THREADS": tiling.threads,
        **others,
    }
    lines = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    return "\n".join([*lines, f"typedef {TYPES[problem.kind]} Element;"]) + "\n"


def fill_parts(text: str, parts: Mapping[str, str]) -> str:
    """Returns a text with parts in the place of their names."""
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def name_groups(problem: TiledAttention) -> dict[str, str]:
    """Returns the variables of a group with their expressions."""
    return {f"g{axis}": f"g{axis}" for axis in range(len(problem.groups))}


def write_bases(problem: TiledAttention, arrays: Sequence[Lines]) -> str:
    """Returns what finds the group, and for each array ``lines0``, ..., where its lines begin."""
    lines, stride = [], 1
    for axis in reversed(range(len(problem.groups))):
        lines.append(f"const int g{axis} = group / {stride} % {problem.groups[axis]};")
        stride *= problem.groups[axis]
    for number, each in enumerate(arrays):
        written = ElementLines(each.base, f"b{number}_")
        lines += written.write(name_groups(problem))
        place = f"p{each.parameter} + {written.name_results()[0]}"
        lines.append(f"const Element *const lines{number} = {place};")
    return indent(lines, 4)


def write_place(problem: TiledAttention, output: ResultLines, parameter: int) -> str:
    """Returns where the block's first line of a result is, in C++."""
    names = [*name_groups(problem), "first"]
    terms = [
        f"(long long){name} * {stride}" for name, stride in zip(names, output.strides, strict=True)
    ]
    return f"p{parameter} + ({' + '.join([str(output.base), *terms])})"


def name_sums(problem: TiledAttention) -> dict[str, str]:
    """Returns the variables of sums with their expressions, where a thread has one element."""
    return {
        f"sum{each}": f"sums[{each}][tile][upper * 2 + e]" for each in range(len(problem.matmuls))
    }


def name_rows(numbers: Iterable[int], expression: str) -> dict[str, str]:
    """Returns the variables of row values.

    Args:
        numbers: of row values.
        expression: of one, with its number in braces.
    """
    return {f"row{number}": expression.format(number) for number in numbers}


def find_reduction(row_value: RowValue) -> tuple[str, str]:
    """Returns what a row value begins with, and how two of its values are joined, in C++."""
    begin, joined = REDUCTIONS[f"reduce_{row_value.kind}"]
    return f"literal(0x{begin}u)", joined
