"""The kernel of attention in tiles that adds along the columns: a line of the result for each row.

Note [Rows of attention]
A block has some strips of 16 rows, and all columns of their group in shared memory. The columns are
split over a few warps of a strip, so that what a warp has of the sums fits into its registers from
the products to the weights; they join their row values, and at the end what they have of a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.few_rows_ends import indent
from tracegraph.lowering.kernels.few_rows_problem import ELEMENT_BYTES
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.lowering.kernels.tiled_attention import (
    SHARED_LIMIT,
    STRIP,
    Lines,
    Output,
    Strips,
    TiledAttention,
    choose_strips,
    count_exchanged,
    count_neighbours,
    count_parts,
    count_parts_of_floats,
    fill_parts,
    find_most_strips,
    write_bases,
    write_place,
    write_sizes,
)
from tracegraph.lowering.kernels.tiled_attention_hidden import (
    Hidden,
    find_hidden,
    write_held,
    write_hidden,
)
from tracegraph.lowering.kernels.tiled_attention_source import (
    FUNCTIONS,
    ORDERED_PLACE,
    PLACE,
    ROW_BODY,
    ROW_FUNCTIONS,
    SEEN,
)
from tracegraph.lowering.kernels.tiled_attention_steps import RowSteps
from tracegraph.runtime.nodes import LaunchShape

# Warps of a strip, and most columns that one of them has, of all products together.
_SHARERS, _MAX_COLUMNS = (1, 2, 4), 128


def write_rows(
    problem: TiledAttention,
    weight: ElementFunction,
    matrix: Lines,
    output: Output,
    processors: int,
    *,
    keeps_rows: bool,
) -> OwnKernel:
    """Returns the kernel, see Note [Rows of attention].

    Its parameters are the arrays that are read, the result, and where they are kept the row values,
    float32 of the shape (groups, stages, rows).

    Args:
        problem: without a problem, see `find_tiled_problem`.
        weight: of the group, ``r``, ``t``, the sums and all row values.
        matrix: its lines are those that are added up, one for each column.
        output: where the results are; their lines begin at multiples of 16 bytes.
        processors: multiprocessors of the GPU.
        keeps_rows: the row values are a result, too.

    Raises:
        ValueError: lines of the matrix, beside those of two products, are too many.
    """
    arrays = _list_arrays(problem, matrix)
    tiling = choose_row_strips(problem, matrix, processors)
    shared = _count_shared(problem, len(arrays), tiling)
    if shared > SHARED_LIMIT:
        raise ValueError(f"{shared} bytes are more than shared memory has")
    sizes = write_sizes(problem, tiling, _find_places(problem, matrix, tiling))
    hidden = find_hidden(problem, problem.stages, [weight])
    sizes += write_held(problem, is_hidden=hidden is not None)
    if hidden is not None:
        sizes += write_hidden(hidden, problem, strips=tiling.strips, by_rows=True)
    body = _write_body(problem, weight, matrix, hidden, keeps_rows=keeps_rows)
    result = len(problem.kinds)
    place = write_place(problem, output, result)
    body += f"    store_lines({place}, {output.strides[-1]}, (float *)shared, mixed);\n"
    parameters = [f"const {TYPES[kind]} *p{number}" for number, kind in enumerate(problem.kinds)]
    parameters.append(f"{TYPES[output.kind]} *p{result}")
    parameters += ["float *kept"] if keeps_rows else []
    neighbours = count_neighbours(_count_registers(problem, tiling), tiling, shared)
    text = f"({', '.join(parameters)}) {{\n{body}}}\n"
    begin = f"{sizes}{FUNCTIONS}{ROW_FUNCTIONS}KERNEL(THREADS, {neighbours}) "
    symbol = name_kernel("tiled_attention_rows", begin + text)
    blocks = problem.group_count * (problem.rows // STRIP // tiling.strips)
    shape = LaunchShape((blocks, 1, 1), (tiling.threads, 1, 1), shared_bytes=shared)
    return OwnKernel(symbol, HEAD + begin + symbol + text, shape)


def choose_row_strips(problem: TiledAttention, matrix: Lines, processors: int) -> Strips:
    """Returns how the work of the kernel is cut.

    Args:
        problem: that has a kernel.
        matrix: whose lines are added up.
        processors: multiprocessors of the GPU.
    """
    count, products = problem.columns // STRIP, len(problem.products)
    few = problem.group_count * problem.rows // STRIP < processors
    fitting = [
        Strips(1, sharers, -(-count // sharers) * STRIP)
        for sharers in _SHARERS
        if sharers == 1 or count >= sharers
    ]
    enough = [each for each in fitting if each.share * products <= _MAX_COLUMNS]
    one = enough[-1] if few else enough[0]
    arrays = len(_list_arrays(problem, matrix))
    most = find_most_strips(_count_registers(problem, one), one.sharers)
    while most > 1 and _count_shared(problem, arrays, one.repeat(most)) > SHARED_LIMIT:
        most -= 1
    strips = choose_strips(problem.rows, problem.group_count, most, processors)
    return one.repeat(strips)


def _count_registers(problem: TiledAttention, tiling: Strips) -> int:
    """Returns how many a thread needs: for sums, then for weights beside the result."""
    weights = tiling.share * ELEMENT_BYTES[problem.kind] // 8
    sums = tiling.share * len(problem.products) // 2
    return max(sums, weights + problem.width // 2) + count_parts_of_floats(problem)


def _list_arrays(problem: TiledAttention, matrix: Lines) -> list[Lines]:
    """Returns the operands with a line for each column, each once, right ones first."""
    return list(dict.fromkeys([*(right for _, right in problem.products), matrix]))


def _count_lines(problem: TiledAttention, arrays: int, tiling: Strips) -> int:
    return arrays * problem.columns + len(problem.products) * tiling.strips * STRIP


def _count_shared(problem: TiledAttention, arrays: int, tiling: Strips) -> int:
    lines = _count_lines(problem, arrays, tiling) * problem.line_bytes
    return max(lines + count_exchanged(problem, tiling), count_parts(problem, tiling))


def _find_places(problem: TiledAttention, matrix: Lines, tiling: Strips) -> dict[str, int]:
    """Returns where lines are in shared memory."""
    arrays = _list_arrays(problem, matrix)
    line = problem.width // problem.vector + 1
    return {
        "LINES_BYTES": _count_lines(problem, len(arrays), tiling) * problem.line_bytes,
        "MATRIX": arrays.index(matrix) * problem.columns * line,
        "LEFT": len(arrays) * problem.columns * line,
    }


def _write_body(
    problem: TiledAttention,
    weight: ElementFunction,
    matrix: Lines,
    hidden: Hidden | None,
    *,
    keeps_rows: bool,
) -> str:
    arrays = _list_arrays(problem, matrix)
    steps = RowSteps(
        problem, weight, [arrays.index(right) for _, right in problem.products], hidden
    )
    copies = _write_copies(problem, arrays, steps.early, is_hidden=hidden is not None)
    again = _write_lines(arrays, "~asked") if hidden is not None else []
    text = steps.write(indent(again, 4), keeps_rows=keeps_rows)
    place = fill_parts(PLACE, {"{LINES}": "ROWS"}) if hidden is None else ORDERED_PLACE
    parts = {
        "PLACE": place,
        "BASES": write_bases(problem, [*arrays, *(left for left, _ in problem.products)]),
        "SEEN": "" if hidden is None else SEEN,
        "SEES": indent([_write_sees(is_hidden=hidden is not None)], 4),
        "COPIES": indent(copies, 4),
        "HEADS": indent(steps.heads, 4),
        "STEPS": text,
    }
    return fill_parts(ROW_BODY, {f"{{{name}}}\n": text for name, text in parts.items()})


def _write_sees(*, is_hidden: bool) -> str:
    sees = "IS_EVEN || column(tile) < COLUMNS"
    if is_hidden:
        sees = "bool(seen >> column(tile) / 16 & 1)"
    return f"auto sees = [&](int tile) {{ return {sees}; }};"


def _write_copies(
    problem: TiledAttention, arrays: list[Lines], early: set[int], *, is_hidden: bool
) -> list[str]:
    """Returns what asks for all lines; those that are needed first come first.

    Args:
        problem: what is computed.
        arrays: of which there is a line for each column.
        early: numbers of the products that all begins with.
        is_hidden: some lines may be needed by no row of the block.
    """
    bits = "asked" if is_hidden else ""
    late = [number for number in range(len(problem.products)) if number not in early]
    first = {problem.products[number][1] for number in early}
    lines = []
    for numbers, are_early in ((sorted(early), True), (late, False)):
        for number in numbers:
            left = problem.products[number][0]
            start = f"lines{len(arrays) + number} + (long long)first * {left.stride}"
            place = f"LEFT + {number} * STRIPS * 16 * LINE"
            lines.append(f"ask_lines<STRIPS * 16>(slot, {place}, {start}, {left.stride});")
        wanted = [each for each in arrays if (each in first) == are_early]
        lines += _write_lines(arrays, bits, wanted)
        lines.append("commit_copies();")
    return lines


def _write_lines(
    arrays: list[Lines], bits: str, wanted: Sequence[Lines] | None = None
) -> list[str]:
    """Returns what asks for the lines of some arrays, or of all."""
    lines = []
    for number, each in enumerate(arrays):
        if wanted is None or each in wanted:
            place = f"{number} * COLUMNS * LINE, lines{number}, {each.stride}"
            lines.append(f"ask_lines<COLUMNS>(slot, {place}{bits and ', '}{bits});")
    return lines
