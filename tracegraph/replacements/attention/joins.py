"""Joins: gradients of queries, keys and values that a program puts side by side in one array.

That is the gradient of a matmul for all three: a concatenation, or a sum of what is padded with
zeros, as the gradient of a slice is. The kernels write into it, each its part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.replacements.attention.gradients import Factor
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import Index, flatten_index, unflatten_index
from tracegraph.replacements.places import Place

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
        place: of an element of the matmul's result in that operand.
    """

    op: Op
    value: Value
    place: Place


def find_join(view: GraphView, factors: Sequence[Factor]) -> Join | None:
    """Returns what puts the results of matmuls side by side, if nothing else does or is read."""
    parts = [_follow(view, factor) for factor in factors]
    found = [each for each in parts if each is not None]
    ops = {id(each.op): each.op for each in found}
    if len(ops) != 1 or len(found) < len(parts):
        return None
    (op,) = ops.values()
    values = [each.value for each in found]
    starts = _find_starts(view, op)
    if len(values) != len(starts) or {*values} != {*starts}:
        return None
    shape = op.results[0].shape
    moved = [
        tuple(index.add(start) for index, start in zip(each.place, starts[each.value], strict=True))
        for each in found
    ]
    return Join(op, tuple(flatten_index(place, shape) for place in moved))


def _find_starts(view: GraphView, op: Op) -> dict[Operand, tuple[int, ...]]:
    """Returns where each part that an op puts side by side begins; nothing if it does otherwise."""
    if op.name != "concatenate":
        return _find_padded(view, op)
    axis, rank = op.params["dimension"], len(op.results[0].shape)
    sizes = [each.aval.shape[axis] for each in op.operands]
    begins = itertools.accumulate(sizes, initial=0)
    starts = [tuple(begin * (each == axis) for each in range(rank)) for begin in begins]
    return dict(zip(op.operands, starts, strict=False))


def _find_padded(view: GraphView, op: Op) -> dict[Operand, tuple[int, ...]]:
    """Returns the same of a sum of arrays that are zero but for a part of each."""
    starts: dict[Operand, tuple[int, ...]] = {}
    cuts: list[tuple[int, int, int]] = []
    for term in _list_terms(view, op):
        pad = view.makers.get(term)
        axes = [] if pad is None or pad.name != "pad" else _list_padded(pad)
        if pad is None or len(axes) != 1 or not _is_zero(pad.operands[1]):
            return {}
        (axis,) = axes
        begin, size = pad.params["padding_config"][axis][0], pad.operands[0].aval.shape[axis]
        cuts.append((begin, begin + size, axis))
        # The place of an element counts the zeros in front of it already.
        starts[term] = (0,) * len(op.results[0].shape)
    ends = [0, *(end for _, end, _ in sorted(cuts))]
    is_tiled = [begin for begin, _, _ in sorted(cuts)] == ends[:-1]
    axes = {axis for _, _, axis in cuts}
    if len(axes) != 1 or not is_tiled or ends[-1] != op.results[0].shape[axes.pop()]:
        return {}
    return starts


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


def _list_padded(pad: Op) -> list[int]:
    config = enumerate(pad.params["padding_config"])
    return [axis for axis, padding in config if any(padding)]


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Literal) and not np.any(operand.value)


def _follow(view: GraphView, factor: Factor) -> _Part | None:
    """Returns what joins a result, as which operand, and where an element of it is in that one."""
    value, place = factor.op.results[0], factor.result
    while value not in view.graph.outputs and len(view.uses.get(value, ())) == 1:
        (op,) = view.uses[value]
        if op.name == "concatenate":
            return _Part(op, value, place)
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


def _move_forward(op: Op, place: Place) -> Place | None:
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
