"""An array cut into pieces for several devices, and pieces joined on one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.communication.operands import (
    CopyOperand,
    check_alike,
    list_items,
    make_argument_error,
    read_array,
    read_arrays,
    read_devices,
    read_dim,
)
from tracegraph.runtime.default_device import find_jax_device


def scatter(
    tensor: Any,
    devices: Iterable[Any] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
) -> tuple[jax.Array, ...]:
    """Cuts an array into pieces, one per device.

    Args:
        tensor: a `jax.Array` on any device, or a NumPy array, of at least one dimension.
        devices: JAX devices or their indices; None for all local ones.
        chunk_sizes: the size of each piece along ``dim``; None for equal pieces, the last of which
            may be smaller, and none is left for the last devices if there are too few elements.
        dim: the dimension to cut along; a negative one counts from the end.

    Returns:
        The pieces, each on its device.

    Raises:
        ConfigError: the sizes do not match the devices or the array, or another argument is wrong.
        CaptureError: a function is being traced.

    Example:
        >>> pieces = tg.comm.scatter(jnp.arange(5), devices=[0, 0], chunk_sizes=[1, 4])
        >>> [piece.tolist() for piece in pieces]
        [[0], [1, 2, 3, 4]]
    """
    array, targets = read_array(tensor, "tensor", "scatter"), read_devices(devices, "scatter")
    dim = read_dim(dim, [array], "scatter")
    sizes = _read_sizes(chunk_sizes, array.shape[dim], len(targets))
    starts = itertools.accumulate(sizes, initial=0)
    # With equal pieces the devices may be more than the pieces.
    return tuple(
        jax.device_put(_cut(array, start, size, dim), device)
        for start, size, device in zip(starts, sizes, targets, strict=False)
    )


def gather(tensors: Iterable[Any], dim: int = 0, destination: Any = None) -> jax.Array:
    """Joins arrays of several devices on one.

    Args:
        tensors: arrays of one dtype, and of one shape but for ``dim``, on any devices.
        dim: the dimension to join along; a negative one counts from the end.
        destination: a JAX device, the index of one, or None for the current one.

    Returns:
        The joined array.

    Raises:
        ConfigError: the arrays are not alike, or another argument is wrong.
        CaptureError: a function is being traced.

    Example:
        >>> tg.comm.gather([jnp.zeros((2, 1)), jnp.ones((2, 2))], dim=1).tolist()
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    arrays = read_arrays(tensors, "tensors", "gather")
    dim = read_dim(dim, arrays, "gather")
    named = {f"tensors[{i}]": array for i, array in enumerate(arrays)}
    check_alike(named, "gather", but_for=dim)
    target = find_jax_device(destination, "destination")
    return jnp.concatenate([jax.device_put(array, target) for array in arrays], axis=dim)


def _cut(array: CopyOperand, start: int, size: int, dim: int) -> CopyOperand:
    if isinstance(array, np.ndarray):
        return np.take(array, range(start, start + size), axis=dim)
    # The start is an operand, so that equal pieces are cut by one program.
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=dim)


def _read_sizes(chunk_sizes: Any, length: int, count: int) -> Sequence[int]:
    if chunk_sizes is None:
        size = -(-length // count)
        return (
            [min(size, length - start) for start in range(0, length, size)] if size else [0] * count
        )
    sizes = list_items(chunk_sizes, "chunk_sizes", "scatter")
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        why = "sizes are ints, zero or more"
    elif len(sizes) != count:
        why = f"there are {len(sizes)} sizes for {count} devices"
    elif sum(sizes) != length:
        why = f"they sum up to {sum(sizes)}, and the array has {length} along `dim`"
    else:
        return sizes
    raise make_argument_error(
        f"`chunk_sizes` is {sizes}",
        "argument `chunk_sizes` of scatter()",
        why,
        "pass one size per device, or leave it out for equal pieces",
    )
