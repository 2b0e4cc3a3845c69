"""LineMatmul: a matmul inside of attention, as lines that are multiplied by lines.

A line is a vector: a query, a key, a value, or the gradient of a result. Groups, as heads of
sequences, are the axes that both sides of a matmul have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.attention.tiled import Lines
from tracegraph.replacements.attention.softmax_chain import ELEMENT, list_free
from tracegraph.replacements.element_reader import ElementReader
from tracegraph.replacements.indices import (
    Index,
    flatten_index,
    list_variables,
    make_variable,
)
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.places import Indices, move_place
from tracegraph.replacements.row_value_reader import COLUMN, ROW

_TENSOR_CORES = frozenset(["None", "DEFAULT", "TF32_TF32_F32", "BF16_BF16_F32", "F16_F16_F32"])
_HALVES = ("bfloat16", "float16")
# Kernels find lines by numbers of 32 bits.
_MOST_ELEMENTS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class LineMatmul:
    """A matmul whose result has a row for each line of one side, a column for each of the other.

    Attributes:
        op: the matmul.
        place: of a result, with the variables `ROW` and `COLUMN`.
        left: which operand has the lines of rows.
    """

    op: Op
    place: Indices
    left: int

    @property
    def width(self) -> int:
        """Elements of a line."""
        return find_depth(self.op)

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows and columns."""
        return count_lines(self.op, self.left), count_lines(self.op, 1 - self.left)

    def place_lines(self, side: int) -> Indices:
        """Returns where an element of a line of one operand is."""
        batch, free = _split_place(self.op, self.place)
        return place_side(self.op, side, batch, free[side], make_variable(ELEMENT, self.width))


def find_line_matmul(op: Op, place: Indices) -> LineMatmul | None:
    """Returns a matmul of lines, if each side has the lines of one direction."""
    if op.name != "dot_general" or find_depth(op) == 0 or not runs_on_tensor_cores(op):
        return None
    batch, free = _split_place(op, place)
    names = [set[str]().union(*map(list_variables, part)) for part in free]
    groups = set[str]().union(*map(list_variables, batch))
    if any(not name.startswith("g") for name in groups):
        return None
    for left in (0, 1):
        if names[left] == {ROW} and names[1 - left] == {COLUMN}:
            return LineMatmul(op, place, left)
    return None


def find_depth(op: Op) -> int:
    """Returns how many products each sum of a matmul has; zero where several axes make them."""
    (contracted, _), _ = op.params["dimension_numbers"]
    sizes = [op.operands[0].aval.shape[axis] for axis in contracted]
    return max(sizes, default=0) if sum(size > 1 for size in sizes) == 1 else 0


def count_lines(op: Op, side: int) -> int:
    """Returns how many lines one operand has."""
    shape = op.operands[side].aval.shape
    return max((shape[axis] for axis in list_free(op, side)), default=1)


def list_group_sizes(op: Op) -> tuple[int, ...]:
    """Returns the sizes of the axes that both operands of a matmul have."""
    shape = op.operands[0].aval.shape
    return tuple(shape[axis] for axis in op.params["dimension_numbers"][1][0])


def list_groups(op: Op) -> tuple[Index, ...]:
    """Returns the variables ``g0``, ``g1``, ... of the axes that both operands of a matmul have."""
    return tuple(make_variable(f"g{n}", size) for n, size in enumerate(list_group_sizes(op)))


def runs_on_tensor_cores(op: Op) -> bool:
    """True for a matmul of floats that need not be more exact than tensor cores make it."""
    if any(str(each.aval.dtype) not in FLOAT_KINDS for each in (*op.operands, *op.results)):
        return False
    precision = op.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if all(str(getattr(each, "name", each)) in _TENSOR_CORES for each in precisions):
        return True
    # All bits of these are used anyway.
    return all(str(each.aval.dtype) in _HALVES for each in op.operands)


def place_side(
    op: Op, side: int, batch: Sequence[Index], free: Sequence[Index], contracted: Index
) -> Indices:
    """Returns where an element of a matmul's operand is; further axes have one element."""
    axes, batches = (each[side] for each in op.params["dimension_numbers"])
    shape = op.operands[side].aval.shape
    places = dict(zip(batches, batch, strict=True))
    places |= dict(zip(list_free(op, side), free, strict=True))
    places |= {axis: contracted if shape[axis] > 1 else Index() for axis in axes}
    return tuple(places[axis] for axis in range(len(shape)))


def spread_free(op: Op, side: int, index: Index) -> tuple[Index, ...] | None:
    """Returns an index for each axis that a result has of one operand, of which one is long."""
    shape = op.operands[side].aval.shape
    sizes = [shape[axis] for axis in list_free(op, side)]
    if sum(size > 1 for size in sizes) != 1:
        return None
    return tuple(index if size > 1 else Index() for size in sizes)


def find_lines(
    makers: Mapping[Operand, Op],
    arrays: dict[Value, int],
    value: Operand,
    place: Indices,
    along: str,
) -> Lines | None:
    """Returns where lines are in memory, or None where their elements are not side by side.

    That is the first array that has them so; others are what XLA makes of it by moving elements.

    Args:
        makers: the op of each value.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
        value: the operand of a matmul.
        place: of an element of a line in it.
        along: the variable that counts lines.

    Raises:
        UnreadableError: no kernel can compute where they begin.
    """
    found: tuple[Value, Index, int] | None = None
    while isinstance(value, Value) and math.prod(value.shape) <= _MOST_ELEMENTS:
        flat = flatten_index(place, value.shape)
        stride = flat.find_factor(along)
        if flat.find_factor(ELEMENT) == 1 and stride:
            found = value, flat.drop(along).drop(ELEMENT), stride
        maker = makers.get(value)
        moved = None if maker is None else _move_through(maker, value, place)
        if maker is None or moved is None:
            break
        value, place = maker.operands[0], moved
    if found is None:
        return None
    array, base, stride = found
    if any(not name.startswith("g") for name in list_variables(base)):
        return None
    parameter = arrays.setdefault(array, len(arrays))
    return Lines(parameter, ElementReader(makers, arrays).finish(base), stride)


def _move_through(op: Op, value: Value, place: Indices) -> Indices | None:
    """As `move_place`, also for one of the parts of an array."""
    if op.name != "split":
        return move_place(op, place) if len(op.results) == 1 else None
    axis, number = op.params["axis"], op.results.index(value)
    start = int(sum(op.params["sizes"][:number]))
    return (*place[:axis], place[axis].add(start), *place[axis + 1 :])


def _split_place(op: Op, place: Indices) -> tuple[Indices, tuple[Indices, Indices]]:
    """Returns the parts of a result's place: of the batch, and of the axes of each side."""
    batch = len(op.params["dimension_numbers"][1][0])
    own = batch + len(list_free(op, 0))
    return place[:batch], (place[batch:own], place[own:])
