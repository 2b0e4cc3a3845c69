"""Ops that read or write elements at places that are data."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracegraph.buckets.padded import Padded, Padding, RefusedError, forget_fill
from tracegraph.buckets.rules.context import Context, merge_axis

_INDEX_WHY = "nothing keeps such an index out of the padding"
_INDEX_FIX = "index outside of the captured function, or select with a mask and sum"


def apply_dynamic_slice(context: Context) -> list[Padded]:
    """Takes padded axes whole."""
    op, operand = context.op, context.operands[0]
    _check_whole(op.operands[0].aval.shape, op.params["slice_sizes"], operand, "reads")
    _check_indices(context.operands[1:])
    return [Padded(tuple(map(forget_fill, operand.axes)), leak=context.leak)]


def apply_dynamic_update_slice(context: Context) -> list[Padded]:
    """Writes whole padded axes, of an array that is padded alike."""
    op, (operand, update) = context.op, context.operands[:2]
    _check_whole(op.operands[0].aval.shape, op.operands[1].aval.shape, operand, "writes")
    axes = []
    for axis, pair in enumerate(zip(operand.axes, update.axes, strict=True)):
        if pair[0] is None and pair[1] is not None:
            raise RefusedError(
                f"writes an array with a padded axis {axis} into one without",
                "the padding would be written, too",
                "give the array that is written to the same buckets on that axis",
            )
        axes.append(merge_axis(pair, axis))
    return [Padded(tuple(axes), leak=context.leak)]


def _check_whole(shape: Any, sizes: Any, operand: Padded, verb: str) -> None:
    for axis, padding in enumerate(operand.axes):
        if padding is not None and shape[axis] != sizes[axis]:
            raise RefusedError(
                f"{verb} a part of the padded axis {axis} at an index that is data",
                _INDEX_WHY,
                _INDEX_FIX,
            )


def _check_indices(indices: Any) -> None:
    if any(each.is_padded for each in indices):
        raise RefusedError("takes a padded array for the place of a slice", _INDEX_WHY, _INDEX_FIX)


def apply_gather(context: Context) -> list[Padded]:
    """Reads from an array of fixed extents at padded indices, or whole padded axes."""
    op, (operand, indices) = context.op, context.operands[:2]
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    shape = op.operands[0].aval.shape
    batching = tuple(numbers.operand_batching_dims)
    for axis, padding in enumerate(operand.axes):
        if padding is not None and axis not in batching and sizes[axis] != shape[axis]:
            raise RefusedError(
                f"reads the padded axis {axis} at indices that are data", _INDEX_WHY, _INDEX_FIX
            )
    dropped = {*numbers.collapsed_slice_dims, *batching}
    windows = [forget_fill(p) for axis, p in enumerate(operand.axes) if axis not in dropped]
    places = list(indices.axes[:-1])
    for mine, theirs in zip(batching, numbers.start_indices_batching_dims, strict=True):
        places[theirs] = merge_axis([operand.axes[mine], places[theirs]], theirs)
    if indices.axes[-1] is not None:
        raise RefusedError("takes indices with a padded last axis", _INDEX_WHY, _INDEX_FIX)
    axes: list[Padding | None] = []
    for axis in range(len(op.results[0].aval.shape)):
        source = windows if axis in numbers.offset_dims else places
        axes.append(forget_fill(source.pop(0)))
    return [Padded(tuple(axes), leak=context.leak)]


def apply_scatter(context: Context) -> list[Padded]:
    """Writes padded updates only where a mask has put them out of bounds, or made them 0."""
    op, (operand, indices, updates) = context.op, context.operands[:3]
    numbers = op.params["dimension_numbers"]
    for axis in numbers.scatter_dims_to_operand_dims:
        if operand.axes[axis] is not None:
            raise RefusedError(
                f"writes into the padded axis {axis} at indices that are data",
                _INDEX_WHY,
                _INDEX_FIX,
            )
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    axes = list(operand.axes)
    for mine, theirs in batching.items():
        axes[mine] = merge_axis([axes[mine], indices.axes[theirs]], mine)
    dropped = {*numbers.inserted_window_dims, *batching}
    windows = [axis for axis in range(len(axes)) if axis not in dropped]
    for target, source in zip(windows, numbers.update_window_dims, strict=True):
        axes[target] = merge_axis([axes[target], updates.axes[source]], target)
    _check_written(context, set(batching.values()))
    return [Padded(tuple(map(forget_fill, axes)), leak=context.leak)]


def _check_written(context: Context, batching: set[int]) -> None:
    """Holds a scatter to what padded indices may do."""
    op, (_, indices, updates) = context.op, context.operands[:3]
    numbers = op.params["dimension_numbers"]
    places = [a for a in range(len(updates.axes)) if a not in numbers.update_window_dims]
    for axis, padding in enumerate(indices.axes[:-1]):
        if axis in batching:
            continue
        update = updates.axes[places[axis]]
        if padding is None and update is None:
            continue
        # At any place: so XLA must not be told that the places are in order or differ.
        is_free = not op.params["indices_are_sorted"] and not op.params["unique_indices"]
        added = updates.find_fill(places[axis])
        is_zero = added is not None and added == 0
        if op.name in ("scatter-add", "scatter_add") and is_zero and is_free:
            continue
        if _is_dropped(context, indices.find_fill(axis)):
            continue
        raise RefusedError(
            f"writes at indices whose axis {axis} is padded",
            "the padding would be written into the result",
            "mask the indices to one out of bounds, as jnp.where(mask, i, a.shape[0]), and write "
            'with mode="drop"',
            context.leak,
        )


def _is_dropped(context: Context, fill: np.generic | None) -> bool:
    op = context.op
    if fill is None or "FILL_OR_DROP" not in str(op.params["mode"]):
        return False
    shape = op.operands[0].aval.shape
    dims = op.params["dimension_numbers"].scatter_dims_to_operand_dims
    # One index out of bounds drops the update; all have this value.
    is_behind = any(int(fill) >= shape[axis] for axis in dims)
    # In front of the others it would not be in order.
    return is_behind or (int(fill) < 0 and not op.params["indices_are_sorted"])


RULES = {
    "dynamic_slice": apply_dynamic_slice,
    "dynamic_update_slice": apply_dynamic_update_slice,
    "gather": apply_gather,
    **dict.fromkeys(
        [
            "scatter",
            "scatter-add",
            "scatter_add",
            "scatter_mul",
            "scatter_min",
            "scatter_max",
            "scatter-mul",
            "scatter-min",
            "scatter-max",
        ],
        apply_scatter,
    ),
}
