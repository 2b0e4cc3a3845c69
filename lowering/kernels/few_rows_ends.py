"""Ends of a kernel for few rows: what computes the rows, and what is done with sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tracegraph.lowering.kernels.device_head import TYPES
from tracegraph.lowering.kernels.few_rows_problem import (
    EIGHT,
    MAX_HELD,
    THREADS,
    FewRows,
    Tiling,
)
from tracegraph.lowering.kernels.row_functions import (
    REDUCTIONS,
    ElementWriter,
    Form,
    Place,
    RowLoop,
    RowOperand,
    write_reductions,
)


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


def list_early(problem: FewRows, tiling: Tiling) -> dict[int, RowOperand]:
    """Returns the operands of the rows that are loaded before the wait, by their values."""
    if not _find_span(problem, tiling).held:
        return {}
    return {
        number: operand
        for number, operand in enumerate(problem.start.operands)
        if operand.form is Form.COLUMN and operand.parameter in problem.settled
    }


def write_start(problem: FewRows, tiling: Tiling) -> dict[str, str]:
    """Returns what puts the rows into shared memory: all of one depth beside each other."""
    start, span = problem.start, _find_span(problem, tiling)
    early = list_early(problem, tiling)
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
    return {"EARLY": indent(first, 4), "START": indent(lines, 4)}


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


def count_turns(problem: FewRows, tiling: Tiling) -> int:
    """Returns how many results a thread computes."""
    return -(-problem.rows * (tiling.width // tiling.split) // THREADS)


def write_hoisted(problem: FewRows, tiling: Tiling) -> str:
    """Returns what loads the operands of the end, a value for each turn of a thread."""
    turns = count_turns(problem, tiling)
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
    return indent([*lines, "}"] if has_operands else [], 4)


def write_finish(problem: FewRows) -> str:
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
    return indent(lines, 8)


def indent(lines: Iterable[str], spaces: int) -> str:
    """Returns lines as a text."""
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)
