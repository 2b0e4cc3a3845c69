"""RowFunction: element-wise work and sums along rows that a kernel does before or after its matmul.

All of it is done in float32, whatever the types of the arrays: a value is rounded when it is
stored. Values are numbered: sums that the kernel has made, operands, then one per operation.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class Form(enum.Enum):
    """How many elements a value has."""

    FULL = "one for each row and column"
    COLUMN = "one for each column"
    ROW = "one for each row"
    ONE = "one"


@dataclasses.dataclass(frozen=True)
class RowOperand:
    """An array that is read: the number of the kernel's parameter, and how it is indexed."""

    parameter: int
    form: Form


@dataclasses.dataclass(frozen=True)
class RowOp:
    """One operation on one element of each of its operands, or along a row.

    Attributes:
        opcode: a name of `EXPRESSIONS`, ``constant``, or one of `REDUCTIONS`.
        form: of its result.
        operands: numbers of earlier values.
        detail: of a ``constant`` its bits as a hexadecimal number.
    """

    opcode: str
    form: Form
    operands: tuple[int, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """What is computed for each element.

    Attributes:
        operands: arrays that it reads.
        ops: each comes after its operands.
        results: numbers of the values that it returns.
        sums: how many values of the kernel come before the operands.
    """

    operands: tuple[RowOperand, ...]
    ops: tuple[RowOp, ...]
    results: tuple[int, ...]
    sums: int = 0

    @property
    def first_op(self) -> int:
        """Number of the first operation's value."""
        return self.sums + len(self.operands)


EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "pow": "powf({0}, {1})",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "square": "{0} * {0}",
    "one_minus_square": "(literal(0x3f800000u) - {0}) * (literal(0x3f800000u) + {0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "rsqrtf({0})",
    "exp": "expf({0})",
    "exp2": "exp2f({0})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "expm1": "expm1f({0})",
    "tanh": "tanhf({0})",
    "erf": "erff({0})",
    "erfc": "erfcf({0})",
    "logistic": "1.0f / (1.0f + expf(-{0}))",
}
# What is begun with, and how a value is added, in bits and as an expression.
REDUCTIONS = {
    "reduce_sum": ("00000000", "{0} + {1}"),
    "reduce_max": ("ff800000", "maximum({0}, {1})"),
}
_INDICES = {Form.FULL: "{row} * {columns} + {column}", Form.COLUMN: "{column}", Form.ROW: "{row}"}


@dataclasses.dataclass(frozen=True)
class ElementPosition:
    """Where one element is, as expressions in C++.

    Attributes:
        row: its number.
        column: its number.
        columns: how many there are.
    """

    row: str
    column: str
    columns: str


class ElementWriter:
    """Writes the statements for one element of a row function.

    Args:
        function: what is computed.
        place: of the element.
        known: expressions of values that are there: sums, and what has been reduced.
    """

    def __init__(
        self, function: RowFunction, place: ElementPosition, known: Mapping[int, str]
    ) -> None:
        self._function, self._place, self._known = function, place, dict(known)
        self.lines: list[str] = []

    def write(self, number: int) -> str:
        """Returns the name of a value; what it needs is written first, once."""
        if number not in self._known:
            expression = self._express(number)
            self.lines.append(f"float e{number} = {expression};")
            self._known[number] = f"e{number}"
        return self._known[number]

    def _express(self, number: int) -> str:
        function = self._function
        if number < function.first_op:
            return self._load(function.operands[number - function.sums])
        op = function.ops[number - function.first_op]
        if op.opcode == "constant":
            return f"literal(0x{op.detail}u)"
        return EXPRESSIONS[op.opcode].format(*map(self.write, op.operands))

    def _load(self, operand: RowOperand) -> str:
        index = _INDICES.get(operand.form, "0").format(**dataclasses.asdict(self._place))
        return f"widen(p{operand.parameter}[{index}])"


@dataclasses.dataclass(frozen=True)
class RowLoop:
    """How the threads of a row go through its elements.

    Attributes:
        opening: lines that begin it: they define ``column``.
        closing: the line that ends it.
        known: what operands are called inside of it.
    """

    opening: tuple[str, ...]
    closing: str
    known: Mapping[int, str]

    def write(self, lines: Sequence[str]) -> list[str]:
        """Returns the loop with lines inside of it."""
        return [*self.opening, *(f"    {line}" for line in lines), self.closing]


def write_reductions(
    function: RowFunction, columns: str, loop: RowLoop
) -> tuple[list[str], dict[int, str]]:
    """Returns statements for all that has one value for each row, or one; and what it is called.

    All threads of ``row`` take part. They need a function ``reduce_row`` for what each of them has,
    which takes ``float *scratch`` in shared memory.

    Args:
        function: without sums.
        columns: how many, in C++.
        loop: through all elements of a row.
    """
    lines: list[str] = []
    known: dict[int, str] = {}
    for number, op in enumerate(function.ops, start=function.first_op):
        if op.opcode in REDUCTIONS:
            begin, combine = REDUCTIONS[op.opcode]
            body = ElementWriter(
                function, ElementPosition("row", "column", columns), {**loop.known, **known}
            )
            added = combine.format(f"v{number}", body.write(op.operands[0]))
            lines += [
                f"float v{number} = literal(0x{begin}u);",
                *loop.write([*body.lines, f"v{number} = {added};"]),
                write_reduction_of_row(function, number),
            ]
        elif op.form in (Form.ROW, Form.ONE) and op.opcode != "constant":
            body = ElementWriter(function, ElementPosition("row", "0", "1"), known)
            name = body.write(number)
            lines += [f"float v{number};", "{", *body.lines, f"v{number} = {name};", "}"]
        else:
            continue
        known[number] = f"v{number}"
    return lines, known


def write_reduction_of_row(function: RowFunction, number: int) -> str:
    """Returns the statement that combines what the threads of a row have of one sum."""
    combine = REDUCTIONS[function.ops[number - function.first_op].opcode][1].format("a", "b")
    given = f"v{number}, scratch, [](float a, float b) {{ return {combine}; }}"
    return f"v{number} = reduce_row({given});"


@dataclasses.dataclass(frozen=True)
class RowFactors:
    """A row function's result as a product: of what each element has, and of what its row has.

    Attributes:
        elements: numbers of values that need no sum of the row.
        rows: numbers of values that do, one for each row.
        sums: numbers of the operations along the row that these need.
    """

    elements: tuple[int, ...]
    rows: tuple[int, ...]
    sums: tuple[int, ...]


def find_row_factors(function: RowFunction) -> RowFactors | None:
    """Returns the factors of a function's first result; None where sums are more than factors."""
    sums = [
        number
        for number, op in enumerate(function.ops, start=function.first_op)
        if op.opcode in REDUCTIONS
    ]
    needs = _find_dependents(function, sums)
    elements: list[int] = []
    rows: list[int] = []
    todo = [function.results[0]]
    while todo:
        number = todo.pop()
        op = function.ops[number - function.first_op] if number >= function.first_op else None
        if number not in needs:
            elements.append(number)
        elif op is not None and op.form in (Form.ROW, Form.ONE):
            rows.append(number)
        elif op is not None and op.opcode == "mul":
            todo += reversed(op.operands)
        else:
            return None
    reduced = (function.ops[number - function.first_op].operands for number in sums)
    if not rows or not elements or any(map(needs.intersection, reduced)):
        return None
    return RowFactors(tuple(elements), tuple(rows), tuple(sums))


def _find_dependents(function: RowFunction, numbers: Sequence[int]) -> set[int]:
    """Returns values and all that is computed from them."""
    found = set(numbers)
    for number, op in enumerate(function.ops, start=function.first_op):
        if found.intersection(op.operands):
            found.add(number)
    return found
