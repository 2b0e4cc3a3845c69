"""What is known of the elements of a function before it runs: integers, conditions, constants.

Note [Known elements]
An element's index is known when a kernel is written, and with it all that is computed from indices
alone. Of a condition it is known whether it may hold, and whether it may not; of one that joins an
index with a mask that is loaded one of both often is. Where neither is known nothing is said.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tracegraph.lowering.kernels.element_functions import BOOL, INT, ElementOp

# An array of all elements, or of one along an axis where all are the same.
Bits: TypeAlias = Any

_NO, _YES = np.False_, np.True_
_COMPARISONS: dict[str, Callable[[Bits, Bits], Bits]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_ARITHMETIC: dict[str, Callable[[Bits, Bits], Bits]] = {
    "int_add": np.add,
    "int_mul": np.multiply,
    "int_max": np.maximum,
    "int_min": np.minimum,
    # As in C++ towards zero.
    "int_div": lambda a, b: np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1)),
    "int_rem": lambda a, b: np.sign(a) * (abs(a) % np.maximum(abs(b), 1)),
}
_LIMIT = 1 << 31


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a scalar of each element.

    Attributes:
        value: an integer, or a float32; None where it is known of no element.
        is_known: of a float, for which elements.
        may_hold: of a condition.
        may_fail: of a condition.
        needs: it depends on what was asked about.
    """

    value: Any = None
    is_known: Any = _NO
    may_hold: Any = _YES
    may_fail: Any = _YES
    needs: Any = _NO

    def find_constant(self, where: Bits) -> str | None:
        """Returns the bits of a float that is known and the same for some elements, or None.

        Args:
            where: for which, of the last two axes.
        """
        if self.value is None:
            return None
        values, is_known = np.broadcast_arrays(self.value, self.is_known & where)
        if not (is_known | ~where).all():
            return None
        bits = np.unique(values[is_known].astype(np.float32).view(np.uint32))
        return f"{int(bits[0]):08x}" if bits.size == 1 else None

    def find_decision(self, where: Bits) -> bool | None:
        """Returns whether a condition holds for some elements; None if that differs."""
        if not (self.may_fail & where).any():
            return True
        return None if (self.may_hold & where).any() else False


def look_at_elements(
    ops: Sequence[ElementOp], places: Mapping[str, Bits], asked: str
) -> list[Known]:
    """Returns what is known of each scalar, see Note [Known elements].

    Args:
        ops: each comes after its operands.
        places: integers that are known, by the names of their variables.
        asked: the variable that `Known.needs` tells of.
    """
    found: list[Known] = []
    for op in ops:
        operands = [found[each] for each in op.operands]
        needs = _NO
        for each in operands:
            needs = needs | each.needs
        if op.opcode == "variable":
            known = Known(places.get(op.detail), needs=_YES if op.detail == asked else _NO)
        elif op.opcode == "constant":
            known = _read_constant(op)
        elif op.opcode == "select":
            known = _choose(op.type, *operands)
        elif op.type == BOOL:
            known = dataclasses.replace(_decide(op, operands, ops), needs=needs)
        elif op.type == INT:
            known = dataclasses.replace(_compute(op, operands), needs=needs)
        else:
            known = _multiply(operands, needs) if op.opcode == "mul" else Known(needs=needs)
        found.append(known)
    return found


def _read_constant(op: ElementOp) -> Known:
    if op.type == BOOL:
        is_true = np.asarray(op.detail == "true")
        return Known(may_hold=is_true, may_fail=~is_true)
    if op.type == INT:
        return Known(np.asarray(int(op.detail)))
    (value,) = struct.unpack(">f", bytes.fromhex(op.detail))
    return Known(np.asarray(value, np.float32), _YES)


def _choose(kind: str, condition: Known, first: Known, second: Known) -> Known:
    holds, fails = condition.may_hold, condition.may_fail
    needs = (holds & first.needs) | (fails & second.needs) | condition.needs
    if kind == BOOL:
        may_hold = (holds & first.may_hold) | (fails & second.may_hold)
        may_fail = (holds & first.may_fail) | (fails & second.may_fail)
        return Known(may_hold=may_hold, may_fail=may_fail, needs=needs)
    if kind == INT:
        is_open = (holds & fails).any() or first.value is None or second.value is None
        value = None if is_open else np.where(holds, first.value, second.value)
        return Known(value, needs=needs)
    values = [np.float32(0) if each.value is None else each.value for each in (first, second)]
    # Also where it is open which of two is chosen, if they are the same.
    are_same = first.is_known & second.is_known & (values[0] == values[1])
    is_known = (~fails & first.is_known) | (~holds & second.is_known) | are_same
    return Known(np.where(holds & first.is_known, *values), is_known, needs=needs)


def _decide(op: ElementOp, operands: Sequence[Known], ops: Sequence[ElementOp]) -> Known:
    if op.opcode == "not":
        return Known(may_hold=operands[0].may_fail, may_fail=operands[0].may_hold)
    if op.opcode in ("and", "or"):
        first, second = operands
        if op.opcode == "and":
            hold, fail = first.may_hold & second.may_hold, first.may_fail | second.may_fail
        else:
            hold, fail = first.may_hold | second.may_hold, first.may_fail & second.may_fail
        return Known(may_hold=hold, may_fail=fail)
    if op.opcode not in _COMPARISONS or any(ops[each].type != INT for each in op.operands):
        return Known()
    first, second = (each.value for each in operands)
    if first is None or second is None:
        return Known()
    holds = _COMPARISONS[op.opcode](first, second)
    return Known(may_hold=holds, may_fail=~holds)


def _compute(op: ElementOp, operands: Sequence[Known]) -> Known:
    values = [each.value for each in operands]
    if op.opcode not in _ARITHMETIC or values[0] is None or values[1] is None:
        return Known()
    found = _ARITHMETIC[op.opcode](values[0], values[1])
    # A kernel's integers have 32 bits.
    return Known(found if abs(found).max(initial=0) < _LIMIT else None)


def _multiply(operands: Sequence[Known], needs: Bits) -> Known:
    """Returns what is known of a product: it is zero where a factor is."""
    is_zero = _NO
    for each in operands:
        if each.value is not None:
            is_zero = is_zero | (each.is_known & (each.value == 0))
    return Known(np.float32(0), is_zero, needs=needs & ~is_zero)
