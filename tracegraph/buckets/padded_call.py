"""PaddedCall: a call whose arguments were padded to buckets; results are cut after it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.buckets.analysis import PaddedResult
from tracegraph.buckets.bucket_sizes import BucketedAxis, BucketSizes
from tracegraph.buckets.errors import (
    make_leaf_error,
    make_missing_error,
    make_size_error,
    make_unequal_error,
)
from tracegraph.jax_internals import is_key_dtype
from tracegraph.replaying.padded_leaf import Pad, defer_padding
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_parts import find_part_rows
from tracegraph.runtime.device import Device
from tracegraph.runtime.jax_interop import ArrayImpl

# What takes longer to the host and back than XLA to compile a program that pads it.
MAX_HOST_BYTES = 64 << 20
# Whose axes need no second look.
_ARRAYS = (ArrayImpl, Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class PaddedCall:
    """A call on its way to the graph of its bucket.

    Attributes:
        args: positional arguments, padded, or with a `PaddedLeaf` where that is still to be done.
        kwargs: keyword arguments, as the positional ones.
        true_sizes: of the arguments as they were given, by the size's name.
        bucket: the padded sizes, by the same names.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    true_sizes: Mapping[str, int]
    bucket: Mapping[str, int]

    @property
    def is_full(self) -> bool:
        """True when nothing was padded."""
        return self.true_sizes == self.bucket


def measure_call(
    sizes: BucketSizes, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the true sizes of a call.

    Raises:
        CaptureError: an argument is missing, has no such axis, or two that are one size differ.
    """
    found = _measure_quickly(sizes, args, kwargs)
    return _measure_slowly(sizes, args, kwargs) if found is None else found


def _measure_quickly(
    sizes: BucketSizes, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int] | None:
    """Returns the true sizes of a call that is all arrays; None where an error may be due."""
    found: dict[str, int] = {}
    for each in sizes.axes:
        for leaf in jax.tree.leaves(_find(sizes, each, args, kwargs)):
            if type(leaf) not in _ARRAYS or leaf.ndim <= each.axis:
                return None
            size = leaf.shape[each.axis]
            if found.setdefault(each.size, size) != size:
                return None
    return found if len(found) == len(sizes.buckets) else None


def _measure_slowly(
    sizes: BucketSizes, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the true sizes of a call, with a label for every axis that may be wrong."""
    found: dict[str, tuple[int, str]] = {}
    for each in sizes.axes:
        for path, leaf in jax.tree_util.tree_leaves_with_path(_find(sizes, each, args, kwargs)):
            label = f"axis {each.axis} of `{each.argument}{jax.tree_util.keystr(path)}`"
            size = _measure_leaf(leaf, each.axis, label)
            first, first_label = found.setdefault(each.size, (size, label))
            if first != size:
                raise make_unequal_error(first_label, first, label, size)
    for each in sizes.axes:
        if each.size not in found:
            label = f"axis {each.axis} of `{each.argument}`"
            raise make_leaf_error(label, "missing: there is no array in it")
    return {name: size for name, (size, _) in found.items()}


def _find(
    sizes: BucketSizes, each: BucketedAxis, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if each.argument in kwargs:
        return kwargs[str(each.argument)]
    for position, value in enumerate(args):
        if sizes.name_position(position) == each.argument:
            return value
    raise make_missing_error(str(each.argument))


def _measure_leaf(leaf: Any, axis: int, label: str) -> int:
    if isinstance(leaf, bool | int | float | complex):
        raise make_leaf_error(label, "an axis of a Python number")
    shape = getattr(leaf, "shape", None)
    if shape is None or len(shape) <= axis:
        raise make_leaf_error(label, f"missing: its shape is {shape}")
    if is_key_dtype(leaf.dtype):
        raise make_leaf_error(label, f"an axis of {leaf.dtype}, which has no zero")
    return shape[axis]


def pad_call(
    sizes: BucketSizes,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    pad: Pad,
    bucket: Mapping[str, int] | None = None,
) -> PaddedCall:
    """Pads the arguments of a call to the next buckets.

    Args:
        sizes: of the function.
        args: positional arguments.
        kwargs: keyword arguments.
        pad: pads an array.
        bucket: another one than the next, for a capture ahead of its calls.

    Raises:
        CaptureError: no bucket holds an argument.
    """
    found = measure_call(sizes, args, kwargs)
    chosen = bucket or {name: _choose(sizes, name, size) for name, size in found.items()}

    def pad_argument(key: Any, value: Any) -> Any:
        axes = sizes.find_axes(key)
        if not axes or (bucket is None and all(found[n] == chosen[n] for n in axes.values())):
            return value
        return jax.tree.map(functools.partial(_pad_leaf, axes=axes, chosen=chosen, pad=pad), value)

    padded = tuple(pad_argument(sizes.name_position(i), value) for i, value in enumerate(args))
    named = {key: pad_argument(key, value) for key, value in kwargs.items()}
    return PaddedCall(padded, named, found, chosen)


def _choose(sizes: BucketSizes, name: str, size: int) -> int:
    buckets = sizes.buckets[name]
    if not 1 <= size <= buckets[-1]:
        raise make_size_error(name, size, buckets)
    return next(each for each in buckets if each >= size)


def _pad_leaf(leaf: Any, *, axes: Mapping[int, str], chosen: Mapping[str, int], pad: Pad) -> Any:
    extents, is_larger = [*leaf.shape], False
    for axis, name in axes.items():
        is_larger = is_larger or extents[axis] > chosen[name]
        extents[axis] = chosen[name]
    shape = tuple(extents)
    if is_larger or isinstance(leaf, jax.ShapeDtypeStruct):
        # A sample of a warm-up, of which only the type matters.
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    return leaf if shape == tuple(leaf.shape) else pad(leaf, shape)


def pad_with_zeros(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array with zeros behind it: what a bucket is padded with."""
    return pad_with(array, shape, 0)


def pad_later(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns what a graph takes for an array with zeros behind it: a `PaddedLeaf` where it can."""
    return defer_padding(array, shape, pad_once)


def pad_once(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array with zeros behind it, for a capture: a program for it takes long to compile.

    What the host pads has the same type for JAX; so an array that is committed to its device, or
    adopts the dtype of what it meets, is padded there, and a large one, too.
    """
    if type(array) is not ArrayImpl or array.committed or array.weak_type:
        return pad_with_zeros(array, shape)
    if math.prod(shape) * array.dtype.itemsize > MAX_HOST_BYTES:
        return pad_with_zeros(array, shape)
    return pad_with_zeros(np.asarray(array), shape)


def pad_with(array: Any, shape: tuple[int, ...], value: Any) -> Any:
    """Returns an array with a value behind it on every axis.

    Args:
        array: of JAX or NumPy.
        shape: wanted, at least as large.
        value: a number, or an array of that shape of which the part behind is taken.
    """
    if not isinstance(array, np.ndarray):
        return _pad(array, value, shape)
    full = np.array(np.broadcast_to(np.asarray(value, array.dtype), shape))
    np.copyto(full[tuple(map(slice, array.shape))], array)
    return full


@functools.partial(jax.jit, static_argnums=2)
def _pad(array: Any, value: Any, shape: tuple[int, ...]) -> Any:
    full = jnp.broadcast_to(jnp.asarray(value, array.dtype), shape)
    return jax.lax.dynamic_update_slice(full, array, (0,) * array.ndim)


def cut_results(
    leaves: Sequence[Any],
    results: Sequence[PaddedResult],
    true_sizes: Mapping[str, int],
    device: Device,
) -> list[Any]:
    """Returns flat results without their padded parts, as arrays of their own.

    Args:
        leaves: the flat results of a graph.
        results: where each is cut.
        true_sizes: of the arguments, by the size's name.
        device: of the graph.
    """
    cut = list(leaves)
    copied: dict[int, tuple[int, ...]] = {}
    computed: dict[int, tuple[int, ...]] = {}
    for index, (leaf, result) in enumerate(zip(leaves, results, strict=True)):
        if not result.axes:
            continue
        extents: list[int] = [*leaf.shape]
        for axis, size, scale in result.axes:
            extents[axis] = true_sizes[size] * scale
        shape = tuple(extents)
        chosen = copied if _can_copy(leaf, shape) else computed
        chosen[index] = shape
    if copied:
        pieces = device.cut_arrays([cut[i] for i in copied], list(copied.values()))
        _replace(cut, copied, pieces)
    if computed:
        _replace(cut, computed, _cut([cut[i] for i in computed], tuple(computed.values())))
    return cut


def _can_copy(leaf: Any, shape: tuple[int, ...]) -> bool:
    """True where one copy takes the part out; typed keys and elements of few bits need JAX."""
    is_plain = type(leaf) is Array or type(leaf) is ArrayImpl
    return is_plain and find_part_rows(shape, leaf.shape, leaf.dtype) is not None


def _replace(leaves: list[Any], places: Iterable[int], pieces: Iterable[Any]) -> None:
    for index, piece in zip(places, pieces, strict=True):
        leaves[index] = piece


@functools.partial(jax.jit, static_argnums=1)
def _cut(leaves: list[Any], shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [leaf[tuple(map(slice, shape))] for leaf, shape in zip(leaves, shapes, strict=True)]
