"""RowValueReader: reads elements that need sums and maxima of their row.

Such a row value is a variable of what is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.attention.tiled import RowValue
from tracegraph.lowering.kernels.element_functions import FLOAT, ElementOp
from tracegraph.replacements.element_reader import TYPES, Element, ElementReader, UnreadableError
from tracegraph.replacements.indices import (
    Index,
    list_variables,
    make_variable,
    unflatten_index,
)
from tracegraph.replacements.places import Indices

# The variables of a row's number, and of an element's place in its row.
ROW, COLUMN = "r", "t"
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max"}


class RowValueReader(ElementReader):
    """Reads elements of rows.

    Args:
        makers: the op of each value.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
        columns: elements of a row.
    """

    def __init__(
        self, makers: Mapping[Operand, Op], arrays: dict[Value, int], columns: int
    ) -> None:
        super().__init__(makers, arrays)
        self._columns = columns
        # Kind and element of each row value.
        self._row_values: list[tuple[str, int]] = []
        self._known_row_values: dict[Any, int] = {}

    def list_row_values(self) -> tuple[RowValue, ...]:
        """Returns the sums and maxima of rows, each computed from those before it."""
        return tuple(RowValue(kind, self.finish(element)) for kind, element in self._row_values)

    def _save(self) -> Any:
        return super()._save(), len(self._row_values), dict(self._known_row_values)

    def _restore(self, state: Any) -> None:
        before, row_values, self._known_row_values = state
        super()._restore(before)
        del self._row_values[row_values:]

    def _read_op(self, op: Op, place: Indices) -> Element:
        is_float = len(op.results) == 1 and TYPES.get(str(op.results[0].dtype)) == FLOAT
        if is_float and op.name in _REDUCTIONS:
            return self._read_reduction(op, place)
        return super()._read_op(op, place)

    def _read_reduction(self, op: Op, place: Indices) -> Element:
        """Returns the variable of a row value; over axes of one element nothing is to be done."""
        shape, axes = op.operands[0].aval.shape, op.params["axes"]
        long = [axis for axis in axes if shape[axis] > 1]
        rest = iter(place)
        at = [Index() if axis in axes else next(rest) for axis in range(len(shape))]
        if not long:
            return self.read(op.operands[0], tuple(at))
        sizes = [shape[axis] for axis in long]
        if math.prod(sizes) != self._columns:
            raise UnreadableError
        if any(COLUMN in list_variables(index) for index in place):
            raise UnreadableError
        key = (id(op), place)
        if key not in self._known_row_values:
            column = make_variable(COLUMN, self._columns)
            for axis, index in zip(long, unflatten_index(column, sizes), strict=True):
                at[axis] = index
            element = self.read(op.operands[0], tuple(at))
            if isinstance(element, Index) or not self._is_of_row(element):
                raise UnreadableError
            self._known_row_values[key] = len(self._row_values)
            self._row_values.append((_REDUCTIONS[op.name], element))
        return self._add_variable(f"row{self._known_row_values[key]}")

    def _is_of_row(self, element: int) -> bool:
        """True for what the kernel computes a row value of."""
        return element in self._of_sum

    def _add_variable(self, name: str) -> int:
        number = self._add(ElementOp("variable", FLOAT, (), name))
        self._of_sum.add(number)
        return number
