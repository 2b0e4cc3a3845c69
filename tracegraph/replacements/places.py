"""Places: where an element of an op's result is in its operand, if the op only moves elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tracegraph.ir.graph import Op
from tracegraph.replacements.indices import Index, flatten_index, unflatten_index

# An index for each axis.
Indices: TypeAlias = tuple[Index, ...]
_SAME_ELEMENTS = frozenset(["squeeze", "expand_dims"])
_SAME_PLACES = frozenset(["stop_gradient", "copy"])


def fit_place(place: Indices, shape: Sequence[int]) -> Indices:
    """Returns where an element is in an operand whose axes of size one are repeated.

    Args:
        place: in the result of an element-wise op.
        shape: of the operand, of as many axes, or none.
    """
    if not shape:
        return ()
    return tuple(each if size > 1 else Index() for each, size in zip(place, shape, strict=True))


def move_place(op: Op, place: Indices) -> Indices | None:
    """Returns where an element of an op's result is in its operand; None for one that computes.

    Args:
        op: with one result.
        place: of an element of it.
    """
    shape = tuple(op.operands[0].aval.shape) if op.operands else ()
    if op.name in _SAME_PLACES:
        return place
    if op.name in _SAME_ELEMENTS:
        return unflatten_index(flatten_index(place, op.results[0].shape), shape)
    if op.name == "reshape":
        # One may transpose first, as in the order of Fortran.
        axes = op.params["dimensions"] or tuple(range(len(shape)))
        flat = flatten_index(place, op.results[0].shape)
        moved = unflatten_index(flat, tuple(shape[axis] for axis in axes))
        places = dict(zip(axes, moved, strict=True))
        return tuple(places[axis] for axis in range(len(shape)))
    if op.name == "broadcast_in_dim":
        axes = zip(op.params["broadcast_dimensions"], shape, strict=True)
        return tuple(place[axis] if size > 1 else Index() for axis, size in axes)
    if op.name == "transpose":
        places = dict(zip(op.params["permutation"], place, strict=True))
        return tuple(places[axis] for axis in range(len(shape)))
    if op.name == "slice":
        strides = op.params["strides"] or (1,) * len(shape)
        parts = zip(place, op.params["start_indices"], strides, strict=True)
        return tuple(each.times(stride).add(start) for each, start, stride in parts)
    if op.name == "rev":
        axes = set(op.params["dimensions"])
        return tuple(
            each.times(-1).add(size - 1) if axis in axes else each
            for axis, (each, size) in enumerate(zip(place, shape, strict=True))
        )
    return None
