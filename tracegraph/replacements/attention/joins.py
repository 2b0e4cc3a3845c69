"""Joins: gradients of queries, keys and values that a program puts side by side in one array.

That is the gradient of a matmul for all three: a concatenation, or a sum of what is padded with
zeros, as the gradient of a slice is. The kernels write into it, each its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.replacements.attention.gradients import Factor
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import Index, flatten_index, unflatten_index
from tracegraph.replacements.places import Indices

_SAME_ORDER = frozenset(["reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
_ADDITIONS = frozenset(["add", "add_any"])


@dataclasses.dataclass(frozen=True)
class Join:
    """An array that consists of the results of some matmuls.

    Attributes:
        op: that puts them side by side.
        places: of each matmul where an element of its result is in the array's memory.
    """

    op: Op
    places: tuple[Index, ...]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A result of a matmul as a part of an array.

    Attributes:
        op: that puts the parts side by side.
        value: its operand that has this part; of an addition a term of it.
        place: of an element of the matmul's result in the array.
    """

    op: Op
    value: Value
    place: Indices


def find_join(view: GraphView, factors: Sequence[Factor]) -> Join | None:
    """Returns what puts the results of matmuls side by side, if nothing else does or is read."""
    parts = [_follow(view, factor) for factor in factors]
    found = [each for each in parts if each is not None]
    ops = {id(each.op): each.op for each in found}
    if len(ops) != 1 or len(found) < len(parts):
        return None
    (op,) = ops.values()
    needed = op.operands if op.name == "concatenate" else _list_padded(view, op)
    values = [each.value for each in found]
    if len(values) != len(needed) or {*values} != {*needed}:
        return None
    shape = op.results[0].shape
    return Join(op, tuple(flatten_index(each.place, shape) for each in found))


def _list_padded(view: GraphView, op: Op) -> list[Operand]:
    """Returns what an addition adds up, where it is zero but for parts that fill an array."""
    terms = _list_terms(view, op)
    cuts: list[tuple[int, int, int]] = []
    for term in terms:
        pad = view.makers.get(term)
        if pad is None or pad.name != "pad" or not _is_zero(pad.operands[1]):
            return []
        config = enumerate(pad.params["padding_config"])
        begins = [(axis, low) for axis, (low, *rest) in config if low or any(rest)]
        cuts += [(axis, low, low + pad.operands[0].aval.shape[axis]) for axis, low in begins]
    # Each is cut along the same axis, where the one before it ends.
    axis = cuts[0][0] if cuts else 0
    ends = [0, *(end for _, _, end in sorted(cuts))]
    wanted = [(axis, end) for end in ends[:-1]]
    is_filled = ends[-1] == op.results[0].shape[axis] and len(cuts) == len(terms)
    return terms if is_filled and [cut[:2] for cut in sorted(cuts)] == wanted else []


def _list_terms(view: GraphView, op: Op) -> list[Operand]:
    """Returns what an addition adds up, through those that nothing else reads."""
    terms: list[Operand] = []
    for operand in op.operands:
        maker = view.makers.get(operand)
        is_sum = maker is not None and maker.name in _ADDITIONS
        if maker is not None and is_sum and len(view.uses.get(maker.results[0], ())) == 1:
            terms += _list_terms(view, maker)
        else:
            terms.append(operand)
    return terms


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Literal) and not np.any(operand.value)


def _follow(view: GraphView, factor: Factor) -> _Part | None:
    """Returns what joins a result, as which operand, and where an element of it is then."""
    value, place = factor.op.results[0], factor.result
    while value not in view.graph.outputs and len(view.uses.get(value, ())) == 1:
        (op,) = view.uses[value]
        if op.name == "concatenate":
            axis = op.params["dimension"]
            before = op.operands[: op.operands.index(value)]
            start = sum(other.aval.shape[axis] for other in before)
            return _Part(op, value, (*place[:axis], place[axis].add(start), *place[axis + 1 :]))
        if op.name in _ADDITIONS:
            return _Part(_climb(view, op), value, place)
        moved = _move_forward(op, place)
        if moved is None:
            return None
        value, place = op.results[0], moved
    return None


def _climb(view: GraphView, op: Op) -> Op:
    """Returns the last of additions that nothing else reads."""
    while op.results[0] not in view.graph.outputs:
        users = view.uses.get(op.results[0], ())
        if len(users) != 1 or users[0].name not in _ADDITIONS:
            break
        op = users[0]
    return op


def _move_forward(op: Op, place: Indices) -> Indices | None:
    """Returns where an element of an op's operand is in its result; None for one that computes."""
    shape = op.operands[0].aval.shape
    if op.name == "transpose":
        return tuple(place[axis] for axis in op.params["permutation"])
    if op.name == "pad":
        config = op.params["padding_config"]
        if any(min(padding) < 0 or padding[2] for padding in config):
            return None
        return tuple(index.add(low) for index, (low, _, _) in zip(place, config, strict=True))
    is_same = op.operands[0].aval.size == op.results[0].aval.size
    if op.name in _SAME_ORDER and is_same and not op.params.get("dimensions"):
        return unflatten_index(flatten_index(place, shape), op.results[0].shape)
    return None
