"""FewRows: what a kernel for few rows is to compute, and how its work is cut.

Note [Two blocks side by side]
Each block of our kernels takes half of the shared memory of a multiprocessor of compute capability
9.0, whether it needs it or not: then a multiprocessor holds a block of this kernel, and one of the
next that has asked for its first bytes already, never three. And a kernel with fewer blocks than
there are multiprocessors gets blocks without work, up to one for each: a place that is left free
would be taken by a second block of the next kernel, which then has two blocks on some
multiprocessors and none on others. In one decoder's step, 35 % had none and 31 % had two; with
both rules it is half as many, and the step takes 3 % less time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracegraph.lowering.element_loops import ELEMENT_BYTES as FLOAT_BYTES
from tracegraph.lowering.kernels.row_functions import (
    REDUCTIONS,
    Form,
    RowFactors,
    RowFunction,
    find_row_factors,
)

THREADS, WARP, HALF_WARP, VECTOR_BYTES, LINE_BYTES = 256, 32, 16, 16, 128
WARPS = THREADS // WARP
# Copies of a thread that are on their way, the first number that there is room for: a block has up
# to 96 KB in flight.
STAGES = (24, 16, 8)
# Copies that a thread waits for, and works on, at once.
GROUP = 4
# Depths that a thread of a kernel on tensor cores has of each matrix at once.
QUAD = 4
# Of a block, see Note [Two blocks side by side].
SHARED_BYTES = 112 << 10
ELEMENT_BYTES = {**FLOAT_BYTES, "S8": 1, "F8E4M3FN": 1, "F8E5M2": 1}
# Of a thread, in registers; and most of them beside which it needs only half of all registers.
MAX_SUMS, HALF_SUMS = 128, 64
_WIDTHS, _SPLITS = (64, 128, 256), (1, 2, 4, 8)
# Columns of a warp on tensor cores.
_TENSOR_WIDTH, _TURNED_WIDTH = 64, 16
# What else a block costs, and a cluster, in bytes that could have come from memory meanwhile.
_BLOCK_COST, _CLUSTER_COST = 40 << 10, 24 << 10
# Memory does not serve all blocks alike: what the last one waits for, in bytes of the mean one. Of
# several turns the places that the first blocks leave are taken at once.
_SLOWEST_ALONE, _SLOWEST = 1.25, 1.1
_MIN_PART = 64
# Elements of rows that a thread loads at once; and most words of all operands in registers.
EIGHT, MAX_WORDS = 8, 96
# Rows that an instruction of a tensor core multiplies by, and the fewest that it is used for.
TILE_ROWS, MIN_TENSOR_ROWS = 8, 2


@dataclasses.dataclass(frozen=True)
class MatrixSegment:
    """Matrices of the same number of columns, and what is computed of their matmuls.

    Attributes:
        columns: of each matrix.
        matrices: numbers of the kernel's parameters.
        finish: takes one sum per matrix, and returns the results.
        kinds: XLA's name of the type of each result that is stored.
        chosen: the same of each of the others, which come behind these: of them the largest of each
            row is stored, one candidate for each block, see Note [Largest of a row].
    """

    columns: int
    matrices: tuple[int, ...]
    finish: RowFunction
    kinds: tuple[str, ...]
    chosen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FewRows:
    """Matmuls of the same rows.

    More than six fields because these are what tells one kernel from another.

    Attributes:
        rows: how many.
        depth: elements of a row.
        kinds: XLA's name of the type of each array that is read, in the order of the parameters.
        start: computes the rows.
        row_kind: XLA's name of the type that the program multiplies them in.
        segments: as many matrices in each.
        settled: numbers of the parameters that are there when the graph is launched.
        is_transposed: True where a matrix has its rows as columns: ``x @ w.T``.
    """

    rows: int
    depth: int
    kinds: tuple[str, ...]
    start: RowFunction
    row_kind: str
    segments: tuple[MatrixSegment, ...]
    settled: frozenset[int] = frozenset()
    is_transposed: bool = False

    @property
    def count(self) -> int:
        """How many matrices a block multiplies by."""
        return len(self.segments[0].matrices)

    @property
    def matrix_kind(self) -> str:
        """XLA's name of the type of the matrices."""
        return self.kinds[self.segments[0].matrices[0]]

    @property
    def is_on_tensor_cores(self) -> bool:
        """True where tensor cores multiply, see Note [Rows on tensor cores]."""
        return fits_tensor_cores(self.rows, self.row_kind, self.matrix_kind)

    @property
    def sums(self) -> int:
        """How many sums a thread has."""
        return self.count * count_sums(self.rows, self.row_kind, self.matrix_kind)

    @property
    def vector(self) -> int:
        """Elements of a matrix that are copied at once."""
        return VECTOR_BYTES // ELEMENT_BYTES[self.matrix_kind]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    Attributes:
        width: columns of a block.
        split: blocks of a cluster, each with a part of the depth.
        part: elements of a row that a block takes.
        stages: copies of a thread that are on their way.
    """

    width: int
    split: int
    part: int
    stages: int = STAGES[0]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a block reads rows.

    Attributes:
        span: warps that read one row.
        turns: rows of each warp, one after the other.
        ahead: how many of them it loads at once.
        chunks: of eight elements that a thread holds of a row; none where it reads one at a time.
        is_whole: True where every block needs whole rows, not its part of their depth alone.
        readers: threads that read one row: all of its warps, or half of one.
    """

    span: int
    turns: int
    ahead: int
    chunks: int
    is_whole: bool
    readers: int


def find_problem(problem: FewRows) -> str:
    """Returns why there is no kernel for it, or an empty text."""
    vector = problem.vector
    if problem.sums > MAX_SUMS:
        return f"{problem.rows} rows by {problem.count} matrices take too many registers"
    lengths = [each.columns for each in problem.segments]
    if any(length % vector for length in ([problem.depth] if problem.is_transposed else lengths)):
        return f"a line of a matrix is no multiple of {vector} elements"
    if next(_list_tilings(problem), None) is None:
        return "its rows do not fit into shared memory"
    return ""


def fits_tensor_cores(rows: int, row_kind: str, matrix_kind: str) -> bool:
    """True for matmuls that tensor cores can do, and do faster."""
    is_half = row_kind == matrix_kind and matrix_kind in ("BF16", "F16")
    return is_half and rows >= MIN_TENSOR_ROWS


def count_sums(rows: int, row_kind: str, matrix_kind: str) -> int:
    """Returns how many sums a thread has for each matrix."""
    vector = VECTOR_BYTES // ELEMENT_BYTES[matrix_kind]
    if fits_tensor_cores(rows, row_kind, matrix_kind):
        return -(-rows // TILE_ROWS) * 2 * vector
    return rows * vector


def choose_tiling(problem: FewRows, processors: int) -> Tiling:
    """Returns the tiling whose multiprocessors have the least to ask memory for.

    Args:
        problem: that has a kernel.
        processors: multiprocessors of the GPU.
    """

    def cost(tiling: Tiling) -> float:
        tiles = count_tiles(problem, tiling)
        size = tiling.part * tiling.width * problem.count * ELEMENT_BYTES[problem.matrix_kind]
        turns = -(-tiles * tiling.split // processors)
        slowest = _SLOWEST_ALONE if turns == 1 else _SLOWEST
        return turns * (slowest * size + _BLOCK_COST) + (tiling.split > 1) * _CLUSTER_COST

    return min(_list_tilings(problem), key=cost)


def count_tiles(problem: FewRows, tiling: Tiling) -> int:
    """Returns how many blocks there are for each part of the depth."""
    return sum(-(-segment.columns // tiling.width) for segment in problem.segments)


def count_blocks(segment: MatrixSegment, tiling: Tiling) -> int:
    """Returns how many blocks finish columns of a segment."""
    return -(-segment.columns // tiling.width) * tiling.split


def fill_grid(blocks: int, split: int, processors: int) -> int:
    """Returns how many blocks are started: Note [Two blocks side by side].

    Args:
        blocks: with work.
        split: blocks of a cluster.
        processors: multiprocessors of the GPU.
    """
    return max(blocks, processors // split * split)


def count_group(problem: FewRows) -> int:
    """Returns how many copies a thread waits for at once: as many of each matrix."""
    if problem.is_on_tensor_cores:
        return QUAD * problem.count
    return problem.count if GROUP % problem.count else GROUP


def count_residents(problem: FewRows) -> int:
    """Returns how many blocks of a multiprocessor the compiler leaves registers for."""
    is_by_rows = problem.is_transposed and not problem.is_on_tensor_cores
    return 2 if problem.sums <= HALF_SUMS and not is_by_rows else 1


def is_even(problem: FewRows, tiling: Tiling) -> bool:
    """True where all blocks have as much to do."""
    tails = [segment.columns % tiling.width for segment in problem.segments]
    return tiling.part * tiling.split == problem.depth and not any(tails)


def _list_tilings(problem: FewRows) -> Iterator[Tiling]:
    for width, split in itertools.product(_WIDTHS, _SPLITS):
        step = max(EIGHT, problem.vector)
        part = -(-problem.depth // (split * step)) * step
        stages = [each // count_group(problem) * count_group(problem) for each in STAGES]
        tilings = [Tiling(width, split, part, each) for each in stages if each]
        fitting = [each for each in tilings if _fits(problem, each)]
        across = width // problem.vector
        # A line of the memory is 128 bytes.
        is_odd = across > WARP or across * VECTOR_BYTES < LINE_BYTES
        is_odd &= not problem.is_transposed
        # A warp has columns of its own: there are no more than 16 for each.
        is_odd |= problem.is_transposed and problem.is_on_tensor_cores and width > 128
        is_short = split > 1 and problem.depth - (split - 1) * part < _MIN_PART
        if fitting and not is_odd and not is_short:
            yield fitting[0]


def _fits(problem: FewRows, tiling: Tiling) -> bool:
    return count_shared_bytes(problem, tiling) <= SHARED_BYTES


def count_shared_bytes(problem: FewRows, tiling: Tiling) -> int:
    """Returns the bytes of shared memory that a block takes."""
    totals = 4 * problem.count * problem.rows * tiling.width
    ring = tiling.stages * THREADS * VECTOR_BYTES
    rows = problem.rows * count_stride(problem, tiling)
    rows *= ELEMENT_BYTES[problem.matrix_kind] if problem.is_on_tensor_cores else 4
    # Sums of all warps, or of those that lie along the depth, are where copies and rows have been,
    # and later the elements that the largest is chosen of.
    width = _TURNED_WIDTH if problem.is_transposed else _TENSOR_WIDTH
    apart = WARPS * width // tiling.width if problem.is_on_tensor_cores else WARPS
    partial = apart * 4 * problem.count * problem.rows * count_line(problem, tiling)
    is_by_rows = problem.is_transposed and not problem.is_on_tensor_cores
    behind = ring + rows if is_by_rows else max(ring + rows, partial)
    choices = max(len(segment.chosen) for segment in problem.segments)
    chosen = 4 * choices * problem.rows * tiling.width // tiling.split
    return totals + count_small_bytes(problem, tiling) + max(behind, chosen)


def count_line(problem: FewRows, tiling: Tiling) -> int:
    """Returns how far apart the sums of two rows are that a warp has of its columns."""
    # Eight threads of a column each, and four of two rows each, find all banks.
    return tiling.width + 4 * problem.is_on_tensor_cores


def find_factors(problem: FewRows) -> RowFactors | None:
    """Returns what of the rows can be multiplied by at the end: see Note [Norms at the end].

    Rows of float16 may be too large for their type before they are divided by their norm.
    """
    is_narrow = problem.is_on_tensor_cores and problem.matrix_kind == "F16"
    return None if is_narrow else find_row_factors(problem.start)


def count_norms(problem: FewRows) -> int:
    """Returns how many sums along a row the end needs."""
    factors = find_factors(problem)
    return 0 if factors is None else len(factors.sums)


def count_small_bytes(problem: FewRows, tiling: Tiling) -> int:
    """Returns the bytes of sums along rows: of one block while it makes them, then of all."""
    norms = 4 * tiling.split * count_norms(problem) * problem.rows
    return LINE_BYTES * (1 + -(-norms // LINE_BYTES))


def count_stride(problem: FewRows, tiling: Tiling) -> int:
    """Returns how many elements of a row there is place for in shared memory."""
    if problem.is_transposed and not problem.is_on_tensor_cores:
        return tiling.part
    # Threads read as many as they have copies; the last ones may be no elements.
    unit = THREADS * problem.vector // tiling.width * (count_group(problem) // problem.count)
    kept = -(-tiling.part // unit) * unit
    # Eight threads that read one row each, and four beside each of them, find all banks.
    rest = 8 if problem.is_transposed else 16
    return kept + (-kept + rest) % 64 if problem.is_on_tensor_cores else kept


def count_vectors(problem: FewRows, parameter: int) -> int:
    """Returns how many loads bring eight elements of an array."""
    return EIGHT * ELEMENT_BYTES[problem.kinds[parameter]] // VECTOR_BYTES


def choose_reading(problem: FewRows, tiling: Tiling) -> Reading:
    """Returns how the rows are read: with as few warps for each as there are registers for."""
    start = problem.start
    is_whole = any(op.opcode in REDUCTIONS for op in start.ops) and find_factors(problem) is None
    length = problem.depth if is_whole else tiling.part
    span = WARPS
    while span > 1 and WARPS // span < problem.rows:
        span //= 2
    full, column = (
        sum(
            count_vectors(problem, each.parameter) * VECTOR_BYTES // 4
            for each in start.operands
            if each.form is form
        )
        for form in (Form.FULL, Form.COLUMN)
    )
    chunks = -(-length // (WARP * span * EIGHT))
    while span < WARPS and chunks * (full + column) > MAX_WORDS:
        span *= 2
        chunks = -(-length // (WARP * span * EIGHT))
    # Half a warp reads a short row, so that twice as many sums of rows are made at once.
    halves = 2 if span == 1 and length <= HALF_WARP * EIGHT and problem.rows > WARPS else 1
    readers = WARP * span // halves
    turns = -(-problem.rows // (THREADS // readers))
    if problem.depth % EIGHT or chunks * (full + column) > MAX_WORDS:
        return Reading(span, turns, 1, 0, is_whole, readers)
    ahead = (MAX_WORDS - chunks * column) // (chunks * full) if full else turns
    return Reading(span, turns, min(turns, ahead), chunks, is_whole, readers)
