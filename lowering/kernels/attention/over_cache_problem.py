"""Attention: what a kernel for attention over a cache is to compute, and how its work is cut."""

from __future__ import annotations

import dataclasses
import math

from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.matmuls.few_rows_problem import ELEMENT_BYTES, VECTOR_BYTES, WARP

THREADS = 256
# Rows of one block, in registers, and their elements; more rows have blocks of their own.
MAX_CHUNK, MAX_ELEMENTS = 8, 1024
# More of them have enough to do for the tensor cores.
MAX_ROWS = 16
_SPLITS = (8, 4, 2, 1)
# Positions that a thread works on at once, and asks for ahead: 64 KB of a block.
_GROUP, _AHEAD = 4, 8


@dataclasses.dataclass(frozen=True)
class CacheUpdate:
    """What is written into a cache before it is read: one position.

    Attributes:
        position: of the group; one that the cache does not have writes nothing.
        element: of the group and ``d``.
    """

    position: ElementFunction
    element: ElementFunction


@dataclasses.dataclass(frozen=True)
class Cached:
    """Keys or values: a vector for each group and position, whose elements lie side by side.

    Attributes:
        parameter: the number of the kernel's parameter.
        base: where the first vector of a group is, in elements; of the group.
        stride: elements from one position to the next.
        update: what is written first, into the array itself; None where nothing is.
        is_settled: True where nothing else of the graph writes into it.
    """

    parameter: int
    base: ElementFunction
    stride: int
    update: CacheUpdate | None = None
    is_settled: bool = False


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of few rows over a cache.

    More than six fields because these are what tells one kernel from another. Functions have the
    variables ``g0``, ``g1``, ... of a group and ``r0``, ``r1``, ... of a row.

    Attributes:
        groups: sizes of the axes whose elements each have keys and values of their own.
        rows: sizes of the axes of queries of one group.
        length: positions.
        width: elements of a key, a value and a query.
        kinds: XLA's name of the type of each array that is read, in the order of the parameters.
        query: of the group, the row and ``d``.
        score: of the group, the row, the position ``t``, and ``sum``: dot product of query and key.
        keys: where they are.
        values: where they are, in the type of the keys.
        kind: XLA's name of the type of the result.
    """

    groups: tuple[int, ...]
    rows: tuple[int, ...]
    length: int
    width: int
    kinds: tuple[str, ...]
    query: ElementFunction
    score: ElementFunction
    keys: Cached
    values: Cached
    kind: str

    @property
    def group_count(self) -> int:
        """How many groups."""
        return math.prod(self.groups)

    @property
    def row_count(self) -> int:
        """How many queries of a group."""
        return math.prod(self.rows)

    @property
    def cache_kind(self) -> str:
        """XLA's name of the type of keys and values."""
        return self.kinds[self.keys.parameter]

    @property
    def vector(self) -> int:
        """Elements of a key that are copied at once."""
        return VECTOR_BYTES // ELEMENT_BYTES[self.cache_kind]


@dataclasses.dataclass(frozen=True)
class AttentionTiling:
    """How the work is cut.

    Attributes:
        chunk: rows of a block.
        split: blocks of a cluster, each with a part of the positions.
        part: positions of a block.
        group: positions that a thread works on at once.
        places: of such groups that are asked for ahead.
    """

    chunk: int
    split: int
    part: int
    group: int
    places: int


def find_attention_problem(problem: Attention) -> str:
    """Returns why there is no kernel for it, or an empty text."""
    lanes = problem.width // problem.vector
    if problem.width % problem.vector or lanes not in (1, 2, 4, 8, 16, 32):
        return f"{problem.width} elements of {problem.cache_kind} are no power of two of vectors"
    if problem.row_count > MAX_ROWS:
        return f"{problem.row_count} rows are more than {MAX_ROWS}"
    if problem.kinds[problem.values.parameter] != problem.cache_kind:
        return "keys and values have different types"
    if any(each.stride % problem.vector for each in (problem.keys, problem.values)):
        return f"vectors do not begin at multiples of {VECTOR_BYTES} bytes"
    return ""


def choose_attention_tiling(problem: Attention, processors: int) -> AttentionTiling:
    """Returns the tiling that gives the multiprocessors the most even work.

    Args:
        problem: that has a kernel.
        processors: multiprocessors of the GPU.
    """
    chunks = -(-problem.row_count // min(MAX_CHUNK, MAX_ELEMENTS // problem.width))
    chunk = -(-problem.row_count // chunks)
    slices = THREADS // (problem.width // problem.vector)
    blocks = problem.group_count * chunks
    # A block is worth its start from one position for each of its threads on.
    splits = [
        each
        for each in _SPLITS
        if each == 1
        or (
            blocks * each <= 2 * processors
            and -(-problem.length // each) >= slices
            and chunk * problem.width % each == 0
        )
    ]
    split = splits[0]
    part = -(-problem.length // split)
    steps = -(-part // slices)
    group = min(_GROUP, steps)
    places = min(_AHEAD // group, -(-steps // group))
    return AttentionTiling(chunk, split, part, group, places)


def count_attention_ring(tiling: AttentionTiling) -> int:
    """Returns the bytes of the copies of keys and values."""
    return 2 * tiling.places * tiling.group * THREADS * VECTOR_BYTES


def count_attention_shared(problem: Attention, tiling: AttentionTiling) -> int:
    """Returns the bytes of shared memory that a block takes."""
    width, rows = problem.width, tiling.chunk
    queries, fresh = rows * width, 2 * width
    parts = THREADS // WARP * rows * (width + 2)
    totals = rows * width + 2 * tiling.split * rows
    return count_attention_ring(tiling) + 4 * (queries + fresh + parts + totals)
