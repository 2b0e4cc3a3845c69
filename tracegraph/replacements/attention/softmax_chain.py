"""Softmax chain: a matmul of shares and values → where its scores are, and what made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.replacements.indices import Index, make_variable
from tracegraph.replacements.places import Place, fit_place, move_place

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
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of the other axes of the shares."""
        shape = self.op.operands[self.side].aval.shape
        return tuple(shape[axis] for axis in list_free(self.op, self.side))

    def place_shares(self, axes: Axes) -> Place:
        """Returns where a share is among the shares."""
        return place_operand(self.op, self.side, axes.batch, axes.rows, self._make_time())

    def place_values(self, axes: Axes) -> Place:
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
) -> Place:
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
    makers: Mapping[Operand, Op], shares: Operand, place: Place
) -> tuple[Value, Place] | None:
    """Returns the scores that shares are the softmax of, and where the one of a share is.

    Args:
        makers: the op of each value.
        shares: the operand of a matmul.
        place: of one, with the variable `TIME` along the axis that the matmul sums over.
    """
    quotient, place = _pass(makers, shares, place)
    if quotient is None or quotient.name != "div":
        return None
    total, numbers = quotient.operands[1], _find_exponential(makers, quotient.operands[0], place)
    if numbers is None:
        return None
    exponential, place = numbers
    difference = makers.get(exponential.operands[0])
    if difference is None or difference.name != "sub":
        return None
    scores, largest = difference.operands
    if not isinstance(scores, Value):
        return None
    is_largest = _is_reduced(makers, largest, place, "reduce_max", scores)
    is_sum = _is_reduced(makers, total, place, "reduce_sum", exponential.results[0])
    return (scores, place) if is_largest and is_sum else None


def _pass(makers: Mapping[Operand, Op], value: Operand, place: Place) -> tuple[Op | None, Place]:
    """Returns the first op that computes something, behind those that round or move elements."""
    place = fit_place(place, value.aval.shape)
    while (op := makers.get(value)) is not None:
        moved = place if op.name in _ROUNDS else move_place(op, place)
        if moved is None:
            return op, place
        value, place = op.operands[0], moved
    return None, place


def _find_exponential(
    makers: Mapping[Operand, Op], value: Operand, place: Place
) -> tuple[Op, Place] | None:
    op, place = _pass(makers, value, place)
    return (op, place) if op is not None and op.name == "exp" else None


def _is_reduced(
    makers: Mapping[Operand, Op], value: Operand, place: Place, name: str, wanted: Value
) -> bool:
    """True for the sum, or the maximum, of wanted values along the time of a place."""
    time = [axis for axis, index in enumerate(place) if index.find_factor(TIME) != 0]
    op, at = _pass(makers, value, place)
    while op is not None and op.name == "max" and _is_lowest(op.operands[0]):
        op, at = _pass(makers, op.operands[1], at)
    if op is None or op.name != name or tuple(op.params["axes"]) != tuple(time):
        return False
    if at != tuple(index for axis, index in enumerate(place) if axis not in time):
        return False
    # What is added up may be converted first; it stays where it is.
    source: Operand = op.operands[0]
    while source is not wanted and (maker := makers.get(source)) is not None:
        if maker.name not in _ROUNDS:
            return False
        source = maker.operands[0]
    return source is wanted


def _is_lowest(operand: Operand) -> bool:
    return isinstance(operand, Literal) and float(operand.value) == float("-inf")
