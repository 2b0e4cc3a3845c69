"""Ops that move, repeat and cut axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tracegraph.buckets.padded import AxisIndex, Maximum, Padded, Padding, RefusedError, forget_fill
from tracegraph.buckets.rules.context import Context, merge_axis

_KEEP_WHOLE = "keep the padded axis whole; the result's padded part is cut off after the call"


def apply_broadcast(context: Context) -> list[Padded]:
    """Maps axes; a new axis may be one that follows a size."""
    (operand,), dims = context.operands[:1], context.op.params["broadcast_dimensions"]
    shape = getattr(context.op.operands[0].aval, "shape", ())
    axes = list(context.read_result())
    for source, target in enumerate(dims):
        padding = operand.axes[source]
        if padding is not None:
            axes[target] = padding
    meaning: Any = operand.meaning
    if isinstance(meaning, AxisIndex):
        target = dims[meaning.axis]
        # One element that is repeated counts nothing.
        is_whole = shape[meaning.axis] == context.op.results[0].aval.shape[target]
        meaning = AxisIndex(target) if is_whole else None
    elif isinstance(meaning, Maximum) and not _keeps_places(meaning, dims, shape):
        meaning = None
    if operand.uniform is not None:
        axes = [each and dataclasses.replace(each, fill=operand.uniform) for each in axes]
    return [Padded(tuple(axes), operand.uniform, meaning, operand.leak)]


def _keeps_places(maximum: Maximum, dims: Sequence[int], shape: Sequence[int]) -> bool:
    """True when the axes that are left of a maximum go back to where they were in its source."""
    rank = len(getattr(maximum.source.aval, "shape", ()))
    left = [axis for axis in range(rank) if axis not in maximum.axes]
    if len(shape) == rank:
        # Its axes of extent 1 are back already.
        return list(dims) == list(range(rank))
    return list(dims) == left


def apply_reshape(context: Context) -> list[Padded]:
    """Follows a padded axis through merges and splits in which it is the outermost one."""
    op, other, operand = context.op, context.other, context.operands[0]
    if op.params.get("dimensions") is not None:
        raise _make_layout_error("reorders the elements")
    axes = list(context.read_result())
    before = op.operands[0].aval.shape, other.operands[0].aval.shape
    after = op.results[0].aval.shape, other.results[0].aval.shape
    targets = _pair_axes(operand.axes, axes, before, after)
    for source, target in targets:
        # Of the scale that the result has, filled as the operand is.
        before_it, after_it = operand.axes[source], axes[target]
        if before_it is not None and after_it is not None:
            axes[target] = dataclasses.replace(before_it, scale=after_it.scale)
    meaning: Any = operand.meaning
    if isinstance(meaning, AxisIndex):
        moved = dict(targets)
        same = moved.get(meaning.axis)
        is_alone = same is not None and before[0][meaning.axis] == after[0][same]
        meaning = AxisIndex(same) if is_alone and same is not None else None
    elif isinstance(meaning, Maximum):
        meaning = None
    return [Padded(tuple(axes), operand.uniform, meaning, operand.leak)]


def _pair_axes(sources: Any, targets: Any, before: Any, after: Any) -> list[tuple[int, int]]:
    """Returns which padded axis of the result each padded axis of the operand becomes.

    The elements behind a place that the true part fills are padding in both shapes, if the same
    number of elements lies inside of the axis, times what was merged or split off.
    """
    pairs = []
    wanted = [axis for axis, each in enumerate(targets) if each is not None]
    for source, padding in enumerate(sources):
        if padding is None:
            continue
        if not wanted:
            raise _make_layout_error(f"hides the padded axis {source}")
        target = wanted.pop(0)
        for shapes in zip(before, after, strict=True):
            span = _measure_span(shapes[0], source, padding.scale)
            if _measure_span(shapes[1], target, targets[target].scale) != span:
                raise _make_layout_error(f"mixes the padded axis {source} with one outside of it")
        if padding.size != targets[target].size:
            raise _make_layout_error(f"changes the order of the padded axis {source}")
        pairs.append((source, target))
    if wanted:
        raise _make_layout_error(f"makes the axis {wanted[0]} follow a size")
    return pairs


def _measure_span(shape: Sequence[int], axis: int, scale: int) -> tuple[int, int]:
    """Returns how many elements one step of the size spans, and how many blocks lie outside."""
    return scale * math.prod(shape[axis + 1 :]), math.prod(shape[:axis])


def _make_layout_error(what: str) -> RefusedError:
    return RefusedError(
        what,
        "true and padded elements would be mixed, so that no slice separates them",
        "reshape without the padded axis, or let it be the first of the axes that are merged",
    )


def apply_squeeze(context: Context) -> list[Padded]:
    """Drops axes of extent 1, which are never padded."""
    operand = context.operands[0]
    dropped = context.op.params["dimensions"]
    kept = [axis for axis in range(len(operand.axes)) if axis not in dropped]
    meaning: Any = operand.meaning
    if isinstance(meaning, AxisIndex):
        meaning = AxisIndex(kept.index(meaning.axis)) if meaning.axis in kept else None
    elif isinstance(meaning, Maximum):
        meaning = None
    axes = tuple(operand.axes[axis] for axis in kept)
    return [Padded(axes, operand.uniform, meaning, operand.leak)]


def apply_transpose(context: Context) -> list[Padded]:
    """Reorders axes."""
    operand, order = context.operands[0], context.op.params["permutation"]
    meaning: Any = operand.meaning
    if isinstance(meaning, AxisIndex):
        meaning = AxisIndex(order.index(meaning.axis))
    elif isinstance(meaning, Maximum):
        meaning = None
    axes = tuple(operand.axes[axis] for axis in order)
    return [Padded(axes, operand.uniform, meaning, operand.leak)]


def apply_iota(context: Context) -> list[Padded]:
    """Counts along an axis."""
    return context.make_result(meaning=AxisIndex(context.op.params["dimension"]))


def apply_slice(context: Context) -> list[Padded]:
    """Takes padded axes whole, or their first element, which every call has."""
    op, operand = context.op, context.operands[0]
    starts, limits = op.params["start_indices"], op.params["limit_indices"]
    strides = op.params["strides"] or (1,) * len(starts)
    axes: list[Padding | None] = []
    for axis, padding in enumerate(operand.axes):
        extent = op.operands[0].aval.shape[axis]
        cut = (starts[axis], limits[axis], strides[axis])
        theirs = tuple(context.other.params[n][axis] for n in ("start_indices", "limit_indices"))
        if padding is None:
            axes.append(_read_fixed_cut(context, axis, cut, theirs))
        elif cut == (0, extent, 1):
            axes.append(padding)
        elif cut == (0, 1, 1) and context.other.params["limit_indices"][axis] == 1:
            axes.append(None)
        else:
            raise RefusedError(
                f"takes [{cut[0]}:{cut[1]}] of the padded axis {axis}",
                "it depends on the true size of a call whether those elements are padding",
                "take the element outside of the captured function, or sum over a mask that is "
                "true where the index is tg.bucket_size() - 1",
            )
    return [Padded(tuple(axes), operand.uniform, None, operand.leak)]


def _read_fixed_cut(
    context: Context, axis: int, cut: tuple[int, int, int], theirs: tuple[int, int]
) -> Padding | None:
    """Returns the padding of what is cut of a fixed axis, as of ``table[: x.shape[0]]``."""
    if cut[:2] == theirs:
        return None
    if (cut[0], theirs[0], cut[2]) == (0, 0, 1):
        # The first elements: those of a smaller size come first in those of a larger one.
        return context.read_result()[axis]
    raise RefusedError(
        f"takes [{cut[0]}:{cut[1]}] of axis {axis}, which follows from a bucket's size",
        "a replay would take what belongs to the size of the bucket, not of the argument",
        "use jax.lax.dynamic_slice at tg.bucket_size(), which is the argument's own size",
    )


def apply_split(context: Context) -> list[Padded]:
    """Cuts along a fixed axis."""
    operand, axis = context.operands[0], context.op.params["axis"]
    if operand.axes[axis] is not None:
        raise RefusedError(
            f"splits the padded axis {axis}",
            "it depends on the true size of a call which parts are padding",
            _KEEP_WHOLE,
        )
    return [Padded(operand.axes, operand.uniform, None, operand.leak) for _ in context.op.results]


def apply_concatenate(context: Context) -> list[Padded]:
    """Joins along a fixed axis."""
    axis = context.op.params["dimension"]
    if any(each.axes[axis] is not None for each in context.operands):
        raise RefusedError(
            f"joins arrays along the padded axis {axis}",
            "the true part of the second array would lie behind the padding of the first",
            "join along another axis, or outside of the captured function",
        )
    return [Padded(_merge(context.operands, axis), leak=context.leak)]


def _merge(operands: Sequence[Padded], joined: int) -> tuple[Padding | None, ...]:
    axes = []
    for axis in range(len(operands[0].axes)):
        padding = merge_axis([each.axes[axis] for each in operands], axis)
        fills = {str(each.find_fill(axis)) for each in operands}
        if padding is not None and axis != joined and len(fills) == 1:
            padding = dataclasses.replace(padding, fill=operands[0].find_fill(axis))
        axes.append(padding)
    return tuple(axes)


def apply_unstack(context: Context) -> list[Padded]:
    """Takes an axis apart; it is a fixed one, or there would be other results for other sizes."""
    operand, axis = context.operands[0], context.op.params["axis"]
    axes = operand.axes[:axis] + operand.axes[axis + 1 :]
    return [Padded(axes, operand.uniform, None, operand.leak) for _ in context.op.results]


def apply_stack(context: Context) -> list[Padded]:
    """Joins along a new axis."""
    # No axis of the operands is joined.
    axes = list(_merge(context.operands, joined=-1))
    axes.insert(context.op.params["axis"], None)
    return [Padded(tuple(axes), leak=context.leak)]


def apply_tile(context: Context) -> list[Padded]:
    """Repeats fixed axes only."""
    operand, repeats = context.operands[0], context.op.params["reps"]
    for axis, padding in enumerate(operand.axes):
        if padding is not None and repeats[axis] != 1:
            raise RefusedError(
                f"repeats the padded axis {axis}",
                "the second copy would lie behind the padding of the first",
                "repeat along another axis, or outside of the captured function",
            )
    return [Padded(operand.axes, operand.uniform, None, operand.leak)]


def apply_barrier(context: Context) -> list[Padded]:
    """Returns what it takes."""
    return list(context.operands)


def apply_bitcast(context: Context) -> list[Padded]:
    """Reads bits as another type."""
    (operand,), rank = context.operands, len(context.op.results[0].aval.shape)
    # A narrower type adds a last axis, a wider one takes it away: its extent is the ratio of both.
    axes = [*map(forget_fill, operand.axes), None][:rank]
    return [Padded(tuple(axes), leak=operand.leak)]


def apply_pad(context: Context) -> list[Padded]:
    """Pads fixed axes only."""
    operand, config = context.operands[0], context.op.params["padding_config"]
    for axis, padding in enumerate(operand.axes):
        if padding is not None and tuple(config[axis]) != (0, 0, 0):
            raise RefusedError(
                f"adds elements to the padded axis {axis}",
                "they would lie behind the padding of a bucket",
                "pad outside of the captured function",
            )
    return [Padded(tuple(map(forget_fill, operand.axes)), leak=context.leak)]


def apply_reverse(context: Context) -> list[Padded]:
    """Turns fixed axes only."""
    operand = context.operands[0]
    for axis in context.op.params["dimensions"]:
        if operand.axes[axis] is not None:
            raise RefusedError(
                f"reverses the padded axis {axis}",
                "the padding would come first, and a result is cut at its end",
                "reverse outside of the captured function",
            )
    return [Padded(operand.axes, operand.uniform, None, operand.leak)]


RULES = {
    "broadcast_in_dim": apply_broadcast,
    "reshape": apply_reshape,
    "squeeze": apply_squeeze,
    "transpose": apply_transpose,
    "iota": apply_iota,
    "slice": apply_slice,
    "split": apply_split,
    "concatenate": apply_concatenate,
    "unstack": apply_unstack,
    "stack": apply_stack,
    "tile": apply_tile,
    "optimization_barrier": apply_barrier,
    "bitcast_convert_type": apply_bitcast,
    "pad": apply_pad,
    "rev": apply_reverse,
}
