"""ElementFunction: what one element of an array is computed from, as scalars and loads.

Where `RowFunction` knows rows and columns alone, here every load has an index of its own, computed
from variables: halves of a vector that change places, or a mask that compares positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tracegraph.lowering.kernels.row_functions import EXPRESSIONS

FLOAT, INT, BOOL = "float", "int", "bool"
# Type of the result, None for that of the last operand; and the expression.
_EXPRESSIONS: dict[str, tuple[str | None, str]] = {
    **{name: (FLOAT, text) for name, text in EXPRESSIONS.items()},
    "int_add": (INT, "{0} + {1}"),
    "int_mul": (INT, "{0} * {1}"),
    "int_div": (INT, "{0} / {1}"),
    "int_rem": (INT, "{0} % {1}"),
    "int_max": (INT, "{0} > {1} ? {0} : {1}"),
    "int_min": (INT, "{0} < {1} ? {0} : {1}"),
    "eq": (BOOL, "{0} == {1}"),
    "ne": (BOOL, "{0} != {1}"),
    "lt": (BOOL, "{0} < {1}"),
    "le": (BOOL, "{0} <= {1}"),
    "gt": (BOOL, "{0} > {1}"),
    "ge": (BOOL, "{0} >= {1}"),
    "is_finite": (BOOL, "{0} - {0} == 0"),
    "and": (BOOL, "{0} && {1}"),
    "or": (BOOL, "{0} || {1}"),
    "not": (BOOL, "!{0}"),
    "select": (None, "{0} ? {1} : {2}"),
    "to_float": (FLOAT, "(float){0}"),
    # By the one instruction that a GPU has for it; its relative error grows with the argument.
    "exp_fast": (FLOAT, "exp_fast({0})"),
    "tanh_fast": (FLOAT, "tanh_fast({0})"),
    "logistic_fast": (FLOAT, "logistic_fast({0})"),
    "invert": (FLOAT, "invert({0})"),
    "round_bfloat16": (FLOAT, "widen(narrow({0}, bfloat16()))"),
    "round_float16": (FLOAT, "widen(narrow({0}, float16()))"),
}


@dataclasses.dataclass(frozen=True)
class ElementOp:
    """One scalar.

    Attributes:
        opcode: what computes it: ``variable``, ``constant``, ``load``, or a name that `has_opcode`
            knows.
        type: `FLOAT`, `INT` or `BOOL`.
        operands: numbers of earlier ops; of a load the index.
        detail: of a variable its name; of a constant its text in C++; of a load the number of the
            kernel's parameter.
    """

    opcode: str
    type: str
    operands: tuple[int, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class ElementFunction:
    """Scalars, each computed from earlier ones.

    Attributes:
        ops: each comes after its operands.
        results: numbers of those that are returned.
    """

    ops: tuple[ElementOp, ...]
    results: tuple[int, ...]

    def list_loads(self) -> set[int]:
        """Returns the numbers of the kernel's parameters that it reads."""
        return {int(op.detail) for op in self.ops if op.opcode == "load"}


def has_opcode(name: str) -> bool:
    """True for a name of an operation that can be written."""
    return name in _EXPRESSIONS


def find_type(opcode: str, last: str) -> str:
    """Returns the type of an operation's result.

    Args:
        opcode: its name.
        last: the type of its last operand.
    """
    return _EXPRESSIONS[opcode][0] or last


def keep_needed(function: ElementFunction) -> ElementFunction:
    """Returns a function without the ops that no result needs."""
    needed = set(function.results)
    for number in range(len(function.ops) - 1, -1, -1):
        if number in needed:
            needed.update(function.ops[number].operands)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    ops = [
        dataclasses.replace(op, operands=tuple(numbers[each] for each in op.operands))
        for number, op in enumerate(function.ops)
        if number in needed
    ]
    return ElementFunction(tuple(ops), tuple(numbers[each] for each in function.results))


class ElementLines:
    """Writes the statements of a function, as far as its variables are known.

    Args:
        function: what is computed.
        prefix: of the names, which no other function in the same place has.
    """

    def __init__(self, function: ElementFunction, prefix: str) -> None:
        self._function, self._prefix = function, prefix
        self._known: dict[int, str] = {}

    def write(self, variables: Mapping[str, str]) -> list[str]:
        """Returns statements for all that was not written, and needs nothing else.

        Args:
            variables: expressions of those that are known here, by their names.
        """
        lines: list[str] = []
        for number, op in enumerate(self._function.ops):
            if number in self._known:
                continue
            if op.opcode == "variable":
                if op.detail in variables:
                    self._known[number] = variables[op.detail]
            elif all(operand in self._known for operand in op.operands):
                lines += self._write(number, op)
        return lines

    def name_results(self) -> list[str]:
        """Returns what the results are called, when all is written."""
        return [self._known[number] for number in self._function.results]

    def _write(self, number: int, op: ElementOp) -> list[str]:
        if op.opcode == "constant":
            self._known[number] = f"literal(0x{op.detail}u)" if op.type == FLOAT else op.detail
            return []
        operands = [self._known[each] for each in op.operands]
        if op.opcode == "load":
            load = f"p{op.detail}[{operands[0]}]"
            expression = f"widen({load})" if op.type == FLOAT else load
        else:
            expression = _EXPRESSIONS[op.opcode][1].format(*operands)
        name = self._known[number] = f"{self._prefix}{number}"
        return [f"const {op.type} {name} = {expression};"]
