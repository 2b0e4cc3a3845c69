"""The kernel of a matmul of few rows by large matrices, with what is computed around it.

Note [Matmuls of few rows]
One new token of a decoder multiplies a vector by each matrix of the model. All that counts is how
fast the matrices come from memory, so the kernel is made for that:

* each thread copies 16 bytes at a time into its own places in shared memory, many copies ahead, so
  that enough is on its way while it computes, and no thread waits for another;
* the first copies are asked for before the wait for the kernel ahead, see Note [Early loads];
* what is small is computed by each block for itself: the norm of the rows in front of the matmul.
  Each thread keeps its elements in registers, so that they are asked for once, all at a time;
* what is added or multiplied at the end is asked for at the beginning;
* a matrix of few columns is split along its depth over the blocks of a cluster, which add up what
  they have in each other's shared memory, so that all multiprocessors have something to ask for;
* matmuls of the same rows are one kernel: side by side where nothing else joins them, and in one
  block where it does, as the two of a gated layer do.

Its limit is the bytes of the matrices over the memory's rate: see docs/design/replacements.md.

Rows are held in float32, products are added in float32, and a result is rounded when it is stored.

Note [Norms at the end]
A factor that all elements of a row share can wait until the row has been multiplied: the rows of an
RMS norm are kept without it, and sums are multiplied by it. So each block reads its own part of the
rows alone, once, and does not wait for what others have of their sums.
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.matmuls.few_rows_ends import (
    count_turns,
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
    MatrixSegment,
    Tiling,
    choose_reading,
    choose_tiling,
    count_blocks,
    count_group,
    count_line,
    count_norms,
    count_residents,
    count_small_bytes,
    count_stride,
    count_tiles,
    fill_grid,
    is_even,
)
from tracegraph.lowering.kernels.matmuls.few_rows_source import (
    ADD_PARTIAL,
    BODY,
    COLUMN_STEPS,
    COLUMN_TOTALS,
    FUNCTIONS,
    KEEP_FLOATS,
    ROW_STEPS,
)
from tracegraph.lowering.kernels.matmuls.few_rows_tensor import (
    KEEP_HALVES,
    KEEP_TURNED,
    TENSOR_ROW_STEPS,
    TENSOR_ROW_TOTALS,
    TENSOR_STEPS,
    TENSOR_TOTALS,
)
from tracegraph.lowering.kernels.matmuls.largest import BEST
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape


def write_few_rows(problem: FewRows, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Matmuls of few rows].

    Args:
        problem: without a problem, see `find_problem`.
        processors: multiprocessors of the GPU.
    """
    tiling = choose_tiling(problem, processors)
    way = _choose_way(problem)
    parts = {
        "CHOOSE": write_choice(problem, tiling.width),
        "KEEP": way.keep,
        "STEPS": way.steps,
        "TOTALS": way.totals,
        **write_ends(problem, tiling),
    }
    body = BODY
    for name, text in parts.items():
        body = body.replace(f"{{{name}}}\n", text)
    best = BEST if any(segment.chosen for segment in problem.segments) else ""
    text = f"{_write_sizes(problem, tiling)}{FUNCTIONS}{best}{ADD_PARTIAL}{{\n{body}}}\n"
    symbol = name_kernel("few_rows", text)
    parameters = write_parameters(problem)
    opening = f"KERNEL(THREADS, RESIDENTS){' CLUSTERED(SPLIT)' if tiling.split > 1 else ''}"
    source = HEAD + text.replace("\n{\n", f"\n{opening} {symbol}({parameters}) {{\n", 1)
    blocks = fill_grid(count_tiles(problem, tiling) * tiling.split, tiling.split, processors)
    shape = LaunchShape((blocks, 1, 1), (THREADS, 1, 1), shared_bytes=SHARED_BYTES)
    return OwnKernel(symbol, source, shape, list_early_parameters(problem, tiling))


def count_candidates(problem: FewRows, segment: MatrixSegment, processors: int) -> int:
    """Returns how many candidates of a row a segment stores: see Note [Largest of a row].

    Args:
        problem: whose kernel it is.
        segment: of the problem.
        processors: multiprocessors of the GPU.
    """
    return count_blocks(segment, choose_tiling(problem, processors))


@dataclasses.dataclass(frozen=True)
class _Way:
    """What multiplies, in C++.

    Attributes:
        keep: puts elements of rows into shared memory.
        steps: copies, and multiplies by what has come.
        totals: adds up what the threads of a block have.
    """

    keep: str
    steps: str
    totals: str


def _choose_way(problem: FewRows) -> _Way:
    if problem.is_on_tensor_cores and problem.is_transposed:
        return _Way(KEEP_TURNED, TENSOR_ROW_STEPS, TENSOR_ROW_TOTALS)
    if problem.is_on_tensor_cores:
        return _Way(KEEP_HALVES, TENSOR_STEPS, TENSOR_TOTALS)
    if problem.is_transposed:
        return _Way(KEEP_FLOATS, ROW_STEPS, "")
    return _Way(KEEP_FLOATS, COLUMN_STEPS, COLUMN_TOTALS)


def _write_sizes(problem: FewRows, tiling: Tiling) -> str:
    reading = choose_reading(problem, tiling)
    sizes = {
        "ROWS": problem.rows,
        "ALL_ROWS": problem.rows,
        "COUNT": problem.count,
        "DEPTH": problem.depth,
        "VECTOR": problem.vector,
        "WIDTH": tiling.width,
        "SPLIT": tiling.split,
        "PART": tiling.part,
        "SHARE": tiling.width // tiling.split,
        "GROUP": count_group(problem),
        "STAGES": tiling.stages,
        "PLACES": tiling.stages // count_group(problem),
        "STRIDE": count_stride(problem, tiling),
        "LINE": count_line(problem, tiling),
        "NORMS": count_norms(problem),
        "SMALL_BYTES": count_small_bytes(problem, tiling),
        "SPAN": reading.span,
        "READERS": reading.readers,
        "ROW_TURNS": reading.turns,
        "AHEAD": reading.ahead,
        "IS_EVEN": int(is_even(problem, tiling)),
        "BLOCKS": count_tiles(problem, tiling) * tiling.split,
        "THREADS": THREADS,
        "WARPS": WARPS,
        "RESIDENTS": count_residents(problem),
        "TURNS": count_turns(problem, tiling),
    }
    lines = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    sync = "sync_cluster" if tiling.split > 1 else "sync_block"
    lines += [f"typedef {TYPES[problem.matrix_kind]} Weight;", f"#define sync {sync}"]
    return "\n".join(lines) + "\n"
