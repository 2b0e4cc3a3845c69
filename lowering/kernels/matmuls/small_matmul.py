"""The kernel of a matmul whose result has few tiles, with what is computed around it.

Note [Small matmuls]
A model of a few hundred rows and columns is a chain of matmuls that take three to five microseconds
each, of which tensor cores compute a tenth: the rest is the start of a kernel, one turn to the
memory after the other, and kernels of their own for norms, biases and residuals. So:

* tiles are small, one or two for each multiprocessor where that can be, and a block has all depths
  of its tile at once: everything is asked for at the beginning, and waited for once;
* weights are asked for before the wait for the kernel ahead, see Note [Early loads];
* each block computes for itself what is in front of the matmul, norms of its rows and their
  derivatives among it, and behind it what is computed element by element;
* the warps of a strip of 16 rows share its depths, and add up what they have in shared memory.

Rows are multiplied in two parts of eleven bits each (Note [Floats in two parts]), weights by their
first eleven bits alone, rounded (Note [Rounding for tensor cores]): with JAX's default precision
XLA rounds both. A third product, of what is left of the weights, made the step of a GPT of 12
layers 128 wide 2 % slower. Sums are float32; those of the larger parts are kept apart, for that of
an infinite value is infinite, and the rest is NaN.

These kernels are short, and the code of each has to be fetched anew in a step. So loops have as
many turns as the compiler knows of, and addresses grow by what it knows: 840 instructions became
408, see docs/design/replacements.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracegraph.lowering.kernels.device_head import HEAD
from tracegraph.lowering.kernels.matmuls.few_rows_ends import (
    list_early_parameters,
    write_choice,
    write_ends,
    write_parameters,
)
from tracegraph.lowering.kernels.matmuls.few_rows_problem import (
    SHARED_BYTES,
    THREADS,
    WARPS,
    FewRows,
    Tiling,
    choose_reading,
    count_norms,
)
from tracegraph.lowering.kernels.matmuls.few_rows_source import FUNCTIONS as ROW_FUNCTIONS
from tracegraph.lowering.kernels.matmuls.small_matmul_source import BODY, FUNCTIONS
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape

STRIP, DEEP, SCRATCH_FLOATS = 16, 8, 32
# By their time on an H100: rows that a block shares with few others, lines of the memory in whole.
_TILES = ((16, 32), (16, 64), (32, 64), (64, 64), (16, 16))
# Sums of a thread, in registers: one of the larger parts, and one of the rest.
_MAX_SUMS = 64
# As the gates of a cell have; more than two only in the smallest tile.
MAX_MATRICES = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block's part of the result.

    Attributes:
        rows: of the result.
        columns: of each matrix.
    """

    rows: int
    columns: int


def find_problem(problem: FewRows) -> str:
    """Returns why there is no kernel for a matmul, or an empty text."""
    if {problem.row_kind, problem.matrix_kind} != {"F32"}:
        return "it is not in float32"
    lines = [problem.depth] if problem.is_transposed else [s.columns for s in problem.segments]
    if problem.depth % DEEP or any(line % 4 for line in lines):
        return f"its depths are no multiple of {DEEP}, or a line of a matrix is none of 4"
    if next(_list_tiles(problem), None) is None:
        return "its depths do not fit into shared memory"
    return ""


def write_small_matmul(problem: FewRows, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Small matmuls].

    Args:
        problem: without a problem, see `find_problem`.
        processors: multiprocessors of the GPU.
    """
    tile = choose_tile(problem, processors)
    block, tiling = _describe_block(problem, tile)
    parts = {"CHOOSE": write_choice(problem, tile.columns), **write_ends(block, tiling)}
    body = BODY
    for name, part in parts.items():
        body = body.replace(f"{{{name}}}\n", part)
    text = f"{_write_sizes(problem, tile)}{ROW_FUNCTIONS}{FUNCTIONS}{{\n{body}}}\n"
    symbol = name_kernel("small_matmul", text)
    parameters = write_parameters(problem)
    source = HEAD + text.replace("\n{\n", f"\nKERNEL(THREADS, 2) {symbol}({parameters}) {{\n", 1)
    shape = LaunchShape(
        (count_blocks(problem, tile), 1, 1),
        (THREADS, 1, 1),
        shared_bytes=count_shared_bytes(problem, tile),
    )
    return OwnKernel(symbol, source, shape, list_early_parameters(block, tiling))


def choose_tile(problem: FewRows, processors: int) -> Tile:
    """Returns the first tile of which a multiprocessor has no more than two, else the largest.

    Args:
        problem: that has a kernel.
        processors: multiprocessors of the GPU.
    """
    tiles = list(_list_tiles(problem))
    few = (tile for tile in tiles if count_blocks(problem, tile) <= 2 * processors)
    return next(few, max(tiles, key=lambda tile: tile.rows * tile.columns))


def count_blocks(problem: FewRows, tile: Tile) -> int:
    """Returns how many blocks there are."""
    across = sum(-(-segment.columns // tile.columns) for segment in problem.segments)
    return across * -(-problem.rows // tile.rows)


def count_shared_bytes(problem: FewRows, tile: Tile) -> int:
    """Returns the bytes of shared memory that a block takes."""
    lines, line = _shape_weights(problem, tile)
    held = tile.rows * _count_stride(problem.depth) + problem.count * lines * line
    sharers = WARPS * STRIP // tile.rows
    partial = sharers * problem.count * tile.rows * _count_part_line(tile)
    return 4 * (SCRATCH_FLOATS + _count_norm_floats(problem, tile) + max(held, partial))


def _list_tiles(problem: FewRows) -> Iterator[Tile]:
    for tile in itertools.starmap(Tile, _TILES):
        sums = problem.count * tile.columns
        if sums <= _MAX_SUMS and count_shared_bytes(problem, tile) <= SHARED_BYTES:
            yield tile


def _describe_block(problem: FewRows, tile: Tile) -> tuple[FewRows, Tiling]:
    """Returns a block as a problem of its own: a few rows, with all of their depths."""
    return dataclasses.replace(problem, rows=tile.rows), Tiling(tile.columns, 1, problem.depth)


def _shape_weights(problem: FewRows, tile: Tile) -> tuple[int, int]:
    """Returns how many lines of a matrix a block has, and how far apart they are in floats.

    So far that threads which read at once find all banks: four lines and eight columns of each,
    or eight lines and two elements of four places in each.
    """
    if problem.is_transposed:
        return tile.columns, _count_stride(problem.depth)
    return problem.depth, tile.columns + 4


def _count_stride(depth: int) -> int:
    return depth + (8 - depth) % 32


def _count_part_line(tile: Tile) -> int:
    return tile.columns + 8


def _count_norm_floats(problem: FewRows, tile: Tile) -> int:
    return -(-count_norms(problem) * tile.rows // 4) * 4


def _write_sizes(problem: FewRows, tile: Tile) -> str:
    block, tiling = _describe_block(problem, tile)
    reading = choose_reading(block, tiling)
    lines, line = _shape_weights(problem, tile)
    strips = tile.rows // STRIP
    sizes = {
        "ROWS": tile.rows,
        "ALL_ROWS": problem.rows,
        "ROW_TILES": -(-problem.rows // tile.rows),
        "COUNT": problem.count,
        "DEPTH": problem.depth,
        "WIDTH": tile.columns,
        "SHARE": tile.columns,
        "SPLIT": 1,
        "STRIDE": _count_stride(problem.depth),
        "LINES": lines,
        "LINE": line,
        "VECTORS": (problem.depth if problem.is_transposed else tile.columns) // 4,
        "PART_LINE": _count_part_line(tile),
        "NORMS": count_norms(block),
        "NORM_FLOATS": _count_norm_floats(block, tile),
        "STRIPS": strips,
        "SHARERS": WARPS // strips,
        "SPAN": reading.span,
        "READERS": reading.readers,
        "ROW_TURNS": reading.turns,
        "AHEAD": reading.ahead,
        "IS_TRANSPOSED": int(problem.is_transposed),
        "IS_EVEN": int(all(s.columns % tile.columns == 0 for s in problem.segments)),
        "THREADS": THREADS,
        "WARPS": WARPS,
        "TURNS": -(-tile.rows * tile.columns // THREADS),
    }
    texts = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    return "\n".join([*texts, "typedef float Weight;"]) + "\n"
