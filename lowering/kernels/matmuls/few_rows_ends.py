"""Ends of a kernel for few rows: what computes the rows, and what is done with sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tracegraph.lowering.kernels.device_head import TYPES
from tracegraph.lowering.kernels.matmuls.few_rows_problem import (
    EIGHT,
    THREADS,
    FewRows,
    Reading,
    Tiling,
    choose_reading,
    count_blocks,
    count_vectors,
    find_factors,
)
from tracegraph.lowering.kernels.row_functions import (
    REDUCTIONS,
    ElementPosition,
    ElementWriter,
    Form,
    RowFactors,
    RowFunction,
    RowLoop,
    RowOperand,
    write_reduction_of_row,
    write_reductions,
)

_HELD = (Form.FULL, Form.COLUMN)
_OPEN_EIGHT = (
    "    #pragma unroll",
    f"    for (int e = 0; e < {EIGHT}; ++e) {{",
    f"    const int column = place + e, i = chunk * {EIGHT} + e;",
)


def write_choice(problem: FewRows, width: int) -> str:
    """Returns the choice of a tile's segment, by the number of the tile among columns."""
    lines: list[str] = []
    for number, segment in enumerate(problem.segments):
        tiles = -(-segment.columns // width)
        places = enumerate(segment.matrices)
        picks = " ".join(f"matrices[{index}] = p{parameter};" for index, parameter in places)
        lines += [
            f"if (columns == 0 && first < {tiles}) {{",
            f"    segment = {number}; columns = {segment.columns}; {picks}",
            "}",
            f"if (columns == 0) first -= {tiles};",
        ]
    return indent(lines, 4)


def write_ends(problem: FewRows, tiling: Tiling) -> dict[str, str]:
    """Returns what takes the place of names of both ends in a kernel's body."""
    return {
        **write_start(problem, tiling),
        "HOIST": write_hoisted(problem, tiling),
        "FACTOR": write_factor(problem),
        "FINISH": write_finish(problem),
        "CANDIDATES": write_candidates(problem, tiling),
    }


def write_parameters(problem: FewRows) -> str:
    """Returns a kernel's parameters: what is read, results, values and columns of candidates."""
    results = [kind for segment in problem.segments for kind in segment.kinds]
    candidates = ["F32", "S32"] * len(_list_chosen(problem))
    kinds = enumerate([*problem.kinds, *results, *candidates])
    return ", ".join(f"{TYPES[kind]} *p{number}" for number, kind in kinds)


def list_early_parameters(problem: FewRows, tiling: Tiling) -> tuple[int, ...]:
    """Returns the parameters that are loaded before the wait: matrices, and what is settled."""
    matrices = {each for segment in problem.segments for each in segment.matrices}
    early = {operand.parameter for operand in list_early(problem, tiling).values()}
    return tuple(sorted(matrices | early))


def list_early(problem: FewRows, tiling: Tiling) -> dict[int, RowOperand]:
    """Returns the operands of the rows that are loaded before the wait, by their values."""
    if not choose_reading(problem, tiling).chunks:
        return {}
    return {
        number: operand
        for number, operand in enumerate(problem.start.operands)
        if operand.form is Form.COLUMN and operand.parameter in problem.settled
    }


def write_start(problem: FewRows, tiling: Tiling) -> dict[str, str]:
    """Returns what puts the rows into shared memory; each thread takes part in some of them."""
    reading, early = choose_reading(problem, tiling), list_early(problem, tiling)
    operands = enumerate(problem.start.operands)
    held = {number: each for number, each in operands if reading.chunks and each.form in _HELD}
    full = {number: each for number, each in held.items() if each.form is Form.FULL}
    once = [number for number in held if number not in full and number not in early]
    lines = [
        *(line for number in once for line in _write_columns(problem, reading, number)),
        *(line for number in full for line in _declare(problem, reading, number, "[ROW_TURNS]")),
        "auto ask = [&](int turn) {",
        "    const int row = find_row(turn);",
        *(f"    {line}" for number in full for line in _write_load(problem, reading, number)),
        "};",
        "#pragma unroll",
        "for (int turn = 0; turn < AHEAD; ++turn) ask(turn);",
        "#pragma unroll",
        "for (int turn = 0; turn < ROW_TURNS; ++turn) {",
        "    if (turn + AHEAD < ROW_TURNS) ask(turn + AHEAD);",
        "    const int row = find_row(turn);",
        *(f"    {line}" for line in _write_row(problem, reading, _name_held(problem, held))),
        "}",
    ]
    first = [line for number in early for line in _write_columns(problem, reading, number)]
    return {"EARLY": indent(first, 4), "START": indent(lines, 4)}


def _write_columns(problem: FewRows, reading: Reading, number: int) -> list[str]:
    """Returns what loads a thread's elements of an operand that all rows share."""
    declared = _declare(problem, reading, number, "")
    return [*declared, *_write_load(problem, reading, number)]


def _declare(problem: FewRows, reading: Reading, number: int, turns: str) -> list[str]:
    parameter = problem.start.operands[number].parameter
    return [f"Vector o{number}{turns}[{reading.chunks * count_vectors(problem, parameter)}];"]


def _write_load(problem: FewRows, reading: Reading, number: int) -> list[str]:
    """Returns what loads a thread's elements of an operand, of one row if it has rows."""
    operand = problem.start.operands[number]
    is_full = operand.form is Form.FULL
    to = f"o{number}{'[turn]' if is_full else ''}"
    step = count_vectors(problem, operand.parameter)
    start = f"p{operand.parameter}{' + row * DEPTH' if is_full else ''}"
    load = f"    load_eight({to} + chunk * {step}, {start} + place);"
    return [*_open_chunks(reading), load, "}"]


def _open_chunks(reading: Reading) -> list[str]:
    begin, end = _find_ends(reading)
    return [
        "#pragma unroll",
        f"for (int chunk = 0; chunk < {reading.chunks}; ++chunk) {{",
        f"    const int place = {begin} + (chunk * READERS + reader) * {EIGHT};",
        f"    if (place >= {end}) continue;",
    ]


def _find_ends(reading: Reading) -> tuple[str, str]:
    return ("0", "DEPTH") if reading.is_whole else ("begin", "begin + depth")


def _name_held(problem: FewRows, held: Mapping[int, RowOperand]) -> dict[int, str]:
    """Returns what an element that a thread holds is called: ``i`` is its number."""
    names: dict[int, str] = {}
    for number, operand in held.items():
        turn = "[turn]" if operand.form is Form.FULL else ""
        each = EIGHT // count_vectors(problem, operand.parameter)
        kind = TYPES[problem.kinds[operand.parameter]]
        names[number] = f"take(o{number}{turn}[i / {each}], i % {each}, {kind}())"
    return names


def _write_row(problem: FewRows, reading: Reading, held: Mapping[int, str]) -> list[str]:
    """Returns what computes a row, and keeps the block's part of it."""
    start, factors = problem.start, find_factors(problem)
    place = ElementPosition("row", "column", "DEPTH")
    if factors is not None:
        body = ElementWriter(start, place, held)
        value = " * ".join(map(body.write, factors.elements))
        added = [_write_addition(start, number, body) for number in factors.sums]
        begun = [f"float v{number} = {_begin(start, number)};" for number in factors.sums]
        kept = _write_kept(reading, [*body.lines, *added], value)
        return [*begun, *kept, *_write_norms(start, factors)]
    lines, known = write_reductions(start, "DEPTH", _make_loop(reading, held))
    body = ElementWriter(start, place, {**known, **held})
    value = body.write(start.results[0])
    return [*lines, *_write_kept(reading, body.lines, value)]


def _write_addition(start: RowFunction, number: int, body: ElementWriter) -> str:
    op = start.ops[number - start.first_op]
    combined = REDUCTIONS[op.opcode][1].format(f"v{number}", body.write(op.operands[0]))
    return f"v{number} = {combined};"


def _write_norms(start: RowFunction, factors: RowFactors) -> list[str]:
    """Returns what leaves the block's part of the sums along a row for the end."""
    lines: list[str] = []
    for place, number in enumerate(factors.sums):
        keep = f"if (reader == 0) norms[(rank * NORMS + {place}) * ROWS + row] = v{number};"
        lines += [write_reduction_of_row(start, number), keep]
    return lines


def _make_loop(reading: Reading, held: Mapping[int, str]) -> RowLoop:
    """Returns the loop of a thread through what it reads of a row."""
    if reading.chunks:
        return RowLoop((*_open_chunks(reading), *_OPEN_EIGHT), "}}", held)
    return RowLoop((_open_single(*_find_ends(reading)),), "}", held)


def _open_single(begin: str, end: str) -> str:
    return f"for (int column = {begin} + reader; column < {end}; column += READERS) {{"


def _write_kept(reading: Reading, lines: Sequence[str], value: str) -> list[str]:
    """Returns the loop that keeps the block's part of a row: a value of each element."""
    if not reading.chunks:
        own = _open_single("begin", "begin + depth")
        return [own, *lines, f"keep(row, column - begin, {value});", "}"]
    own = "    if (place < begin || place >= begin + depth) continue;"
    return [
        *_open_chunks(reading),
        *([own] if reading.is_whole else []),
        "    Row<8> kept;",
        *_OPEN_EIGHT,
        *lines,
        f"kept.each[e] = {value};",
        "    }",
        "    keep_eight(row, place - begin, kept);",
        "}",
    ]


def _begin(start: RowFunction, number: int) -> str:
    return f"literal(0x{REDUCTIONS[start.ops[number - start.first_op].opcode][0]}u)"


def write_factor(problem: FewRows) -> str:
    """Returns what multiplies sums by what their row has of the norm in front of the matmul."""
    factors, start = find_factors(problem), problem.start
    if factors is None:
        return ""
    lines: list[str] = []
    for place, number in enumerate(factors.sums):
        combine = REDUCTIONS[start.ops[number - start.first_op].opcode][1]
        part = f"norms[(part * NORMS + {place}) * ROWS + row]"
        lines += [
            f"float v{number} = {_begin(start, number)};",
            "#pragma unroll",
            f"for (int part = 0; part < SPLIT; ++part) v{number} = {combine};".format(
                f"v{number}", part
            ),
        ]
    known = {number: f"v{number}" for number in factors.sums}
    body = ElementWriter(start, ElementPosition("row", "0", "1"), known)
    factor = " * ".join(map(body.write, factors.rows))
    lines += [
        *body.lines,
        f"const float factor = {factor};",
        "#pragma unroll",
        "for (int m = 0; m < COUNT; ++m) sum[m] *= factor;",
    ]
    return indent(["{", *lines, "}"], 8)


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
        "    const int index = turn * THREADS + threadIdx.x, row = first_row + index / SHARE;",
        "    const int column = first + rank * SHARE + index % SHARE;",
        "    if (index >= ROWS * SHARE || row >= ALL_ROWS || column >= columns) continue;",
    ]
    for number, segment in enumerate(problem.segments):
        body = ElementWriter(segment.finish, ElementPosition("row", "column", "columns"), {})
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
        body = ElementWriter(segment.finish, ElementPosition("row", "column", "columns"), known)
        values = list(map(body.write, segment.finish.results))
        lines += [f"if (segment == {number}) {{", *(f"    {line}" for line in body.lines)]
        stored = len(segment.kinds)
        for value, kind in zip(values[:stored], segment.kinds, strict=True):
            place = f"p{parameter}[row * columns + column]"
            lines.append(f"    {place} = narrow({value}, {TYPES[kind]}());")
            parameter += 1
        for index, (value, kind) in enumerate(zip(values[stored:], segment.chosen, strict=True)):
            rounded = f"widen(narrow({value}, {TYPES[kind]}()))"
            lines.append(f"    chosen[{index} * ROWS * SHARE + index] = {rounded};")
        lines.append("}")
    return indent(lines, 8)


def write_candidates(problem: FewRows, tiling: Tiling) -> str:
    """Returns what chooses among a block's columns: a warp for each row, which stores the best."""
    lines: list[str] = []
    parameter = len(problem.kinds) + sum(len(segment.kinds) for segment in problem.segments)
    for number, index in _list_chosen(problem):
        count = count_blocks(problem.segments[number], tiling)
        place = f"[row * {count} + first / WIDTH * SPLIT + rank]"
        lines += [
            f"if (segment == {number}) {{",
            "    sync_block();",
            "    for (int row = threadIdx.x / 32; row < ROWS; row += WARPS) {",
            f"        const float *own = chosen + ({index} * ROWS + row) * SHARE;",
            "        Best best = find_none();",
            "        for (int place = threadIdx.x % 32; place < SHARE; place += 32) {",
            "            const int column = first + rank * SHARE + place;",
            "            if (column < columns) best = choose(best, {own[place], column});",
            "        }",
            "        best = choose_of_lanes(best);",
            "        if (threadIdx.x % 32) continue;",
            f"        p{parameter}{place} = best.value;",
            f"        p{parameter + 1}{place} = best.column;",
            "    }",
            "}",
        ]
        parameter += 2
    return indent(lines, 4)


def _list_chosen(problem: FewRows) -> list[tuple[int, int]]:
    """Returns what the largest is chosen of: the segment's number, and its own in there."""
    return [
        (number, index)
        for number, segment in enumerate(problem.segments)
        for index in range(len(segment.chosen))
    ]


def indent(lines: Iterable[str], spaces: int) -> str:
    """Returns lines as a text."""
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)
