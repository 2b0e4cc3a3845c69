"""Ops that compute each element from the elements at its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.buckets.padded import AxisIndex, Maximum, Padded, Padding, TrueSize, as_scalar
from tracegraph.buckets.rules.context import Context, merge_axis
from tracegraph.ir.graph import Op

_WORDS = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh device_put digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
    polynomial population_count pow real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta clz bessel_i0e bessel_i1e
"""
NAMES = frozenset(_WORDS.split())

# Those whose result on scalars is exact where a mask can need it: on 0, 1, infinities, integers.
_EVALUATED: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "div": lambda x, y: np.true_divide(x, y) if _is_float(x) else None,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}
_IDENTITIES = frozenset(["convert_element_type", "copy", "copy_p", "stop_gradient"])
_COMPARED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
# By comparison of an index with the true size plus an offset: the result in the padded part, and
# the largest offset for which all of it is the same.
_BEHIND = {
    "lt": (np.False_, 0),
    "le": (np.False_, -1),
    "eq": (np.False_, -1),
    "ge": (np.True_, 0),
    "gt": (np.True_, -1),
    "ne": (np.True_, -1),
}


def apply_elementwise(context: Context) -> list[Padded]:
    """Keeps the padding; the padded part is known where it follows from the operands'."""
    op, operands = context.op, context.operands
    rank = len(op.results[0].aval.shape)
    full = [each for each in operands if len(each.axes) == rank]
    axes: list[Padding | None] = []
    for axis in range(rank):
        padding = merge_axis([each.axes[axis] for each in full], axis)
        if padding is not None:
            fill = _find_fill(context, axis, padding)
            relative = _find_relative_fill(context, axis) if fill is None else None
            is_relative = relative is not None
            fill = relative if is_relative else fill
            padding = dataclasses.replace(padding, fill=fill, may_be_nan=is_relative)
        axes.append(padding)
    uniform = None
    if all(each.uniform is not None for each in operands):
        uniform = _evaluate(op, [each.uniform for each in operands])
    return [Padded(tuple(axes), uniform, _find_meaning(context), _find_leak(context, axes))]


def _find_fill(context: Context, axis: int, padding: Padding) -> np.generic | None:
    """Returns what an op makes of the padded elements of its operands."""
    op, operands = context.op, context.operands
    fills = [each.find_fill(axis) for each in operands]
    if op.name == "select_n":
        cases = fills[1:] if fills[0] is None else [fills[1 + int(fills[0])]]
        is_one = all(fill is not None and fill == cases[0] for fill in cases)
        return cases[0] if is_one else None
    if all(fill is not None for fill in fills):
        return _evaluate(op, fills)
    if op.name in ("and", "or", "mul"):
        return _find_absorbing(op.name, op.results[0].aval.dtype, fills)
    return _compare_index(context, axis, padding)


def _find_relative_fill(context: Context, axis: int) -> np.generic | None:
    """Returns the fill of a softmax before its sum, see `Padding.may_be_nan`.

    ``x - max(x)``, with x filled with minus infinity, is minus infinity or NaN in the padded part,
    and NaN only where it is NaN in all of the true part. No op but an exponential keeps that.
    """
    op, operand = context.op, context.operands[0]
    if op.name == "sub" and _is_less_its_maximum(context, axis, operand.find_fill(axis)):
        return operand.find_fill(axis)
    relative = operand.find_relative_fill(axis)
    if relative is None or op.name not in ("exp", "exp2", *_IDENTITIES):
        return None
    if op.name == "convert_element_type" and not _is_float(op.results[0].aval):
        # An integer made of NaN is any.
        return None
    return _evaluate(op, [relative])


def _find_absorbing(name: str, dtype: Any, fills: list[Any]) -> Any:
    """Returns the result that one operand alone decides; of floats none does, for 0 times NaN."""
    kind = np.dtype(dtype).kind
    if kind not in "bui":
        return None
    absorbing = np.array(-1 if name == "or" and kind == "i" else 0).astype(dtype)[()]
    if name == "or" and kind != "i":
        absorbing = np.invert(np.array(0, dtype))[()]
    known = [fill for fill in fills if fill is not None]
    return absorbing if any(fill == absorbing for fill in known) else None


def _compare_index(context: Context, axis: int, padding: Padding) -> np.generic | None:
    """Returns what a comparison of the index with the true size is in the padded part."""
    found = _read_comparison(context)
    if found is None:
        return None
    name, index, size = found
    if index.axis != axis or (size.size, size.scale) != (padding.size, padding.scale):
        return None
    # The first padded index is the true size itself.
    fill, largest = _BEHIND[name]
    dtype = context.op.operands[0].aval.dtype
    counts = _fits(dtype, 0, context.op.results[0].aval.shape[axis] - 1)
    return fill if size.offset <= largest and counts else None


def _read_comparison(context: Context) -> tuple[str, AxisIndex, TrueSize] | None:
    """Returns a comparison of an index and a true size, as if the index stood first."""
    name = context.op.name
    if name not in _COMPARED:
        return None
    first, second = (each.meaning for each in context.operands)
    if isinstance(first, AxisIndex) and isinstance(second, TrueSize):
        return name, first, second
    if isinstance(first, TrueSize) and isinstance(second, AxisIndex):
        return _COMPARED[name], second, first
    return None


def _is_less_its_maximum(context: Context, axis: int, fill: Any) -> bool:
    """True for ``x - max(x)`` over a padded axis that is filled with minus infinity."""
    meaning = context.operands[1].meaning
    return (
        isinstance(meaning, Maximum)
        and fill is not None
        and bool(fill == -np.inf)
        and meaning.source is context.op.operands[0]
        and axis in meaning.axes
    )


def _find_meaning(context: Context) -> Any:
    op, operands = context.op, context.operands
    first = operands[0].meaning
    if op.name == "max":
        # As jnp.max with `initial`: the largest of minus infinity and x is x.
        others = [each for each in operands if each.uniform is None]
        is_plain = all(each.uniform is None or each.uniform == -np.inf for each in operands)
        if len(others) == 1 and is_plain and isinstance(others[0].meaning, Maximum):
            return others[0].meaning
    if op.name in ("add", "sub", "mul"):
        return _compute_size(context)
    if op.name not in _IDENTITIES:
        return None
    if isinstance(first, Maximum):
        return first if op.name != "convert_element_type" else None
    if isinstance(first, TrueSize):
        return _keep_exact(context, first)
    return first if _is_integer(op) else None


def _keep_exact(context: Context, size: TrueSize) -> TrueSize | None:
    """Returns the size unless its dtype cannot hold it: such a number wraps around."""
    if not _is_integer(context.op):
        return None
    largest = size.scale * max(context.sizes[size.size]) + size.offset
    fits = _fits(context.op.results[0].aval.dtype, size.scale + size.offset, largest)
    return size if fits else None


def _fits(dtype: Any, least: int, largest: int) -> bool:
    limits = np.iinfo(dtype)
    return int(limits.min) <= least and largest <= int(limits.max)


def _compute_size(context: Context) -> TrueSize | None:
    """Returns what a known integer makes of the true size."""
    sizes = [each.meaning for each in context.operands if isinstance(each.meaning, TrueSize)]
    numbers = [each.uniform for each in context.operands if each.uniform is not None]
    if not _is_integer(context.op) or (len(sizes), len(numbers)) != (1, 1):
        return None
    size, number, name = sizes[0], int(numbers[0]), context.op.name
    if name == "mul":
        scaled = TrueSize(size.size, size.scale * number, size.offset * number)
        return _keep_exact(context, scaled) if number > 0 else None
    if name == "sub" and context.operands[1].meaning is size:
        return None
    offset = size.offset + (number if name == "add" else -number)
    return _keep_exact(context, dataclasses.replace(size, offset=offset))


def _is_integer(op: Op) -> bool:
    return np.dtype(op.results[0].aval.dtype).kind in "ui"


def _find_leak(context: Context, axes: list[Padding | None]) -> Any:
    if all(each is None or each.fill is not None for each in axes):
        return None
    found = _read_comparison(context)
    padding = axes[found[1].axis] if found is not None else None
    return context.op if padding is not None and padding.fill is None else context.leak


def _evaluate(op: Op, fills: list[Any]) -> np.generic | None:
    """Returns what an op computes of scalars, None where that is not known here."""
    dtype = op.results[0].aval.dtype
    if op.name == "convert_element_type":
        return as_scalar(fills[0], dtype)
    if op.name == "select_n":
        return fills[1 + int(fills[0])]
    if op.name == "integer_pow":
        return as_scalar(fills[0] ** op.params["y"], dtype) if op.params["y"] > 0 else None
    function = _EVALUATED.get(op.name)
    if function is None:
        return None
    with np.errstate(all="ignore"):
        value = function(*fills)
    return None if value is None else as_scalar(value, dtype)


def _is_float(value: Any) -> bool:
    return np.dtype(value.dtype).kind not in "bui"
