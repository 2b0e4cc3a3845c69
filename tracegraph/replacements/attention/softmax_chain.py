"""Softmax chain: a matmul of shares and values → where its scores are, and what made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.replacements.indices import Index, make_variable
from tracegraph.replacements.places import Indices, fit_place, move_place

_ROUNDS = frozenset(["convert_element_type", "stop_gradient", "copy"])
TIME, ELEMENT = "t", "d"


@dataclasses.dataclass(frozen=True)
class Axes:
    """What stands for each axis of a batched matmul's operand of few rows, as indices.

    Attributes:
        batch: of the axes that both operands have.
        rows: of the rows' own axes.
        groups: sizes of the variables ``g0``, ``g1``, ...: what has keys and values of its own.
        row_sizes: sizes of the variables ``r0``, ``r1``, ...
    """

    batch: tuple[Index, ...]
    rows: tuple[Index, ...]
    groups: tuple[int, ...]
    row_sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mix:
    """A matmul of shares, which add up to one, by values.

    Attributes:
        op: the matmul.
        side: which of its operands has the shares.
        length: how many shares there are.
    """

    op: Op
    side: int
    length: int

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that both operands have."""
        batch = self.op.params["dimension_numbers"][1][self.side]
        return tuple(self.op.operands[self.side].aval.shape[axis] for axis in batch)

    @property
    def width(self) -> int:
        """Elements of a value."""
        shape = self.op.operands[1 - self.side].aval.shape
        return max(shape[axis] for axis in list_free(self.op, 1 - self.side))

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of the other axes of the shares."""
        shape = self.op.operands[self.side].aval.shape
        return tuple(shape[axis] for axis in list_free(self.op, self.side))

    def place_shares(self, axes: Axes) -> Indices:
        """Returns where a share is among the shares."""
        return place_operand(self.op, self.side, axes.batch, axes.rows, self._make_time())

    def place_values(self, axes: Axes) -> Indices:
        """Returns where an element of a value is among the values."""
        other = 1 - self.side
        shape = self.op.operands[other].aval.shape
        own = tuple(make_variable(ELEMENT, shape[axis]) for axis in list_free(self.op, other))
        return place_operand(self.op, other, axes.batch, own, self._make_time())

    def _make_time(self) -> Index:
        return make_variable(TIME, self.length)


def list_free(op: Op, side: int) -> tuple[int, ...]:
    """Returns the axes of a matmul's operand that its result has for itself."""
    contracted, batch = (each[side] for each in op.params["dimension_numbers"])
    rank = len(op.operands[side].aval.shape)
    return tuple(axis for axis in range(rank) if axis not in (*contracted, *batch))


def place_operand(
    op: Op, side: int, batch: Sequence[Index], free: Sequence[Index], contracted: Index
) -> Indices:
    """Returns where an element of a matmul's operand is, which has one contracted axis."""
    (own,), axes = op.params["dimension_numbers"][0][side], op.params["dimension_numbers"][1][side]
    places = dict(zip(axes, batch, strict=True)) | {own: contracted}
    places |= dict(zip(list_free(op, side), free, strict=True))
    return tuple(places[axis] for axis in range(len(places)))


def find_mix(op: Op, side: int) -> Mix | None:
    """Returns an op as a matmul of shares and values, if its axes are those of one."""
    if op.name != "dot_general":
        return None
    contracted = op.params["dimension_numbers"][0]
    other = 1 - side
    own = [op.operands[other].aval.shape[axis] for axis in list_free(op, other)]
    if len(contracted[side]) != 1 or sum(size > 1 for size in own) != 1:
        return None
    return Mix(op, side, op.operands[side].aval.shape[contracted[side][0]])


def make_axes(mix: Mix, shared: Mapping[int, int]) -> Axes:
    """Returns variables for the axes of a matmul.

    Args:
        mix: the matmul.
        shared: for an axis of the batch how many elements, one after the other, have the same keys
            and values: the place among those is a row.
    """
    groups: list[int] = []
    rows: list[int] = []
    batch = []
    for axis, size in enumerate(mix.batch_sizes):
        common = shared.get(axis, 1)
        groups.append(size // common)
        index = make_variable(f"g{axis}", size // common).times(common)
        if common > 1:
            index = index.add(make_variable(f"r{len(rows)}", common))
            rows.append(common)
        batch.append(index)
    free = []
    for size in mix.row_sizes:
        free.append(make_variable(f"r{len(rows)}", size))
        rows.append(size)
    return Axes(tuple(batch), tuple(free), tuple(groups), tuple(rows))


def find_scores(
    makers: Mapping[Operand, Op], shares: Operand, place: Indices
) -> tuple[Value, Indices] | None:
    """Returns the scores that shares are the softmax of, and where the one of a share is.

    Args:
        makers: the op of each value.
        shares: the operand of a matmul.
        place: of one, with the variable `TIME` along the axis that the matmul sums over.
    """
    quotient, at = _pass(makers, shares, place)
    if quotient is None or quotient.name != "div":
        return None
    exponential, place = _pass(makers, quotient.operands[0], at)
    if exponential is None or exponential.name != "exp":
        return None
    difference = makers.get(exponential.operands[0])
    if difference is None or difference.name != "sub":
        return None
    scores, largest = difference.operands
    if not isinstance(scores, Value):
        return None
    reduced = _find_reduced(makers, largest, place, "reduce_max")
    added_up = _find_reduced(makers, quotient.operands[1], at, "reduce_sum")
    is_softmax = reduced == _find_base(makers, scores, place)
    return (scores, place) if is_softmax and added_up == (exponential.results[0], place) else None


def _find_base(
    makers: Mapping[Operand, Op], value: Operand, place: Indices
) -> tuple[Operand, Indices]:
    """Returns what a value is before it is rounded, or its elements are moved, and where."""
    place = fit_place(place, value.aval.shape)
    while (op := makers.get(value)) is not None:
        moved = place if op.name in _ROUNDS else move_place(op, place)
        if moved is None:
            break
        value, place = op.operands[0], moved
    return value, place


def _pass(
    makers: Mapping[Operand, Op], value: Operand, place: Indices
) -> tuple[Op | None, Indices]:
    """Returns the first op that computes something, behind those that round or move elements."""
    value, place = _find_base(makers, value, place)
    return makers.get(value), place


def _find_reduced(
    makers: Mapping[Operand, Op], value: Operand, place: Indices, name: str
) -> tuple[Operand, Indices] | None:
    """Returns an element of what a value is the sum, or the maximum, of: the one at `TIME`.

    Args:
        makers: the op of each value.
        value: that is read.
        place: where.
        name: of the op.
    """
    op, at = _pass(makers, value, place)
    while op is not None and op.name == "max" and _is_lowest(op.operands[0]):
        op, at = _pass(makers, op.operands[1], at)
    if op is None or op.name != name or len(op.params["axes"]) != 1:
        return None
    (axis,), source = op.params["axes"], op.operands[0]
    time = make_variable(TIME, source.aval.shape[axis])
    return _find_base(makers, source, (*at[:axis], time, *at[axis:]))


def _is_lowest(operand: Operand) -> bool:
    return isinstance(operand, Literal) and float(operand.value) == float("-inf")
