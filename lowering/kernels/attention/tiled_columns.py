"""The kernel of attention in tiles that adds along the rows: a line of each result for a column.

Note [Columns of attention]
Gradients of keys and values are sums over all rows. A block has some strips of 16 columns, and goes
through the rows: matmuls are turned, columns by rows, so that their weights multiply lines of the
rows. It is given the row values that another kernel has found. The next rows are copied while those
before them are worked on. Where a mask hides rows, each block has a list of those that it sees.
Where there are few blocks, several warps of a strip take other rows each, and add up what they have
at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.kernels.attention.tiled import (
    SHARED_LIMIT,
    STRIP,
    Lines,
    ResultLines,
    Strips,
    TiledAttention,
    choose_strips,
    count_neighbours,
    count_parts,
    count_parts_of_floats,
    fill_parts,
    find_most_strips,
    name_groups,
    name_rows,
    name_sums,
    write_bases,
    write_place,
    write_sizes,
)
from tracegraph.lowering.kernels.attention.tiled_elements import open_function, open_functions
from tracegraph.lowering.kernels.attention.tiled_hidden import (
    Blocks,
    Hidden,
    find_hidden,
    list_column_blocks,
)
from tracegraph.lowering.kernels.attention.tiled_source import (
    COLUMN_BODY,
    FUNCTIONS,
    HIDDEN_PLACE,
    HIDDEN_TURNS,
    PLACE,
    TURNS,
    UNIT_TEST,
)
from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.own_kernel import OwnKernel, leaves_room, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape

# Warps of a strip; each works on 16 rows at once, or where there is one on 32: half as many waits.
_SHARERS = (4, 2, 1)
# Of lines of more elements the results leave no registers for 32 rows.
_MAX_LONG = 64

ColumnOutput = tuple[ElementFunction, Lines, ResultLines]


def write_columns(
    problem: TiledAttention,
    outputs: Sequence[ColumnOutput],
    processors: int,
    *,
    is_joined: bool = False,
) -> OwnKernel:
    """Returns the kernel, see Note [Columns of attention].

    Its parameters are the arrays that are read, the row values, float32 of the shape (groups,
    row values, rows), and the results.

    Args:
        problem: without a problem, see `find_tiled_problem`.
        outputs: of each result the weight, of the group, ``r``, ``t``, the sums and all row values;
            the lines that are added up, one for each row; and where it is. Its lines begin at
            multiples of 16 bytes.
        processors: multiprocessors of the GPU.
        is_joined: the results are parts of one array, which comes twice: as it was, and as it is.

    Raises:
        ValueError: the lines of all operands are too many.
    """
    arrays = _list_arrays(problem, outputs)
    tiling = choose_column_strips(problem, outputs, processors)
    shared = _count_shared(problem, len(arrays), tiling)
    if shared > SHARED_LIMIT:
        raise ValueError(f"{shared} bytes are more than shared memory has")
    blocks = problem.group_count * (problem.columns // STRIP // tiling.strips)
    starts = {"STARTS_EARLY": int(leaves_room(blocks, processors))}
    sizes = write_sizes(problem, tiling, {"ARRAYS": len(arrays), "OUTPUTS": len(outputs)} | starts)
    hidden, seen = _find_hidden(problem, outputs, tiling)
    find = "turn"
    if seen is not None:
        sizes += seen.write(problem.group_count)
        find = seen.write_find(find, _count_units(problem, tiling))
    body = fill_parts(_write_body(problem, outputs, hidden), {"{FIND}": find})
    given = len(problem.kinds)
    for number, (_, _, output) in enumerate(outputs):
        place = write_place(problem, output, given + (2 if is_joined else 1 + number))
        to = f"{place}, {output.strides[-1]}"
        body += f"    store_lines({to}, (float *)shared, mixed[{number}]);\n"
    parameters = [f"const {TYPES[kind]} *p{number}" for number, kind in enumerate(problem.kinds)]
    parameters.append("const float *rows")
    arrays_written = outputs[:1] if is_joined else outputs
    first = given + 1 + int(is_joined)
    parameters += [f"const void *p{given + 1}"] if is_joined else []
    parameters += [
        f"{TYPES[output.kind]} *p{first + number}"
        for number, (_, _, output) in enumerate(arrays_written)
    ]
    neighbours = count_neighbours(_count_registers(problem, outputs, tiling), tiling, shared)
    text = f"({', '.join(parameters)}) {{\n{body}}}\n"
    begin = f"{sizes}{FUNCTIONS}KERNEL(THREADS, {neighbours}) "
    symbol = name_kernel("tiled_attention_columns", begin + text)
    shape = LaunchShape((blocks, 1, 1), (tiling.threads, 1, 1), shared_bytes=shared)
    return OwnKernel(symbol, HEAD + begin + symbol + text, shape)


def choose_column_strips(
    problem: TiledAttention, outputs: Sequence[ColumnOutput], processors: int
) -> Strips:
    """Returns how the work of the kernel is cut.

    Args:
        problem: that has a kernel.
        outputs: see `write_columns`.
        processors: multiprocessors of the GPU.
    """
    few = problem.group_count * problem.columns // STRIP < processors
    one = next(
        Strips(1, sharers, STRIP)
        for sharers in (_SHARERS if few else (1,))
        if problem.rows % (sharers * STRIP) == 0
    )
    is_short = problem.kind != "F32" and problem.width <= _MAX_LONG
    if not few and is_short and problem.rows % (2 * STRIP) == 0:
        one = Strips(1, 1, 2 * STRIP)
    arrays = len(_list_arrays(problem, outputs))
    most = find_most_strips(_count_registers(problem, outputs, one), one.sharers)
    while most > 1 and _count_shared(problem, arrays, one.repeat(most)) > SHARED_LIMIT:
        most -= 1
    strips = choose_strips(problem.columns, problem.group_count, most, processors)
    return one.repeat(strips)


def _find_hidden(
    problem: TiledAttention, outputs: Sequence[ColumnOutput], tiling: Strips
) -> tuple[Hidden | None, Blocks | None]:
    """Returns what is hidden and what each block sees, or None where all of them see all units."""
    hidden = find_hidden(problem, (), tuple(weight for weight, _, _ in outputs))
    if hidden is None:
        return None, None
    unit = tiling.sharers * tiling.share
    seen = list_column_blocks(hidden, problem.columns, tiling.strips, unit)
    if min(seen.counts) == _count_units(problem, tiling):
        return None, None
    return hidden, seen


def _count_units(problem: TiledAttention, tiling: Strips) -> int:
    """Returns in how many turns a block works on all rows."""
    return problem.rows // (tiling.sharers * tiling.share)


def _count_registers(
    problem: TiledAttention, outputs: Sequence[ColumnOutput], tiling: Strips
) -> int:
    """Returns how many a thread needs: for results beside sums, which become weights."""
    others = max(len(problem.matmuls), len(outputs)) * tiling.share
    return (len(outputs) * problem.width + others) // 2 + count_parts_of_floats(problem)


def _list_arrays(problem: TiledAttention, outputs: Sequence[ColumnOutput]) -> list[Lines]:
    """Returns the operands with a line for each row, each once."""
    lefts = (left for left, _ in problem.matmuls)
    return list(dict.fromkeys([*lefts, *(lines for _, lines, _ in outputs)]))


def _count_shared(problem: TiledAttention, arrays: int, tiling: Strips) -> int:
    unit = tiling.sharers * tiling.share
    places = 2 if problem.rows > unit else 1
    rows = places * unit * (arrays * problem.line_bytes + 4 * len(problem.row_values))
    own = len(problem.matmuls) * tiling.strips * STRIP * problem.line_bytes
    return max(rows + own, count_parts(problem, tiling))


def _write_body(
    problem: TiledAttention, outputs: Sequence[ColumnOutput], hidden: Hidden | None
) -> str:
    arrays = _list_arrays(problem, outputs)
    rights = [right for _, right in problem.matmuls]
    weights = open_functions([weight for weight, _, _ in outputs], "w_")
    heads = weights.write(name_groups(problem))
    # The compiler would compute anew for each column what comes behind a maximum or an inverse.
    rows = name_rows(range(len(problem.row_values)), "kept[{} * UNIT + line]")
    row = weights.write({"r": "r", **rows})
    inner = weights.write({"t": "t", **name_sums(problem)})
    for number, result in enumerate(weights.name_results()):
        inner.append(f"weights[{number}][tile][upper * 2 + e] = {result};")
    turns = TURNS if hidden is None else HIDDEN_TURNS
    if hidden is not None and hidden.test is not None:
        turns += _write_test(problem, hidden.test)
    parts = {
        "PLACE": PLACE if hidden is None else HIDDEN_PLACE,
        "TURNS": turns,
        "BASES": write_bases(problem, [*arrays, *rights]),
        "COPIES": indent(map(_write_copy, range(len(arrays)), arrays), 8),
        "OWN": indent(_write_own(rights, len(arrays)), 4),
        "HEADS": indent(heads, 4),
        "MATMULS": indent(_write_matmuls(problem, arrays), 8),
        "ROW": indent(row, 16),
        "WEIGHTS": indent(inner, 20),
        "MIXED": indent(_write_mixed(outputs, arrays), 12),
    }
    return fill_parts(COLUMN_BODY, {f"{{{name}}}\n": text for name, text in parts.items()})


def _write_test(problem: TiledAttention, test: ElementFunction) -> str:
    written = open_function(test, "h_")
    rows = name_rows(range(len(problem.row_values)), "given[{} * ROWS + r]")
    lines = written.write({**name_groups(problem), "r": "r", **rows})
    parts = {"{ROW}\n": indent(lines, 8), "{TEST}": written.name_results()[0]}
    return fill_parts(UNIT_TEST, parts)


def _write_copy(number: int, each: Lines) -> str:
    start = f"lines{number} + (long long)row * {each.stride}"
    return f"ask_lines<UNIT>(slot, place + {number} * UNIT * LINE, {start}, {each.stride});"


def _write_own(rights: Sequence[Lines], arrays: int) -> list[str]:
    """Returns what asks for the block's own columns."""
    lines = []
    for number, each in enumerate(rights):
        start = f"lines{arrays + number} + (long long)first * {each.stride}"
        place = f"OWN + {number} * STRIPS * 16 * LINE"
        lines.append(f"ask_lines<STRIPS * 16>(slot, {place}, {start}, {each.stride});")
    return lines


def _write_matmuls(problem: TiledAttention, arrays: list[Lines]) -> list[str]:
    lines = []
    for number, (left, _) in enumerate(problem.matmuls):
        own = f"shared + OWN + ({number} * STRIPS * 16 + own) * LINE"
        others = f"place + {arrays.index(left)} * UNIT * LINE"
        lines.append(f"multiply_lines(sums[{number}], {own}, {others}, holds);")
    return lines


def _write_mixed(outputs: Sequence[ColumnOutput], arrays: list[Lines]) -> list[str]:
    lines = []
    for number, (_, added, _) in enumerate(outputs):
        tiles = f"weights[{number}][pair * 2], weights[{number}][pair * 2 + 1]"
        place = f"place + ({arrays.index(added)} * UNIT + pair * 16) * LINE"
        lines.append(f"mix_lines(mixed[{number}], {tiles}, {place}, Element());")
    return lines
