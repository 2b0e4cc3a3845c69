"""FewRows: matmuls of few rows by large matrices, with what is computed before and after.

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
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from tracegraph.lowering.element_loops import ELEMENT_BYTES
from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.few_rows_source import (
    BODY,
    COLUMN_STEPS,
    COLUMN_TOTALS,
    FUNCTIONS,
    ROW_STEPS,
)
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.lowering.kernels.row_functions import (
    REDUCTIONS,
    ElementWriter,
    Form,
    Place,
    RowFunction,
    RowLoop,
    RowOperand,
    write_reductions,
)
from tracegraph.runtime.nodes import LaunchShape

THREADS, WARP, VECTOR_BYTES = 256, 32, 16
WARPS = THREADS // WARP
# Copies of a thread that are on their way: a block has up to 96 KB in flight.
STAGES = 24
# Copies that a thread waits for, and works on, at once.
GROUP = 4
# Of a block. Two fit on a multiprocessor of compute capability 9.0, so that the next kernel's first
# copies run beside the end of this one's.
MAX_SHARED_BYTES = 112 << 10
# Of registers for sums: rows times matrices that a block multiplies at once.
MAX_SUMS = 8
_WIDTHS, _SPLITS = (64, 128, 256), (1, 2, 4, 8)
# What else a block costs, and a cluster, in bytes that could have come from memory meanwhile.
_BLOCK_COST, _CLUSTER_COST = 40 << 10, 24 << 10
_MIN_PART = 64
# Elements of rows that a thread loads at once; and most of them, of all operands, in registers.
EIGHT, MAX_HELD = 8, 64


@dataclasses.dataclass(frozen=True)
class Segment:
    """Matrices of the same number of columns, and what is computed of their products.

    Attributes:
        columns: of each matrix.
        matrices: numbers of the kernel's parameters.
        finish: takes one sum per matrix, and returns the results.
        kinds: XLA's name of the type of each result.
    """

    columns: int
    matrices: tuple[int, ...]
    finish: RowFunction
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FewRows:
    """Matmuls of the same rows.

    More than six fields because these are what tells one kernel from another.

    Attributes:
        rows: how many.
        depth: elements of a row.
        kinds: XLA's name of the type of each array that is read, in the order of the parameters.
        start: computes the rows.
        segments: as many matrices in each.
        settled: numbers of the parameters that are there when the graph is launched.
        is_transposed: True where a matrix has its rows as columns: ``x @ w.T``.
    """

    rows: int
    depth: int
    kinds: tuple[str, ...]
    start: RowFunction
    segments: tuple[Segment, ...]
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
    """

    width: int
    split: int
    part: int


def find_problem(problem: FewRows) -> str:
    """Returns why there is no kernel for it, or an empty text."""
    vector = problem.vector
    if problem.rows * problem.count > MAX_SUMS:
        return f"{problem.rows} rows by {problem.count} matrices take too many registers"
    lengths = [each.columns for each in problem.segments]
    if any(length % vector for length in ([problem.depth] if problem.is_transposed else lengths)):
        return f"a line of a matrix is no multiple of {vector} elements"
    if next(_list_tilings(problem), None) is None:
        return "its rows do not fit into shared memory"
    return ""


def choose_tiling(problem: FewRows, processors: int) -> Tiling:
    """Returns the tiling whose multiprocessors have the least to ask memory for.

    Args:
        problem: that has a kernel.
        processors: multiprocessors of the GPU.
    """

    def cost(tiling: Tiling) -> float:
        tiles = sum(-(-segment.columns // tiling.width) for segment in problem.segments)
        size = tiling.part * tiling.width * problem.count * ELEMENT_BYTES[problem.matrix_kind]
        # Blocks of a second turn begin while others of the first still run.
        turns = max(1.0, tiles * tiling.split / processors)
        return turns * (size + _BLOCK_COST) + (tiling.split > 1) * _CLUSTER_COST

    return min(_list_tilings(problem), key=cost)


def write_few_rows(problem: FewRows, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Matmuls of few rows].

    Args:
        problem: without a problem, see `find_problem`.
        processors: multiprocessors of the GPU.
    """
    tiling = choose_tiling(problem, processors)
    steps, totals = (ROW_STEPS, "") if problem.is_transposed else (COLUMN_STEPS, COLUMN_TOTALS)
    parts = {
        "CHOOSE": _write_choice(problem, tiling),
        "STEPS": steps,
        **_write_start(problem, tiling),
        "HOIST": _write_hoisted(problem, tiling),
        "TOTALS": totals,
        "FINISH": _write_finish(problem),
    }
    body = BODY
    for name, text in parts.items():
        body = body.replace(f"{{{name}}}\n", text)
    text = f"{_write_sizes(problem, tiling)}{FUNCTIONS}{{\n{body}}}\n"
    symbol = name_kernel("few_rows", text)
    kinds = [*problem.kinds, *(kind for segment in problem.segments for kind in segment.kinds)]
    parameters = ", ".join(f"{TYPES[kind]} *p{number}" for number, kind in enumerate(kinds))
    opening = "KERNEL(THREADS)" if tiling.split == 1 else "CLUSTERED(THREADS, SPLIT)"
    source = HEAD + text.replace("\n{\n", f"\n{opening} {symbol}({parameters}) {{\n", 1)
    tiles = sum(-(-segment.columns // tiling.width) for segment in problem.segments)
    shape = LaunchShape(
        (tiles * tiling.split, 1, 1), (THREADS, 1, 1), shared_bytes=_count_shared(problem, tiling)
    )
    early = {each for segment in problem.segments for each in segment.matrices}
    early |= {operand.parameter for operand in _list_early(problem, tiling).values()}
    return OwnKernel(symbol, source, shape, tuple(sorted(early)))


def count_stages(problem: FewRows) -> int:
    """Returns how many copies of a thread are on their way: as many of each matrix."""
    return STAGES // problem.count * problem.count


def _count_group(problem: FewRows) -> int:
    return problem.count if GROUP % problem.count else GROUP


def _is_even(problem: FewRows, tiling: Tiling) -> bool:
    """True where all blocks have as much to do."""
    tails = [segment.columns % tiling.width for segment in problem.segments]
    return tiling.part * tiling.split == problem.depth and not any(tails)


def _list_tilings(problem: FewRows) -> Iterator[Tiling]:
    for width, split in itertools.product(_WIDTHS, _SPLITS):
        part = -(-problem.depth // (split * EIGHT)) * EIGHT
        tiling = Tiling(width, split, part)
        is_wide = width // problem.vector > WARP and not problem.is_transposed
        is_short = split > 1 and problem.depth - (split - 1) * part < _MIN_PART
        if not is_wide and not is_short and _count_shared(problem, tiling) <= MAX_SHARED_BYTES:
            yield tiling


def _count_ring(problem: FewRows, tiling: Tiling) -> int:
    """Returns the bytes of the copies, in whose place partial sums are put afterwards."""
    ring = count_stages(problem) * THREADS * VECTOR_BYTES
    return ring if problem.is_transposed else max(ring, WARPS * _count_totals(problem, tiling))


def _count_totals(problem: FewRows, tiling: Tiling) -> int:
    return 4 * problem.count * problem.rows * tiling.width


def _count_shared(problem: FewRows, tiling: Tiling) -> int:
    # Threads read as many elements of rows as they have copies; the last ones may be no elements.
    unit = THREADS * problem.vector // tiling.width * (_count_group(problem) // problem.count)
    kept = tiling.part if problem.is_transposed else -(-tiling.part // unit) * unit
    small = 4 * problem.rows * (kept + WARPS)
    return _count_ring(problem, tiling) + _count_totals(problem, tiling) + small


def _write_sizes(problem: FewRows, tiling: Tiling) -> str:
    sizes = {
        "ROWS": problem.rows,
        "COUNT": problem.count,
        "DEPTH": problem.depth,
        "VECTOR": problem.vector,
        "WIDTH": tiling.width,
        "SPLIT": tiling.split,
        "PART": tiling.part,
        "SHARE": tiling.width // tiling.split,
        "GROUP": _count_group(problem),
        "PLACES": count_stages(problem) // _count_group(problem),
        "IS_EVEN": int(_is_even(problem, tiling)),
        "THREADS": THREADS,
        "WARPS": WARPS,
        "TURNS": _count_turns(problem, tiling),
        "RING_BYTES": _count_ring(problem, tiling),
    }
    lines = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    sync = "sync_cluster" if tiling.split > 1 else "sync_block"
    lines += [f"typedef {TYPES[problem.matrix_kind]} Weight;", f"#define sync {sync}"]
    return "\n".join(lines) + "\n"


def _write_choice(problem: FewRows, tiling: Tiling) -> str:
    """Returns the choice of a tile's segment."""
    lines: list[str] = []
    for number, segment in enumerate(problem.segments):
        tiles = -(-segment.columns // tiling.width)
        places = enumerate(segment.matrices)
        picks = " ".join(f"matrices[{index}] = p{parameter};" for index, parameter in places)
        lines += [
            f"if (columns == 0 && first < {tiles}) {{",
            f"    segment = {number}; columns = {segment.columns}; {picks}",
            "}",
            f"if (columns == 0) first -= {tiles};",
        ]
    return _indent(lines, 4)


@dataclasses.dataclass(frozen=True)
class _Span:
    """The elements of rows that a block goes through.

    Attributes:
        begin: the first, in C++.
        end: after the last one.
        held: how many each thread keeps of each array; none where they would be too many.
    """

    begin: str
    end: str
    held: int


def _find_span(problem: FewRows, tiling: Tiling) -> _Span:
    start = problem.start
    is_whole = any(op.opcode in REDUCTIONS for op in start.ops)
    span = problem.depth if is_whole else tiling.part
    held = -(-span // (THREADS * EIGHT)) * EIGHT
    forms = [operand.form for operand in start.operands]
    arrays = forms.count(Form.FULL) * problem.rows + forms.count(Form.COLUMN)
    is_held = problem.depth % EIGHT == 0 and arrays * held <= MAX_HELD
    ends = ("0", "DEPTH") if is_whole else ("begin", "begin + depth")
    return _Span(*ends, held if is_held else 0)


def _list_early(problem: FewRows, tiling: Tiling) -> dict[int, RowOperand]:
    """Returns the operands of the rows that are loaded before the wait, by their values."""
    if not _find_span(problem, tiling).held:
        return {}
    return {
        number: operand
        for number, operand in enumerate(problem.start.operands)
        if operand.form is Form.COLUMN and operand.parameter in problem.settled
    }


def _write_start(problem: FewRows, tiling: Tiling) -> dict[str, str]:
    """Returns what puts the rows into shared memory: all of one depth beside each other."""
    start, span = problem.start, _find_span(problem, tiling)
    early = _list_early(problem, tiling)
    loads = {
        number: _write_load(number, operand, span)
        for number, operand in enumerate(start.operands)
        if span.held and operand.form in (Form.FULL, Form.COLUMN)
    }
    loop = _make_loop(problem, span)
    reductions, known = write_reductions(start, problem.rows, "DEPTH", loop)
    # What is not held is loaded again, where it is needed.
    own = loop if span.held else _make_loop(problem, _Span("begin", "begin + depth", 0))
    body = ElementWriter(start, Place("row", "column", "DEPTH"), {**known, **own.known})
    value = body.write(start.results[0])
    is_own = "column >= begin && column < begin + depth"
    store = f"if ({is_own}) x[(column - begin) * ROWS + row] = {value};"
    lines = [line for number, load in loads.items() if number not in early for line in load]
    lines += [*reductions, *own.write([*body.lines, store])]
    first = [line for number in early for line in loads[number]]
    return {"EARLY": _indent(first, 4), "START": _indent(lines, 4)}


def _write_load(number: int, operand: RowOperand, span: _Span) -> list[str]:
    """Returns what loads a thread's elements of an array into registers."""
    rows, name = ("[ROWS]", "o{0}[row]") if operand.form is Form.FULL else ("", "o{0}")
    row = "row * DEPTH + " if operand.form is Form.FULL else ""
    repeat = "for (int row = 0; row < ROWS; ++row)" if rows else ""
    place = f"{span.begin} + (chunk * THREADS + threadIdx.x) * {EIGHT}"
    to = f"{name.format(number)} + chunk * {EIGHT}"
    return [
        f"float o{number}{rows}[{span.held}];",
        "#pragma unroll",
        f"for (int chunk = 0; chunk < {span.held // EIGHT}; ++chunk)",
        *(["#pragma unroll", repeat] if repeat else []),
        f"    if ({place} < {span.end}) load_eight({to}, p{operand.parameter} + {row}{place});",
    ]


def _make_loop(problem: FewRows, span: _Span) -> RowLoop:
    """Returns the loop of a block's threads through the elements of a span."""
    rows = ("#pragma unroll", "for (int row = 0; row < ROWS; ++row) {")
    if not span.held:
        head = (
            f"for (int column = {span.begin} + threadIdx.x; column < {span.end}; column += THREADS)"
        )
        return RowLoop((head, *rows), "}", {})
    place = f"{span.begin} + (i / {EIGHT} * THREADS + threadIdx.x) * {EIGHT} + i % {EIGHT}"
    head = (
        "#pragma unroll",
        f"for (int i = 0; i < {span.held}; ++i) {{",
        f"const int column = {place};",
        f"if (column >= {span.end}) continue;",
    )
    names = {Form.FULL: "o{0}[row][i]", Form.COLUMN: "o{0}[i]"}
    operands = enumerate(problem.start.operands)
    known = {n: names[each.form].format(n) for n, each in operands if each.form in names}
    return RowLoop((*head, *rows), "}}", known)


def _count_turns(problem: FewRows, tiling: Tiling) -> int:
    """Returns how many results a thread computes."""
    return -(-problem.rows * (tiling.width // tiling.split) // THREADS)


def _write_hoisted(problem: FewRows, tiling: Tiling) -> str:
    """Returns what loads the operands of the end, a value for each turn of a thread."""
    turns = _count_turns(problem, tiling)
    lines: list[str] = []
    for number, segment in enumerate(problem.segments):
        count = len(segment.finish.operands)
        lines += [f"float f{number}_{index}[{turns}];" for index in range(count)]
    lines += [
        "#pragma unroll",
        f"for (int turn = 0; turn < {turns}; ++turn) {{",
        "    const int index = turn * THREADS + threadIdx.x, row = index / SHARE;",
        "    const int column = first + rank * SHARE + index % SHARE;",
        "    if (index >= ROWS * SHARE || column >= columns) continue;",
    ]
    for number, segment in enumerate(problem.segments):
        body = ElementWriter(segment.finish, Place("row", "column", "columns"), {})
        first = segment.finish.sums
        values = [body.write(first + index) for index in range(len(segment.finish.operands))]
        stores = [f"f{number}_{index}[turn] = {value};" for index, value in enumerate(values)]
        if stores:
            lines += [f"    if (segment == {number}) {{", *body.lines, *stores, "    }"]
    has_operands = any(segment.finish.operands for segment in problem.segments)
    return _indent([*lines, "}"] if has_operands else [], 4)


def _write_finish(problem: FewRows) -> str:
    """Returns what is computed of the sums of one element."""
    lines: list[str] = []
    parameter = len(problem.kinds)
    for number, segment in enumerate(problem.segments):
        known = {m: f"sum[{m}]" for m in range(problem.count)}
        operands = range(len(segment.finish.operands))
        known |= {problem.count + index: f"f{number}_{index}[turn]" for index in operands}
        body = ElementWriter(segment.finish, Place("row", "column", "columns"), known)
        values = list(map(body.write, segment.finish.results))
        lines += [f"if (segment == {number}) {{", *(f"    {line}" for line in body.lines)]
        for value, kind in zip(values, segment.kinds, strict=True):
            place = f"p{parameter}[row * columns + column]"
            lines.append(f"    {place} = narrow({value}, {TYPES[kind]}());")
            parameter += 1
        lines.append("}")
    return _indent(lines, 8)


def _indent(lines: Iterable[str], spaces: int) -> str:
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)
