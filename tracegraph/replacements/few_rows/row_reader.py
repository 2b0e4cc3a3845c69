"""Row reader: ops around a matmul → RowFunction.

Values have the form that they have to the matmul's rows and columns: a shape tells it where its
leading sizes come to the rows and its trailing ones to the columns. Reshapes leave all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.lowering.kernels.row_functions import (
    EXPRESSIONS,
    REDUCTIONS,
    Form,
    RowFunction,
    RowOp,
    RowOperand,
)
from tracegraph.replacements.kinds import FLOAT_KINDS

_SAME_ELEMENTS = frozenset(["squeeze", "expand_dims", "stop_gradient", "copy"])
# More than a norm needs; each block computes all of it.
MAX_OPS = 48


@dataclasses.dataclass(frozen=True)
class RowShape:
    """What a matmul has: so many rows, of so many columns."""

    rows: int
    columns: int

    def find_form(
        self, given: tuple[int, ...], context: Form, shape: tuple[int, ...]
    ) -> Form | None:
        """Returns the form of an operand of an element-wise op, or None if it has none.

        Args:
            given: its shape.
            context: form of the op's result.
            shape: of the op's result.
        """
        if math.prod(given) == 1:
            return Form.ONE
        if given == shape:
            return context
        is_full = context is Form.FULL and len(given) == len(shape)
        return self._split(given, shape) if is_full else None

    def _split(self, given: tuple[int, ...], shape: tuple[int, ...]) -> Form | None:
        """Returns the form of what is repeated to a full shape: along all rows, or all columns."""
        for axis in range(len(shape) + 1):
            if math.prod(shape[:axis]) != self.rows or math.prod(shape[axis:]) != self.columns:
                continue
            if math.prod(given[:axis]) == 1 and given[axis:] == shape[axis:]:
                return Form.COLUMN
            if math.prod(given[axis:]) == 1 and given[:axis] == shape[:axis]:
                return Form.ROW
        return None


def keeps_elements(op: Op) -> bool:
    """True for an op whose result has the elements of its operand, in the same order."""
    # A sum along an axis of one element is that element.
    if op.name == "broadcast_in_dim" or op.name in REDUCTIONS:
        return math.prod(op.operands[0].aval.shape) == math.prod(op.results[0].shape)
    if op.name == "reshape":
        # One may transpose first, as in the order of Fortran.
        return op.params["dimensions"] is None
    return op.name in _SAME_ELEMENTS


class UnreadableRowError(Exception):
    """An op, or an array, that no row function takes."""


class RowReader:
    """Reads values of one matmul, and what they are made from.

    Args:
        shape: of the matmul.
        makers: the op of each value.
        stops: values that are read as arrays.
        sums: values that the kernel has, by their numbers; operands and ops come after them.
        reads_sums_of_rows: take sums and maxima along rows.

    Attributes:
        arrays: what is read, with its form, in order.
        read_ops: ops that are a part of the function.
    """

    def __init__(
        self,
        shape: RowShape,
        makers: Mapping[Operand, Op],
        stops: Set[Value],
        sums: Mapping[Value, int] | None = None,
        *,
        reads_sums_of_rows: bool = False,
    ) -> None:
        self._shape, self._makers, self._stops = shape, makers, stops
        self._sums, self._reads_sums_of_rows = dict(sums or {}), reads_sums_of_rows
        self.arrays: dict[tuple[Operand, Form], int] = {}
        self.read_ops: dict[int, Op] = {}
        self._ops: list[RowOp] = []
        self._known: dict[tuple[Operand, Form], tuple[str, int]] = {}

    def scale(self, value: Value, scale: Value) -> None:
        """Reads a value of the kernel as itself times a factor for each column."""
        known = "sum", self._sums[value]
        factors: Any = (known, self._read_array(scale, Form.COLUMN))
        self._known[value, Form.FULL] = self._add(RowOp("mul", Form.FULL, factors))

    def read(self, value: Operand, form: Form = Form.FULL) -> tuple[str, int]:
        """Returns what stands for a value until `finish` numbers it.

        Raises:
            UnreadableRowError: its type is none that kernels read.
        """
        key = (value, form)
        if key not in self._known:
            self._known[key] = self._read(value, form)
        return self._known[key]

    def finish(self, results: list[tuple[str, int]]) -> RowFunction:
        """Returns the function of what was read."""
        first = len(self._sums)
        starts = {"sum": 0, "array": first, "op": first + len(self.arrays)}

        def number(value: Any) -> int:
            what, index = value
            return starts[what] + index

        ops = tuple(
            dataclasses.replace(op, operands=tuple(map(number, op.operands))) for op in self._ops
        )
        operands = tuple(RowOperand(index, form) for index, (_, form) in enumerate(self.arrays))
        return RowFunction(operands, ops, tuple(map(number, results)), first)

    def _read(self, value: Operand, form: Form) -> tuple[str, int]:
        if isinstance(value, Literal):
            bits = f"{np.float32(value.value).view(np.uint32):08x}"
            return self._add(RowOp("constant", Form.ONE, (), bits))
        if value in self._sums:
            return "sum", self._sums[value]
        maker = self._makers.get(value)
        if maker is None or value in self._stops or len(self._ops) >= MAX_OPS:
            return self._read_array(value, form)
        state = len(self._ops), dict(self.arrays), dict(self._known), dict(self.read_ops)
        try:
            return self._read_op(maker, form)
        except UnreadableRowError:
            # All of it or none: what an op that is left out would read is not read.
            del self._ops[state[0] :]
            self.arrays, self._known, self.read_ops = state[1:]
            return self._read_array(value, form)

    def _read_array(self, value: Value, form: Form) -> tuple[str, int]:
        if str(value.dtype) not in FLOAT_KINDS:
            raise UnreadableRowError
        key = (value, Form.ONE if math.prod(value.shape) == 1 else form)
        return "array", self.arrays.setdefault(key, len(self.arrays))

    def _read_op(self, op: Op, form: Form) -> tuple[str, int]:
        found = self._read_parts(op, form)
        self.read_ops[id(op)] = op
        return found

    def _read_parts(self, op: Op, form: Form) -> tuple[str, int]:
        if len(op.results) != 1 or not op.operands:
            raise UnreadableRowError
        value, result = op.operands[0], op.results[0]
        if str(result.dtype) not in FLOAT_KINDS:
            raise UnreadableRowError
        if keeps_elements(op):
            return self.read(value, form)
        if op.name == "convert_element_type":
            if isinstance(value, Value) and str(value.dtype) not in FLOAT_KINDS:
                raise UnreadableRowError
            return self.read(value, form)
        if op.name == "broadcast_in_dim":
            return self.read(value, self._find_form(expand_shape(op), form, result.shape))
        # As many rows as columns: what is asked for at each column may be a sum of each row.
        if op.name in REDUCTIONS and self._reads_sums_of_rows and form in (Form.ROW, Form.ONE):
            return self._read_sum_of_row(op)
        if op.name == "integer_pow":
            return self._read_power(op, form)
        opcode = {"add_any": "add"}.get(op.name, op.name)
        # Arrays that are padded to be added up are parts of one, which is smaller than all of them.
        is_join = any(getattr(self._makers.get(each), "name", "") == "pad" for each in op.operands)
        if opcode not in EXPRESSIONS or is_join:
            raise UnreadableRowError
        shapes = [tuple(each.aval.shape) for each in op.operands]
        forms = [self._find_form(shape, form, result.shape) for shape in shapes]
        return self._add(RowOp(opcode, form, self._read_all(op, forms)))

    def _read_all(self, op: Op, forms: list[Form]) -> Any:
        # Numbers come when all is read.
        return tuple(self.read(each, form) for each, form in zip(op.operands, forms, strict=True))

    def _read_sum_of_row(self, op: Op) -> tuple[str, int]:
        (value,) = op.operands
        shape, axes = tuple(value.aval.shape), tuple(op.params["axes"])
        kept = len(shape) - len(axes)
        is_row = math.prod(shape[kept:]) == self._shape.columns
        if axes != tuple(range(kept, len(shape))) or not is_row:
            raise UnreadableRowError
        if math.prod(shape[:kept]) != self._shape.rows:
            raise UnreadableRowError
        operand: Any = (self.read(value, Form.FULL),)
        return self._add(RowOp(op.name, Form.ROW, operand))

    def _read_power(self, op: Op, form: Form) -> tuple[str, int]:
        operand = self.read(op.operands[0], form)
        if op.params["y"] not in (2, 3):
            raise UnreadableRowError
        factors: Any = (operand,)
        square = self._add(RowOp("square", form, factors))
        both: Any = (square, operand)
        return square if op.params["y"] == 2 else self._add(RowOp("mul", form, both))

    def _find_form(self, given: tuple[int, ...], context: Form, shape: tuple[int, ...]) -> Form:
        form = self._shape.find_form(given, context, shape)
        if form is None:
            raise UnreadableRowError
        return form

    def _add(self, op: RowOp) -> tuple[str, int]:
        self._ops.append(op)
        return "op", len(self._ops) - 1


def expand_shape(op: Op) -> tuple[int, ...]:
    """Returns the shape of what is broadcast, with as many axes as the result has."""
    sizes = dict(zip(op.params["broadcast_dimensions"], op.operands[0].aval.shape, strict=True))
    return tuple(sizes.get(axis, 1) for axis in range(len(op.params["shape"])))
