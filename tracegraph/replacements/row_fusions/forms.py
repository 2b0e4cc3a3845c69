"""Forms: which ops work along rows of some number and length, and how many elements values have."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import operator

import numpy as np
from jax import lax

from tracegraph.ir.graph import Op, Operand
from tracegraph.lowering.kernels.row_functions import EXPRESSIONS
from tracegraph.replacements.element_reader import TYPES

REDUCTIONS = frozenset(["reduce_sum", "reduce_max"])
_MOVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims"])
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "is_finite"])
_OTHERS = frozenset(["add_any", "convert_element_type", "integer_pow", "iota", "select_n"])
_KNOWN = _OTHERS | _MOVES | _COMPARISONS | {"stop_gradient", "copy"}
_RENAMING = _MOVES | {"stop_gradient"}
# On what all rows share.
_SHARED = _MOVES | {"iota"}


class RowForm(enum.Enum):
    """How many elements a value has."""

    FULL = "one for each row and column"
    ROW = "one for each row"
    OTHER = "another number"


@dataclasses.dataclass(frozen=True)
class RowSpace:
    """Rows of elements.

    Attributes:
        rows: how many.
        columns: elements of each.
    """

    rows: int
    columns: int

    def find_form(self, operand: Operand) -> RowForm:
        """Returns how many elements a value has."""
        size = operand.aval.size
        if size == self.rows * self.columns and self.rows in _accumulate(operand.aval.shape):
            return RowForm.FULL
        return RowForm.ROW if size == self.rows else RowForm.OTHER

    def takes(self, op: Op) -> bool:
        """True for an op that a kernel computes: of elements, or along rows."""
        if len(op.results) != 1 or self.find_form(op.results[0]) is RowForm.OTHER:
            return False
        if str(op.results[0].dtype) not in TYPES:
            return False
        if op.name in REDUCTIONS:
            return _keeps_elements(op) or self.is_along_rows(op)
        return op.name in EXPRESSIONS or op.name in _KNOWN or find_pick(op) is not None

    def is_renaming(self, op: Op) -> bool:
        """True for an op that gives the same elements another shape."""
        return op.name in _RENAMING and op.operands[0].aval.size == op.results[0].aval.size

    def shares(self, op: Op) -> bool:
        """True for an op on a vector that all rows share: one that moves, counts or rounds it."""
        if len(op.results) != 1 or op.results[0].aval.size != self.columns:
            return False
        return op.name in _SHARED or is_rounding(op)

    def is_along_rows(self, op: Op) -> bool:
        """True for a sum or a maximum of each row."""
        if op.name not in REDUCTIONS:
            return False
        shape, axes = _list_long_axes(op)
        return (
            self.find_form(op.operands[0]) is RowForm.FULL
            and axes == tuple(range(len(shape) - len(axes), len(shape)))
            and math.prod(shape[axis] for axis in axes) == self.columns
        )

    def is_along_columns(self, op: Op) -> bool:
        """True for a sum of each column."""
        if op.name != "reduce_sum":
            return False
        shape, axes = _list_long_axes(op)
        return (
            self.find_form(op.operands[0]) is RowForm.FULL
            and axes == tuple(range(len(axes)))
            and math.prod(shape[axis] for axis in axes) == self.rows
        )


@dataclasses.dataclass(frozen=True)
class Pick:
    """A gather that takes one element of each row, as `jnp.take_along_axis` does.

    Attributes:
        axis: along which the row lies.
        batch: for each other axis of the operand the one of the result.
        fills: an index out of bounds gives NaN.
    """

    axis: int
    batch: tuple[int, ...]
    fills: bool


def find_pick(op: Op) -> Pick | None:
    """Returns which element of each row a gather takes, or None for what is none."""
    if op.name != "gather" or any(size != 1 for size in op.params["slice_sizes"]):
        return None
    numbers, fill = op.params["dimension_numbers"], op.params["fill_value"]
    axes = numbers.start_index_map
    is_pick = not numbers.offset_dims and len(axes) == 1 and numbers.collapsed_slice_dims == axes
    rest = tuple(axis for axis in range(len(op.params["slice_sizes"])) if axis != axes[0])
    if not is_pick or numbers.operand_batching_dims != rest:
        return None
    if not np.issubdtype(op.operands[1].aval.dtype, np.int32):
        return None
    fills = op.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if fills and fill is not None and not np.isnan(float(fill)):
        return None
    return Pick(axes[0], tuple(numbers.start_indices_batching_dims), fills)


def is_rounding(op: Op) -> bool:
    """True for an op that rounds float32 to 16 bits."""
    if op.name != "convert_element_type":
        return False
    before, after = (str(each.aval.dtype) for each in (op.operands[0], op.results[0]))
    return before == "float32" and after in ("bfloat16", "float16")


def _accumulate(shape: tuple[int, ...]) -> list[int]:
    """Returns the sizes of the leading axes together, from none of them on."""
    return list(itertools.accumulate(shape, operator.mul, initial=1))


def _list_long_axes(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of what is reduced and the axes, both without those of one element."""
    shape = op.operands[0].aval.shape
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    axes = tuple(place for place, axis in enumerate(long) if axis in op.params["axes"])
    return tuple(shape[axis] for axis in long), axes


def _keeps_elements(op: Op) -> bool:
    return op.operands[0].aval.size == op.results[0].aval.size
