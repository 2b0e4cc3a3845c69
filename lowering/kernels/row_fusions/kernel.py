"""RowFusion: what is computed along the rows of arrays, in one kernel.

Note [Fusions along rows]
A norm needs the sum of a row before it can compute an element of it, and its derivative needs
several; the loss over a vocabulary needs the maximum, then a sum of exponentials. XLA reads the
array again for each of them, or for sums along the columns, as the gradients of gains and biases
are, in a kernel of its own each. Here a row is copied to shared memory once:

* row values: sums and maxima along the row, those in one pass over the copy that need the same
  earlier ones;
* elements: functions of what was copied, of row values, and of vectors that all rows share;
* sums along the columns: each thread adds up its own columns in registers, over all rows of its
  block, and the block's threads their rows. The blocks' parts are a result, for XLA to add up.

Nothing here knows a norm. A thread reads what it has copied itself, so that it waits for no other
one but for row values. Rows of up to 1024 elements have a warp each, longer ones a block.

All is computed in float32, and rounded when it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.kernels.attention.tiled import SHARED_LIMIT
from tracegraph.lowering.kernels.attention.tiled_elements import FAST, open_functions
from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction, ElementLines
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.matmuls.few_rows_problem import ELEMENT_BYTES, VECTOR_BYTES
from tracegraph.lowering.kernels.own_kernel import OwnKernel, leaves_room, name_kernel
from tracegraph.lowering.kernels.row_functions import REDUCTIONS
from tracegraph.lowering.kernels.row_fusions.problem import (
    SCRATCH_BYTES,
    RowFusion,
    count_blocks,
    count_shared_bytes,
)
from tracegraph.lowering.kernels.row_fusions.source import BODY, FUNCTIONS, JOIN, TOTALS
from tracegraph.runtime.definition.nodes import LaunchShape

_FAST = {**FAST, "tanh": "tanh_fast", "logistic": "logistic_fast"}
# Of shared memory, that a block has for the GPU's own use.
_BLOCK_BYTES = 1 << 10


def write_row_fusion(fusion: RowFusion, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Fusions along rows].

    Its parameters are the arrays that are read, the elements and row values that are stored, and
    the parts of each sum, of the shape (blocks, columns).

    Args:
        fusion: without a problem, see `find_row_problem`.
        processors: multiprocessors of the GPU.
    """
    blocks = count_blocks(fusion, processors)
    room = SHARED_LIMIT // fusion.resident - _BLOCK_BYTES
    slots = 2 if count_shared_bytes(fusion, 2) <= room else 1
    threads = fusion.readers * fusion.groups
    sizes = {
        "ROWS": fusion.rows,
        "COLUMNS": fusion.columns,
        "VECTOR": fusion.vector,
        "READERS": fusion.readers,
        "GROUPS": fusion.groups,
        "THREADS": threads,
        "STEPS": fusion.steps,
        "STRIDE": blocks * fusion.groups,
        "SLOTS": slots,
        "ROW_BYTES": fusion.row_bytes,
        "SCRATCH_BYTES": SCRATCH_BYTES,
        "SUMS": len(fusion.sums),
        "STARTS_EARLY": int(leaves_room(blocks, processors)),
        "IS_EVEN": int(fusion.columns == fusion.readers * fusion.steps * fusion.vector),
    }
    text = "".join(f"constexpr int {name} = {size};\n" for name, size in sizes.items())
    body = (
        BODY.replace("{COPIES}\n", indent(_write_copies(fusion), 8))
        .replace("{TOTALS}\n", TOTALS if fusion.sums else "")
        .replace("{ROW}\n", indent(_write_row(fusion), 8))
        .replace("{FINISH}\n", JOIN if fusion.sums else "")
        .replace("{PARTIALS}", ", ".join(_name_partials(fusion)))
    )
    symbol = name_kernel("row_fusion", text + body)
    signature = ", ".join(_write_parameters(fusion))
    source = (
        f"{HEAD}{text}{FUNCTIONS}"
        f"KERNEL({threads}, {fusion.resident}) {symbol}({signature}) {{\n{body}}}\n"
    )
    shape = LaunchShape(
        (blocks, 1, 1), (threads, 1, 1), shared_bytes=count_shared_bytes(fusion, slots)
    )
    return OwnKernel(symbol, source, shape)


def _write_parameters(fusion: RowFusion) -> list[str]:
    given = [f"const {TYPES[kind]} *__restrict__ p{n}" for n, kind in enumerate(fusion.kinds)]
    stored = [
        f"{TYPES[each.kind]} *__restrict__ {name}{n}"
        for name, outputs in (("elements", fusion.elements), ("values", fusion.row_outputs))
        for n, each in enumerate(outputs)
    ]
    return given + stored + [f"float *__restrict__ {name}" for name in _name_partials(fusion)]


def _name_partials(fusion: RowFusion) -> list[str]:
    return [f"partial{number}" for number in range(len(fusion.sums))]


def _write_copies(fusion: RowFusion) -> list[str]:
    """Returns the statements that ask for one vector of each array with rows of its own."""
    lines, begin = [], 0
    for given in fusion.inputs:
        if not given.is_own:
            continue
        size = ELEMENT_BYTES[fusion.kinds[given.parameter]]
        for part in range(fusion.vector * size // VECTOR_BYTES):
            to = f"(place * ROW_BYTES + {begin} + column * {size}) / {VECTOR_BYTES} + {part}"
            at = part * VECTOR_BYTES // size
            lines.append(
                f"copy_async(slot, {to}, p{given.parameter} + r * COLUMNS + column + {at});"
            )
        begin += fusion.columns * size
    return lines


def _write_row(fusion: RowFusion) -> list[str]:
    """Returns the statements for a row: passes for its values, one for its elements."""
    lines = []
    for number, given in enumerate(fusion.inputs):
        if not given.is_own:
            opened = ElementLines(given.base, f"b{number}_")
            lines += opened.write({"r": "r"})
            lines.append(f"const int base{number} = {opened.name_results()[0]};")
    for turn, numbers in enumerate(_group_row_values(fusion)):
        lines += _write_pass(fusion, numbers, turn)
    lines += _write_elements(fusion)
    for number, output in enumerate(fusion.row_outputs):
        (name,), statements, _ = _open(fusion, [output.function], f"v{number}_")
        stored = f"values{number}[r] = narrow({name}, {TYPES[output.kind]}());"
        lines += ["{", *statements, f"if (lane == 0) {stored}", "}"]
    return lines


def _group_row_values(fusion: RowFusion) -> list[list[int]]:
    """Returns the numbers of the row values of each pass: those whose operands are known then."""
    turns: list[int] = []
    for row_value in fusion.row_values:
        needed = [turns[number] for number in _list_numbers(row_value.function, "row")]
        turns.append(1 + max(needed, default=-1))
    return [
        [number for number, each in enumerate(turns) if each == turn]
        for turn in range(1 + max(turns, default=-1))
    ]


def _list_numbers(function: ElementFunction, name: str) -> list[int]:
    """Returns the numbers of the variables of one name."""
    found = [op.detail for op in function.ops if op.opcode == "variable"]
    return sorted({int(each.removeprefix(name)) for each in found if _is_named(each, name)})


def _is_named(variable: str, name: str) -> bool:
    return variable.startswith(name) and variable[len(name) :].isdigit()


def _write_pass(fusion: RowFusion, numbers: Sequence[int], turn: int) -> list[str]:
    functions = [fusion.row_values[number].function for number in numbers]
    kinds = [REDUCTIONS[f"reduce_{fusion.row_values[number].kind}"] for number in numbers]
    names, once, statements = _open(fusion, functions, f"s{turn}_")
    added = [
        f"row{number} = {combine.format(f'row{number}', name)};"
        for number, (_, combine), name in zip(numbers, kinds, names, strict=True)
    ]
    lines = once + [
        f"float row{number} = literal(0x{begin}u);"
        for number, (begin, _) in zip(numbers, kinds, strict=True)
    ]
    lines += _write_loop(fusion, functions, [*statements, *added], [], [])
    for number, (_, combine) in zip(numbers, kinds, strict=True):
        joined = f"[](float a, float b) {{ return {combine.format('a', 'b')}; }}"
        lines.append(f"row{number} = reduce_row(row{number}, scratch, {joined});")
    return lines


def _write_elements(fusion: RowFusion) -> list[str]:
    functions = [*(each.function for each in fusion.elements), *fusion.sums]
    if not functions:
        return ["if (SLOTS == 1 && r + STRIDE < ROWS) copy_row(r + STRIDE, 0);"]
    names, once, statements = _open(fusion, functions, "e")
    opening, closing = [], []
    for number, (output, name) in enumerate(zip(fusion.elements, names, strict=False)):
        kind = TYPES[output.kind]
        opening.append(f"Pack<{kind}> stored{number};")
        statements.append(f"stored{number}.values[each] = narrow({name}, {kind}());")
        at = f"elements{number} + r * COLUMNS + column"
        closing.append(f"*(Pack<{kind}> *)({at}) = stored{number};")
    for number, name in enumerate(names[len(fusion.elements) :]):
        statements.append(f"totals[{number}][step][each] += {name};")
    closing.append("if (SLOTS == 1 && r + STRIDE < ROWS) copy_vectors(r + STRIDE, 0, column);")
    return once + _write_loop(fusion, functions, statements, opening, closing)


def _write_loop(
    fusion: RowFusion,
    functions: Sequence[ElementFunction],
    statements: Sequence[str],
    opening: Sequence[str],
    closing: Sequence[str],
) -> list[str]:
    """Returns the loop of a thread through its vectors of a row.

    Args:
        fusion: what is computed.
        functions: whose inputs are loaded.
        statements: for one element.
        opening: for a vector, in front of its elements.
        closing: behind them.
    """
    loads, begin = [], 0
    needed = {number for each in functions for number in _list_numbers(each, "input")}
    for number, given in enumerate(fusion.inputs):
        kind = fusion.kinds[given.parameter]
        size = ELEMENT_BYTES[kind]
        at = f"own + {begin} + column * {size}"
        if not given.is_own:
            at = f"p{given.parameter} + base{number} + column"
        begin += fusion.columns * size if given.is_own else 0
        if number in needed:
            pack = f"const Pack<{TYPES[kind]}>"
            loads.append(f"{pack} vector{number} = *({pack} *)({at});")
    # Sums are in registers, which have no index.
    unroll = "#pragma unroll" if fusion.steps <= 4 else "#pragma unroll 2"
    return [
        unroll,
        "for (int step = 0; step < STEPS; ++step) {",
        "    const int column = (step * READERS + lane) * VECTOR;",
        "    if (!IS_EVEN && column >= COLUMNS) continue;",
        *(f"    {line}" for line in (*loads, *opening)),
        "    #pragma unroll",
        "    for (int each = 0; each < VECTOR; ++each) {",
        "        const int t = column + each;",
        *(
            f"        const float input{number} = widen(vector{number}.values[each]);"
            for number in sorted(needed)
        ),
        *(f"        {line}" for line in statements),
        "    }",
        *(f"    {line}" for line in closing),
        "}",
    ]


def _open(
    fusion: RowFusion, functions: Sequence[ElementFunction], prefix: str
) -> tuple[list[str], list[str], list[str]]:
    """Returns what the results of functions are called, and the statements that compute them.

    Returns:
        Their names; what a row computes once, which the compiler would repeat for each element
        where it comes behind a maximum; what each element computes.
    """
    inputs = [f"input{number}" for number in range(len(fusion.inputs))]
    rows = [f"row{number}" for number in range(len(fusion.row_values))]
    # Values of float32 keep all bits.
    fast = _FAST if fusion.is_narrow else {}
    opened = open_functions(functions, prefix, ("t", *inputs), fast)
    once = opened.write({"r": "r", **{name: name for name in rows}})
    statements = opened.write({name: name for name in ("t", *inputs)})
    return opened.name_results(), once, statements
