"""The kernel of attention in tiles that adds along the columns: a line of the result for each row.

Note [Rows of attention]
A block has some strips of 16 rows, and all columns of their group in shared memory. The columns are
split over a few warps of a strip, so that what a warp has of the sums fits into its registers from
the matmuls to the weights; they join their row values, and at the end what they have of a result.

Where a mask hides columns a block has those that some of its rows see, side by side. How many each
warp has is known when it is compiled, once for each count that a block has: each count is a
function, with registers of its own.
"""

from __future__ import annotations

from tracegraph.lowering.kernels.attention.tiled import (
    SHARED_LIMIT,
    STRIP,
    Lines,
    ResultLines,
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
from tracegraph.lowering.kernels.attention.tiled_hidden import (
    Blocks,
    Hidden,
    find_hidden,
    list_row_blocks,
)
from tracegraph.lowering.kernels.attention.tiled_source import (
    FUNCTIONS,
    HIDDEN_ROW_KERNEL,
    ROW_BODY,
    ROW_FUNCTIONS,
    ROW_KERNEL,
)
from tracegraph.lowering.kernels.attention.tiled_steps import RowSteps
from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.matmuls.few_rows_problem import ELEMENT_BYTES
from tracegraph.lowering.kernels.own_kernel import OwnKernel, leaves_room, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape

# Warps of a strip, and most columns that one of them has, of all matmuls together.
_SHARERS, _MAX_COLUMNS = (1, 2, 4), 128
# Where blocks see different columns, fewer warps with more of them wait less for each other, as
# long as two blocks are beside each other: with lines of so many elements of 16 bits at most.
_MAX_HIDDEN_COLUMNS, _MAX_HIDDEN_WIDTH = 256, 64


def write_rows(
    problem: TiledAttention,
    weight: ElementFunction,
    matrix: Lines,
    output: ResultLines,
    processors: int,
    *,
    keeps_rows: bool,
) -> OwnKernel:
    """Returns the kernel, see Note [Rows of attention].

    Its parameters are the arrays that are read, the result, and where they are kept the row values,
    float32 of the shape (groups, row values, rows).

    Args:
        problem: without a problem, see `find_tiled_problem`.
        weight: of the group, ``r``, ``t``, the sums and all row values.
        matrix: its lines are those that are added up, one for each column.
        output: where the results are; their lines begin at multiples of 16 bytes.
        processors: multiprocessors of the GPU.
        keeps_rows: the row values are a result, too.

    Raises:
        ValueError: lines of the matrix, beside those of two matmuls, are too many.
    """
    arrays = _list_arrays(problem, matrix)
    hidden, tiling, seen = _find_hidden(problem, weight, matrix, processors)
    shared = _count_shared(problem, len(arrays), tiling)
    if shared > SHARED_LIMIT:
        raise ValueError(f"{shared} bytes are more than shared memory has")
    blocks = problem.group_count * (problem.rows // STRIP // tiling.strips)
    starts = {"STARTS_EARLY": int(leaves_room(blocks, processors))}
    sizes = write_sizes(problem, tiling, _find_places(problem, matrix, tiling) | starts)
    sizes += "" if seen is None else seen.write(problem.group_count)
    result = len(problem.kinds)
    parameters = [f"const {TYPES[kind]} *p{number}" for number, kind in enumerate(problem.kinds)]
    parameters.append(f"{TYPES[output.kind]} *p{result}")
    parameters += ["float *kept"] if keeps_rows else []
    listed = ", ".join(parameters)
    place = f"{write_place(problem, output, result)}, {output.strides[-1]}"
    find = "line" if seen is None else _write_find(problem, seen)
    parts = {"{RESULT}": place, "{FIND}": find}
    body = fill_parts(_write_body(problem, weight, matrix, hidden, keeps_rows=keeps_rows), parts)
    kind = "DEVICE" if seen is None else "FUNCTION"
    head = f"template <int PAIRS> {kind} bool attend(int group, int block, {listed})"
    given = ", ".join(each.partition("*")[2] for each in parameters)
    text = f"({listed}) {{\n{_write_kernel(seen, given, tiling)}}}\n"
    neighbours = count_neighbours(_count_registers(problem, tiling), tiling, shared)
    begin = f"{sizes}{FUNCTIONS}{ROW_FUNCTIONS}{head} {{\n{body}}}\n"
    begin += f"KERNEL(THREADS, {neighbours}) "
    symbol = name_kernel("tiled_attention_rows", begin + text)
    shape = LaunchShape((blocks, 1, 1), (tiling.threads, 1, 1), shared_bytes=shared)
    return OwnKernel(symbol, HEAD + begin + symbol + text, shape)


def choose_row_strips(
    problem: TiledAttention, matrix: Lines, processors: int, *, is_hidden: bool
) -> Strips:
    """Returns how the work of the kernel is cut.

    Args:
        problem: that has a kernel.
        matrix: whose lines are added up.
        processors: multiprocessors of the GPU.
        is_hidden: a mask hides some tiles.
    """
    count, matmuls = problem.columns // STRIP, len(problem.matmuls)
    few = problem.group_count * problem.rows // STRIP < processors
    fitting = [
        Strips(1, sharers, -(-count // sharers) * STRIP)
        for sharers in _SHARERS
        if sharers == 1 or count >= sharers
    ]
    is_wide = is_hidden and problem.kind != "F32" and problem.width <= _MAX_HIDDEN_WIDTH
    columns = _MAX_HIDDEN_COLUMNS if is_wide else _MAX_COLUMNS
    enough = [each for each in fitting if each.share * matmuls <= columns]
    one = enough[-1] if few else enough[0]
    arrays = len(_list_arrays(problem, matrix))
    most = find_most_strips(_count_registers(problem, one), one.sharers, 2 if is_wide else 1)
    while most > 1 and _count_shared(problem, arrays, one.repeat(most)) > SHARED_LIMIT:
        most -= 1
    strips = choose_strips(problem.rows, problem.group_count, most, processors)
    return one.repeat(strips)


def _find_hidden(
    problem: TiledAttention, weight: ElementFunction, matrix: Lines, processors: int
) -> tuple[Hidden | None, Strips, Blocks | None]:
    """Returns what is hidden, how the work is cut, and what each block sees.

    Nothing is hidden where all blocks see all columns.
    """
    hidden = find_hidden(problem, problem.row_values, (weight,))
    tiling = choose_row_strips(problem, matrix, processors, is_hidden=hidden is not None)
    if hidden is None:
        return None, tiling, None
    seen = list_row_blocks(hidden, problem.columns, tiling.strips, tiling.sharers)
    if min(seen.counts) < tiling.share // STRIP:
        return hidden, tiling, seen
    return None, choose_row_strips(problem, matrix, processors, is_hidden=False), None


def _count_registers(problem: TiledAttention, tiling: Strips) -> int:
    """Returns how many a thread needs: for sums, then for weights beside the result."""
    weights = tiling.share * ELEMENT_BYTES[problem.kind] // 8
    sums = tiling.share * len(problem.matmuls) // 2
    return max(sums, weights + problem.width // 2) + count_parts_of_floats(problem)


def _list_arrays(problem: TiledAttention, matrix: Lines) -> list[Lines]:
    """Returns the operands with a line for each column, each once, right ones first."""
    return list(dict.fromkeys([*(right for _, right in problem.matmuls), matrix]))


def _count_lines(problem: TiledAttention, arrays: int, tiling: Strips) -> int:
    return arrays * problem.columns + len(problem.matmuls) * tiling.strips * STRIP


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
    rights = [arrays.index(right) for _, right in problem.matmuls]
    steps = RowSteps(problem, weight, rights, hidden)
    parts = {
        "BASES": write_bases(problem, [*arrays, *(left for left, _ in problem.matmuls)]),
        "COPIES": indent(_write_copies(problem, arrays, steps.early), 4),
        "HEADS": indent(steps.heads, 4),
        "STEPS": steps.write(keeps_rows=keeps_rows),
    }
    return fill_parts(ROW_BODY, {f"{{{name}}}\n": text for name, text in parts.items()})


def _write_find(problem: TiledAttention, seen: Blocks) -> str:
    """Returns which column is at the place of a line in shared memory."""
    strip = seen.write_find("line / 16", problem.columns // STRIP)
    return "line" if seen.are_in_order else f"{strip} * 16 + line % 16"


def _write_kernel(seen: Blocks | None, given: str, tiling: Strips) -> str:
    """Returns what a block begins with."""
    if seen is None:
        return fill_parts(ROW_KERNEL, {"{GIVEN}": given})
    choices = [
        f"if (pairs == {pairs}) again = attend<{pairs}>(group, block, {given});"
        for pairs in sorted({*seen.counts, tiling.share // STRIP})
    ]
    return fill_parts(HIDDEN_ROW_KERNEL, {"{CHOICES}\n": indent(choices, 8)})


def _write_copies(problem: TiledAttention, arrays: list[Lines], early: set[int]) -> list[str]:
    """Returns what asks for all lines; those that are needed first come first.

    Args:
        problem: what is computed.
        arrays: of which there is a line for each column.
        early: numbers of the matmuls that all begins with.
    """
    late = [number for number in range(len(problem.matmuls)) if number not in early]
    first = {problem.matmuls[number][1] for number in early}
    lines = []
    for numbers, are_early in ((sorted(early), True), (late, False)):
        for number in numbers:
            left = problem.matmuls[number][0]
            start = f"lines{len(arrays) + number} + (long long)first * {left.stride}"
            place = f"LEFT + {number} * STRIPS * 16 * LINE"
            lines.append(f"ask_lines<STRIPS * 16>(slot, {place}, {start}, {left.stride});")
        for number, each in enumerate(arrays):
            if (each in first) == are_early:
                place = f"{number} * COLUMNS * LINE, lines{number}, {each.stride}"
                lines.append(f"ask_lines<LINES>(slot, {place}, find);")
        lines.append("commit_copies();")
    return lines
