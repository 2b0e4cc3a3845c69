"""Joins: gradients of queries, keys and values that a program puts side by side in one array.

That is the gradient of a matmul for all three. The kernels write into it, each its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracegraph.ir.graph import Op, Value
from tracegraph.replacements.attention.gradients import Factor
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import Index, flatten_index, unflatten_index
from tracegraph.replacements.places import Place

_SAME_ORDER = frozenset(["reshape", "squeeze", "expand_dims"])


@dataclasses.dataclass(frozen=True)
class Join:
    """An array that consists of the results of some matmuls.

    Attributes:
        op: that puts them side by side.
        places: of each matmul where an element of its result is in the array's memory.
    """

    op: Op
    places: tuple[Index, ...]


def find_join(view: GraphView, factors: Sequence[Factor]) -> Join | None:
    """Returns what puts the results of matmuls side by side, if nothing else does or is read."""
    found = [_follow(view, factor) for factor in factors]
    ops = {id(each[0]): each[0] for each in found if each is not None}
    if len(ops) != 1 or any(each is None for each in found):
        return None
    (op,) = ops.values()
    operands = [each[1] for each in found if each is not None]
    if len(operands) != len(op.operands) or {*operands} != {*op.operands}:
        return None
    axis, shape = op.params["dimension"], op.results[0].shape
    places = []
    for each in found:
        if each is not None:
            _, value, place = each
            before = op.operands[: op.operands.index(value)]
            start = sum(other.aval.shape[axis] for other in before)
            moved = (*place[:axis], place[axis].add(start), *place[axis + 1 :])
            places.append(flatten_index(moved, shape))
    return Join(op, tuple(places))


def _follow(view: GraphView, factor: Factor) -> tuple[Op, Value, Place] | None:
    """Returns what joins a result, as which operand, and where an element of it is in that one."""
    value, place = factor.op.results[0], factor.result
    while value not in view.graph.outputs and len(view.uses.get(value, ())) == 1:
        (op,) = view.uses[value]
        if op.name == "concatenate":
            return op, value, place
        moved = _move_forward(op, place)
        if moved is None:
            return None
        value, place = op.results[0], moved
    return None


def _move_forward(op: Op, place: Place) -> Place | None:
    """Returns where an element of an op's operand is in its result; None for one that computes."""
    shape = op.operands[0].aval.shape
    if op.name == "transpose":
        return tuple(place[axis] for axis in op.params["permutation"])
    if op.name in _SAME_ORDER and not op.params.get("dimensions"):
        return unflatten_index(flatten_index(place, shape), op.results[0].shape)
    return None
