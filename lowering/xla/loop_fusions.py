"""Loop fusions: an instruction of XLA's that computes element by element → ElementLoop.

Only where all arrays have one shape and one layout: then element number ``i`` in memory is the same
one of each of them. What is not known to be of this form is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracegraph.lowering.element_loops import (
    ELEMENT_BYTES,
    ElementLoop,
    ElementOperand,
    LoopFunction,
    LoopOp,
    normalize_loop,
)
from tracegraph.lowering.xla.constants import read_literal
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.refusal import Refusal

_ARITHMETIC = frozenset(
    ["add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "negate", "abs"]
    + ["sqrt", "rsqrt", "exponential", "log", "clamp"]
)
_LOGIC = frozenset(["and", "or", "not"])
# They change no value and no place in memory, as long as types and layouts are equal. A bitcast may
# also read the bits of a float as an int: that is another value.
_VIEWS = frozenset(["bitcast", "reshape", "copy"])
_FLOATS = frozenset(["F32", "BF16", "F16"])
# Not that of bits, which tells zeros apart.
_COMPARISONS = frozenset(["", "FLOAT", "SIGNED"])
# A fusion of more would take longer to compile than it saves.
MAX_OPS = 64


def read_loop_fusion(
    instruction: Any, computations: Mapping[int, Mapping[str, Any]]
) -> ElementLoop | None:
    """Returns what a kernel computes for each element; None where that is not known.

    Args:
        instruction: of XLA's program, that the kernel computes; None where that is not known.
        computations: the instructions of every computation, by its number.
    """
    fused = list_fused(instruction, computations)
    if not fused:
        return None
    try:
        return _Reader(fused).read()
    except (_OtherFormSignal, Refusal):
        return None


def list_fused(instruction: Any, computations: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Returns the instructions of a fusion, the root last; none of anything else.

    Args:
        instruction: of XLA's program, or None.
        computations: the instructions of every computation, by its number.
    """
    if instruction is None or instruction.opcode != "fusion":
        return []
    called = [computations.get(number, {}) for number in instruction.called_computation_ids]
    return list(called[0].values()) if len(called) == 1 else []


class _OtherFormSignal(Exception):
    """A fusion is not of the form that is looked for."""


class _Reader:
    """Reads the instructions of one fused computation.

    Args:
        instructions: each after its operands, the root last.
    """

    def __init__(self, instructions: list[Any]) -> None:
        self._instructions = instructions
        # Of all arrays: dimensions and layout.
        self._shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._operands: dict[int, ElementOperand] = {}
        self._numbers: dict[int, int] = {}
        self._ops: list[LoopOp] = []

    def read(self) -> ElementLoop:
        """Returns the loop.

        Raises:
            _OtherFormSignal: it is none.
        """
        parameters = [each for each in self._instructions if each.opcode == "parameter"]
        parameters.sort(key=lambda each: each.parameter_number)
        if len(self._instructions) > MAX_OPS + len(parameters):
            raise _OtherFormSignal
        for number, each in enumerate(parameters):
            if each.parameter_number != number:
                raise _OtherFormSignal
            self._operands[number] = ElementOperand(self._read_kind(each), self._is_single(each))
            self._numbers[each.id] = number
        results: tuple[int, ...] = ()
        for each in self._instructions:
            if each.opcode == "tuple" and each is self._instructions[-1]:
                results = tuple(self._find(operand) for operand in each.operand_ids)
            elif each.opcode != "parameter":
                self._numbers[each.id] = self._read(each)
        results = results or (self._numbers[self._instructions[-1].id],)
        root = self._instructions[-1]
        returned = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
        operands = tuple(self._operands.values())
        if self._shape is None:
            # Arrays of one element, from which XLA drops the dimensions.
            operands = tuple(ElementOperand(each.kind, is_single=False) for each in operands)
        elif any(self._is_single(self._find_instruction(each)) for each in returned):
            raise _OtherFormSignal
        count = 1 if self._shape is None else math.prod(self._shape[0])
        return normalize_loop(LoopFunction(operands, tuple(self._ops), results), count)

    def _read(self, instruction: Any) -> int:
        """Returns the number of the value of an instruction."""
        opcode, kind = instruction.opcode, self._read_kind(instruction)
        is_single = self._is_single(instruction)
        if opcode == "broadcast":
            source = self._find_source(instruction)
            if not self._is_single(source):
                raise _OtherFormSignal
            return self._find(source.id)
        operands = tuple(self._find(operand) for operand in instruction.operand_ids)
        if opcode in _VIEWS:
            source = self._find_source(instruction)
            if is_single != self._is_single(source) or kind != self._read_kind(source):
                raise _OtherFormSignal
            return operands[0]
        detail = ""
        if opcode == "constant":
            if not is_single:
                raise _OtherFormSignal
            detail = read_literal(instruction)[::-1].hex()
        elif not self._is_known(opcode, kind, operands) or _asks_for_accuracy(instruction):
            raise _OtherFormSignal
        if opcode == "compare":
            if getattr(instruction, "comparison_type", "") not in _COMPARISONS:
                raise _OtherFormSignal
            detail = instruction.comparison_direction
        self._ops.append(LoopOp(opcode, kind, operands, detail))
        return len(self._operands) + len(self._ops) - 1

    def _is_known(self, opcode: str, kind: str, operands: tuple[int, ...]) -> bool:
        kinds = {self._find_kind(operand) for operand in operands}
        if opcode in _ARITHMETIC:
            # How 16-bit values are added and multiplied is not what C says.
            return kinds == {kind} == {"F32"}
        if opcode in _LOGIC:
            return kinds == {kind} == {"PRED"}
        if opcode == "select":
            return len(operands) == 3 and self._find_kind(operands[0]) == "PRED"
        if opcode == "compare":
            return kinds <= {"F32", "S32"} and len(kinds) == 1
        return opcode == "convert" and kind in _FLOATS and kinds <= {*_FLOATS, "S32"}

    def _find(self, identity: int) -> int:
        if identity not in self._numbers:
            raise _OtherFormSignal
        return self._numbers[identity]

    def _find_instruction(self, identity: int) -> Any:
        for each in self._instructions:
            if each.id == identity:
                return each
        raise _OtherFormSignal

    def _find_source(self, instruction: Any) -> Any:
        """Returns the operand of an instruction that has one."""
        if len(instruction.operand_ids) != 1:
            raise _OtherFormSignal
        return self._find_instruction(instruction.operand_ids[0])

    def _find_kind(self, value: int) -> str:
        count = len(self._operands)
        return self._operands[value].kind if value < count else self._ops[value - count].kind

    def _read_kind(self, instruction: Any) -> str:
        kind = read_name(instruction.shape, "element_type")
        if kind not in ELEMENT_BYTES:
            raise _OtherFormSignal
        return kind

    def _is_single(self, instruction: Any) -> bool:
        """True for one element; all larger arrays must be of one shape and layout."""
        shape = instruction.shape
        dimensions = tuple(shape.dimensions)
        if math.prod(dimensions) == 1:
            return True
        found = dimensions, tuple(shape.layout.minor_to_major)
        if self._shape is None:
            self._shape = found
        if found != self._shape:
            raise _OtherFormSignal
        return False


def _asks_for_accuracy(instruction: Any) -> bool:
    """True where XLA may compute a function in another way than by default."""
    # Older versions of XLA do not have the field.
    accuracy = getattr(instruction, "result_accuracy", None)
    return accuracy is not None and accuracy.ByteSize() > 0
