"""ElementLoop: what a kernel computes, where it computes each element of its results by itself.

Values are numbered: first the operands, then one per operation.
"""

from __future__ import annotations

import dataclasses

# Of the types that are known, by XLA's names.
ELEMENT_BYTES = {"F32": 4, "S32": 4, "PRED": 1, "BF16": 2, "F16": 2}


@dataclasses.dataclass(frozen=True)
class ElementOperand:
    """An operand of a function of elements.

    Attributes:
        kind: XLA's name of its type, as ``F32``.
        is_single: True for one value that all elements share.
    """

    kind: str
    is_single: bool


@dataclasses.dataclass(frozen=True)
class LoopOp:
    """One operation on one element of each of its operands.

    Attributes:
        opcode: XLA's, as ``multiply``.
        kind: XLA's name of the result's type.
        operands: numbers of earlier values.
        detail: of a ``constant`` its bits as a hexadecimal number; of a ``compare`` its direction.
    """

    opcode: str
    kind: str
    operands: tuple[int, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class LoopFunction:
    """What is computed for each element; equal ones compute the same.

    Attributes:
        operands: what it takes.
        ops: each comes after its operands.
        results: numbers of the values that it returns.
    """

    operands: tuple[ElementOperand, ...]
    ops: tuple[LoopOp, ...]
    results: tuple[int, ...]

    def find_kind(self, value: int) -> str:
        """Returns the type of a value."""
        count = len(self.operands)
        return self.operands[value].kind if value < count else self.ops[value - count].kind


@dataclasses.dataclass(frozen=True)
class ElementLoop:
    """A function of elements over arrays.

    Attributes:
        function: what it computes for each.
        count: of the elements.
        arguments: for each operand and then each result of the function its place among the
            arguments of the kernel.
    """

    function: LoopFunction
    count: int
    arguments: tuple[int, ...]


def normalize_loop(function: LoopFunction, count: int) -> ElementLoop:
    """Returns a loop whose function is the same for all orders of its operands and operations.

    Values are numbered in the order in which the results need them.

    Args:
        function: its operands and results are the arguments of a kernel, in their order.
        count: of the elements.
    """
    first = len(function.operands)
    order: list[int] = []
    ops: list[LoopOp] = []
    known: dict[int, tuple[str, int]] = {}

    def visit(value: int) -> None:
        if value in known:
            return
        if value < first:
            known[value] = "operand", len(order)
            order.append(value)
            return
        op = function.ops[value - first]
        for operand in op.operands:
            visit(operand)
        known[value] = "op", len(ops)
        ops.append(op)

    for result in function.results:
        visit(result)
    order += [operand for operand in range(first) if operand not in known]
    shift = {"operand": 0, "op": first}
    number = {value: shift[kind] + place for value, (kind, place) in known.items()}
    normal = LoopFunction(
        tuple(function.operands[operand] for operand in order),
        tuple(
            dataclasses.replace(op, operands=tuple(number[each] for each in op.operands))
            for op in ops
        ),
        tuple(number[result] for result in function.results),
    )
    results = range(first, first + len(function.results))
    return ElementLoop(normal, count, (*order, *results))
