"""Ops that combine the elements of an axis: what is padded must be masked to a neutral element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracegraph.buckets.padded import (
    Maximum,
    Padded,
    Padding,
    RefusedError,
    as_scalar,
    forget_fill,
)
from tracegraph.buckets.rules.context import Context, merge_axis

_WHY = "a replay would compute with what the bucket was padded with"
_WORDS = {
    "reduce_sum": "sums",
    "reduce_prod": "multiplies",
    "reduce_max": "takes the maximum",
    "reduce_min": "takes the minimum",
    "reduce_and": "takes the conjunction",
    "reduce_or": "takes the disjunction",
    "reduce_xor": "combines",
    "argmax": "looks for the maximum",
    "argmin": "looks for the minimum",
}


def find_neutral(name: str, dtype: Any) -> np.generic | None:
    """Returns the element that changes no result of a reduction."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        values = {"reduce_and": True, "reduce_or": False, "reduce_xor": False}
        values |= {"reduce_max": False, "reduce_min": True, "argmax": False, "argmin": True}
    elif dtype.kind in "ui":
        limits = np.iinfo(dtype)
        values = {"reduce_max": limits.min, "reduce_min": limits.max}
        values |= {"argmax": limits.min, "argmin": limits.max, "reduce_sum": 0, "reduce_prod": 1}
        values |= {"reduce_or": 0, "reduce_xor": 0, "reduce_and": limits.max}
        if dtype.kind == "i":
            values["reduce_and"] = -1
    else:
        values = {"reduce_sum": 0, "reduce_prod": 1}
        values |= {"reduce_max": -math.inf, "reduce_min": math.inf}
        values |= {"argmax": -math.inf, "argmin": math.inf}
    return None if name not in values else as_scalar(values[name], dtype)


def apply_reduce(context: Context) -> list[Padded]:
    """Reduces fixed axes, and padded ones that are masked."""
    op, operand = context.op, context.operands[0]
    axes = tuple(op.params["axes"])
    dtype = op.operands[0].aval.dtype
    neutral = find_neutral(op.name, dtype)
    for axis in axes:
        if operand.axes[axis] is None:
            continue
        fill = operand.find_fill(axis)
        if fill is None and op.name == "reduce_sum":
            fill = operand.find_relative_fill(axis)
        _check_neutral(context, f"{_WORDS[op.name]} over", axis, fill, neutral)
    kept = [
        _keep_fill(each, neutral if op.name.startswith("reduce_") else None)
        for axis, each in enumerate(operand.axes)
        if axis not in axes
    ]
    meaning = Maximum(op.operands[0], axes) if op.name == "reduce_max" else None
    return [Padded(tuple(kept), None, meaning, operand.leak)]


def _keep_fill(padding: Padding | None, neutral: np.generic | None) -> Padding | None:
    """Returns an axis that is not reduced: where all is neutral, so is the result."""
    if padding is None or padding.may_be_nan or not _is_equal(padding.fill, neutral):
        return forget_fill(padding)
    return padding


def _check_neutral(
    context: Context, what: str, axis: int, fill: np.generic | None, neutral: np.generic | None
) -> None:
    if not _is_equal(fill, neutral):
        raise make_mask_error(context, what, axis, fill, neutral)


def make_mask_error(
    context: Context,
    what: str,
    axis: int,
    fill: np.generic | None,
    neutral: np.generic | None,
) -> RefusedError:
    """Returns the error of a padded axis that is combined without a mask, or with a wrong one."""
    if neutral is None:
        fix = "compute this outside of the captured function"
    else:
        fix = (
            "mask it before: jnp.where(jnp.arange(x.shape[axis]) < tg.bucket_size(), x, "
            f"{_print_neutral(neutral)})"
        )
    if fill is not None:
        return RefusedError(
            f"{what} the padded axis {axis}, which is masked to {fill}", _WHY, fix, context.op
        )
    return RefusedError(f"{what} the padded axis {axis}", _WHY, fix, context.leak)


def _print_neutral(neutral: np.generic) -> str:
    if np.dtype(neutral.dtype).kind not in "bui":
        value = float(neutral)  # type: ignore[arg-type]
        return {math.inf: "jnp.inf", -math.inf: "-jnp.inf"}.get(value, f"{value:g}")
    return str(neutral)


def _is_equal(fill: Any, neutral: Any) -> bool:
    return fill is not None and neutral is not None and bool(fill == neutral)


def apply_cumulative(context: Context) -> list[Padded]:
    """Runs along an axis from its start, where the true part comes first."""
    op, operand, axis = context.op, context.operands[0], context.op.params["axis"]
    if operand.axes[axis] is not None and op.params["reverse"]:
        fill = operand.find_fill(axis)
        neutral = find_neutral(_CUMULATIVE[op.name], op.operands[0].aval.dtype)
        _check_neutral(context, "accumulates from the end of", axis, fill, neutral)
    return [Padded(tuple(map(forget_fill, operand.axes)), leak=context.leak)]


_CUMULATIVE = {
    "cumsum": "reduce_sum",
    "cumprod": "reduce_prod",
    "cummax": "reduce_max",
    "cummin": "reduce_min",
    "cumlogsumexp": "reduce_max",
}


def apply_sort(context: Context) -> list[Padded]:
    """Sorts along fixed axes."""
    axis = context.op.params["dimension"]
    if any(each.axes[axis] is not None for each in context.operands):
        raise make_mask_error(context, "sorts along", axis, None, None)
    return _unfill_all(context)


def apply_top_k(context: Context) -> list[Padded]:
    """Finds the largest along a fixed axis."""
    operand = context.operands[0]
    axis = context.op.params.get("axis", -1) % len(operand.axes)
    if operand.axes[axis] is not None:
        raise make_mask_error(context, "looks for the largest along", axis, None, None)
    return _unfill_all(context)


def _unfill_all(context: Context) -> list[Padded]:
    axes = [
        merge_axis([each.axes[axis] for each in context.operands], axis)
        for axis in range(len(context.operands[0].axes))
    ]
    return [Padded(tuple(axes), leak=context.leak) for _ in context.op.results]


def apply_dot(context: Context) -> list[Padded]:
    """Contracts fixed axes, and padded ones that are masked to 0 in both operands."""
    op, (left, right) = context.op, context.operands[:2]
    (left_sums, right_sums), (left_batch, right_batch) = op.params["dimension_numbers"]
    for first, second in zip(left_sums, right_sums, strict=True):
        _check_contraction(context, first, second)
    axes = [
        merge_axis([left.axes[first], right.axes[second]], first)
        for first, second in zip(left_batch, right_batch, strict=True)
    ]
    axes += _list_free(left.axes, left_sums, left_batch)
    axes += _list_free(right.axes, right_sums, right_batch)
    return [Padded(tuple(axes), leak=context.leak)]


def _check_contraction(context: Context, first: int, second: int) -> None:
    left, right = context.operands[:2]
    padding = merge_axis([left.axes[first], right.axes[second]], first)
    if padding is None:
        return
    zero = as_scalar(0, context.op.results[0].aval.dtype)
    is_integer = np.dtype(context.op.operands[0].aval.dtype).kind in "bui"
    zeros = [_is_equal(each, zero) for each in (left.find_fill(first), right.find_fill(second))]
    # 0 times NaN is NaN: of floats both must be masked.
    if all(zeros) or (any(zeros) and is_integer):
        return
    error = make_mask_error(context, "contracts", first, None, zero)
    if any(zeros):
        error = RefusedError(
            f"contracts the padded axis {first}, which is masked to 0 in one operand only",
            "0 times what the bucket was padded with may be NaN",
            error.fix.replace("mask it", "mask the other operand, too,"),
            context.op,
        )
    raise error


def _list_free(
    axes: Sequence[Padding | None], sums: Sequence[int], batch: Sequence[int]
) -> list[Padding | None]:
    taken = {*sums, *batch}
    return [forget_fill(each) for axis, each in enumerate(axes) if axis not in taken]


def apply_convolution(context: Context) -> list[Padded]:
    """Takes a padded batch only."""
    op, (images, weights) = context.op, context.operands[:2]
    numbers = op.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    axis = next((a for a, each in enumerate(images.axes) if each and a != batch), None)
    if axis is not None or weights.is_padded:
        raise RefusedError(
            "convolves over a padded axis",
            "each element of the result is computed from its neighbours, and some are padding",
            "give buckets to the batch axis only",
        )
    if op.params["batch_group_count"] != 1:
        raise RefusedError(
            "convolves groups of the padded batch",
            "it depends on the true size which groups are padding",
            "compute this outside of the captured function",
        )
    axes: list[Padding | None] = [None] * len(images.axes)
    axes[numbers.out_spec[0]] = forget_fill(images.axes[batch])
    return [Padded(tuple(axes), leak=context.leak)]


def apply_window(context: Context) -> list[Padded]:
    """Moves a window along fixed axes only."""
    operand, params = context.operands[0], context.op.params
    for axis, padding in enumerate(operand.axes):
        still = (
            params["window_dimensions"][axis] == 1
            and params["window_strides"][axis] == 1
            and tuple(params["padding"][axis]) == (0, 0)
        )
        if padding is not None and not still:
            raise RefusedError(
                f"moves a window along the padded axis {axis}",
                "each element of the result is computed from its neighbours, and some are padding",
                "give buckets to the batch axis only",
            )
    axes = tuple(map(forget_fill, operand.axes))
    return [Padded(axes, leak=context.leak)]


def apply_matrices(context: Context) -> list[Padded]:
    """Takes batches of matrices, each by itself."""
    for operand in context.operands:
        if any(each is not None for each in operand.axes[-2:]):
            raise RefusedError(
                "takes matrices with a padded axis",
                "the padding would be a part of the matrix",
                "give buckets to the batch axes only",
            )
    rank = max(len(each.axes) for each in context.operands)
    batch = [
        merge_axis([each.axes[axis] for each in context.operands if len(each.axes) == rank], axis)
        for axis in range(rank - 2)
    ]
    results = []
    for value in context.op.results:
        missing = len(value.aval.shape) - len(batch)
        results.append(Padded((*batch, *[None] * missing), leak=context.leak))
    return results


RULES = {
    **dict.fromkeys(_WORDS, apply_reduce),
    **dict.fromkeys(_CUMULATIVE, apply_cumulative),
    **dict.fromkeys(["cholesky", "triangular_solve", "lu", "eigh", "qr", "svd"], apply_matrices),
    **dict.fromkeys(
        ["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"],
        apply_window,
    ),
    "sort": apply_sort,
    "top_k": apply_top_k,
    "dot_general": apply_dot,
    "conv_general_dilated": apply_convolution,
}
