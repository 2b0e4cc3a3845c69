"""The kernel of attention in tiles that adds along the columns: a line of the result for each row.

Note [Rows of attention]
A block has some strips of 16 rows, and all columns of their group in shared memory. The columns are
split over a few warps of a strip, so that what a warp has of the sums fits into its registers from
the products to the weights; they join their row values, and at the end what they have of a result.
"""

from __future__ import annotations

from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction, ElementLines
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
    find_reduction,
    name_groups,
    name_rows,
    name_sums,
    write_bases,
    write_place,
    write_sizes,
)
from tracegraph.lowering.kernels.tiled_attention_elements import open_function, share_elements
from tracegraph.lowering.kernels.tiled_attention_source import (
    FUNCTIONS,
    KEPT,
    ROW_BODY,
    ROW_FUNCTIONS,
    SHARED,
    STAGE,
)
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
    body = _write_body(problem, weight, matrix, keeps_rows=keeps_rows)
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
    problem: TiledAttention, weight: ElementFunction, matrix: Lines, *, keeps_rows: bool
) -> str:
    arrays = _list_arrays(problem, matrix)
    steps, weights = _plan(problem, weight)
    every = [*(each for _, group in steps for each in group), weights]
    heads = [line for each in every for line in each.write(name_groups(problem))]
    text = "".join(
        _write_shared(problem, group) if number is None else _write_stage(problem, number, group[0])
        for number, group in steps
    )
    rows = name_rows(range(len(problem.stages)), "rows[{}][upper]")
    own = weights.write({"r": "r", **rows})
    inner = weights.write({"t": "t", **name_sums(problem)})
    inner.append(f"sums[0][tile][upper * 2 + e] = {weights.name_results()[0]};")
    parts = {
        "BASES": write_bases(problem, [*arrays, *(left for left, _ in problem.products)]),
        "COPIES": indent(_write_copies(problem, arrays), 4),
        "HEADS": indent(heads, 4),
        "PRODUCTS": indent(_write_products(problem, arrays), 4),
        "STAGES": text,
        "KEPT": KEPT if keeps_rows else "",
        "ROW": indent(own, 8),
        "WEIGHT": indent(inner, 16),
    }
    return fill_parts(ROW_BODY, {f"{{{name}}}\n": text for name, text in parts.items()})


def _plan(
    problem: TiledAttention, weight: ElementFunction
) -> tuple[list[tuple[int | None, list[ElementLines]]], ElementLines]:
    """Returns what is computed before the weights, in its order, and what computes these.

    Each step is a stage with its number, or values that take the place of sums: what all that is
    left has in common, once the row values that it needs are there.
    """
    left = [*(each.function for each in problem.stages), weight]
    steps: list[tuple[int | None, list[ElementLines]]] = []
    for number in range(len(left)):
        shared, rest = share_elements(left, len(problem.products), number)
        if shared and len(left) > 1:
            left = rest
            names = [f"c{number}_{place}_" for place in range(len(shared))]
            steps.append((None, list(map(open_function, shared, names))))
        if number < len(problem.stages):
            steps.append((number, [open_function(left.pop(0), f"s{number}_")]))
    return steps, open_function(left[0], "w_")


def _write_copies(problem: TiledAttention, arrays: list[Lines]) -> list[str]:
    """Returns what asks for all lines; those that only the weights need come last."""
    lines = []
    for number, (left, _) in enumerate(problem.products):
        start = f"lines{len(arrays) + number} + (long long)first * {left.stride}"
        place = f"LEFT + {number} * STRIPS * 16 * LINE"
        lines.append(f"ask_lines<STRIPS * 16>(slot, {place}, {start}, {left.stride});")
    rights = {right for _, right in problem.products}
    for number, each in enumerate(arrays):
        if each not in rights:
            lines.append("commit_copies();")
        place = f"{number} * COLUMNS * LINE"
        lines.append(f"ask_lines<COLUMNS>(slot, {place}, lines{number}, {each.stride});")
    lines.append("commit_copies();")
    return lines if len(arrays) > len(rights) else [*lines, "commit_copies();"]


def _write_products(problem: TiledAttention, arrays: list[Lines]) -> list[str]:
    lines = []
    for number, (_, right) in enumerate(problem.products):
        left = f"shared + LEFT + ({number} * STRIPS * 16 + own) * LINE"
        others = f"shared + ({arrays.index(right)} * COLUMNS + begin) * LINE"
        lines.append(f"multiply_lines<IS_EVEN>(sums[{number}], {left}, {others}, COLUMNS - begin);")
    return lines


def _write_shared(problem: TiledAttention, written: list[ElementLines]) -> str:
    rows = name_rows(range(len(problem.stages)), "rows[{}][upper]")
    own = [line for each in written for line in each.write({"r": "r", **rows})]
    inner = [line for each in written for line in each.write({"t": "t", **name_sums(problem)})]
    # One may be computed from the sum whose place another one takes.
    for number, each in enumerate(written):
        inner.append(f"const float value{number} = {each.name_results()[0]};")
    for number in range(len(written)):
        inner.append(f"sums[{number}][tile][upper * 2 + e] = value{number};")
    parts = {"{ROW}\n": indent(own, 8), "{VALUE}\n": indent(inner, 16)}
    return fill_parts(SHARED, parts)


def _write_stage(problem: TiledAttention, number: int, written: ElementLines) -> str:
    begin, join = find_reduction(problem.stages[number])
    own = written.write({"r": "r", **name_rows(range(number), "rows[{}][upper]")})
    inner = written.write({"t": "t", **name_sums(problem)})
    inner.append(f"values[e] = {join.format('values[e]', written.name_results()[0])};")
    parts = {
        "{ROW}\n": indent(own, 8),
        "{VALUE}\n": indent(inner, 16),
        "{NUMBER}": str(number),
        "{BEGIN}": begin,
        "{JOINED}": join.format("values[0]", "values[1]"),
        "{JOIN}": join.format("a", "b"),
    }
    return fill_parts(STAGE, parts)
