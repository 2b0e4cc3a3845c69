"""Buffers: many small arrays joined, so that few copies go from device to device.

A copy between devices has a price of its own, whatever its size. Arrays of one dtype that are on
one device are joined there, copied as one buffer, and split on the other side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.communication.operands import CopyOperand, make_argument_error

DEFAULT_BYTES = 10 << 20


def check_buffer_size(buffer_size: Any, call: str) -> int:
    """Returns the most bytes of a buffer.

    Raises:
        ConfigError: it is no positive int.
    """
    is_int = isinstance(buffer_size, int) and not isinstance(buffer_size, bool)
    if is_int and buffer_size > 0:
        return buffer_size
    raise make_argument_error(
        f"`buffer_size` is {buffer_size!r}",
        f"argument `buffer_size` of {call}()",
        "it is the most bytes that are copied as one buffer",
        f"pass a positive int, or leave it out for {DEFAULT_BYTES:,}",
    )


def plan_buffers(sources: Sequence[Sequence[CopyOperand]], buffer_size: int) -> list[list[int]]:
    """Returns which arrays share a buffer, as lists of indices.

    Args:
        sources: lists of arrays; the arrays of one index have one shape and dtype.
        buffer_size: most bytes of a buffer of more than one array.

    Example:
        >>> import numpy as np
        >>> from tracegraph.communication.buffers import plan_buffers
        >>> arrays = [np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(2, np.float32)]
        >>> plan_buffers([arrays], 16)
        [[0, 2], [1]]
        >>> plan_buffers([arrays], 15)
        [[0], [1], [2]]
    """
    buffers: list[list[int]] = []
    open_buffers: dict[Any, list[int]] = {}
    room: dict[Any, int] = {}
    for index, arrays in enumerate(zip(*sources, strict=True)):
        key = tuple(map(_find_key, arrays))
        nbytes = arrays[0].nbytes
        if None in key or room.get(key, -1) < nbytes:
            open_buffers[key], room[key] = [], buffer_size
            buffers.append(open_buffers[key])
        open_buffers[key].append(index)
        room[key] = -1 if None in key else room[key] - nbytes
    return buffers


def _find_key(array: CopyOperand) -> Any:
    """Returns what arrays must have in common to be joined; None for one that stays alone."""
    if isinstance(array, np.ndarray):
        return array.dtype
    # A typed key has no bytes to join, a weak type would be lost, and shards are several copies.
    is_plain = isinstance(array.dtype, np.dtype) and not array.weak_type
    if not is_plain or len(array.devices()) > 1:
        return None
    return array.dtype, *array.devices()


def join_buffers(
    arrays: Sequence[CopyOperand], buffers: Sequence[Sequence[int]]
) -> list[CopyOperand]:
    """Returns each buffer of `plan_buffers`, joined where its arrays are."""
    return [_join_arrays([arrays[i] for i in indices]) for indices in buffers]


def split_buffers(
    joined: Sequence[jax.Array], arrays: Sequence[CopyOperand], buffers: Sequence[Sequence[int]]
) -> tuple[jax.Array, ...]:
    """Returns the arrays inside of buffers that were moved, in the order of the arrays.

    Args:
        joined: of `join_buffers`, in a new place.
        arrays: that were joined; only their shapes are used.
        buffers: of `plan_buffers`.
    """
    found: dict[int, jax.Array] = {}
    for whole, indices in zip(joined, buffers, strict=True):
        shapes = tuple(arrays[i].shape for i in indices)
        parts = [whole] if len(indices) == 1 else _split(whole, shapes)
        found |= zip(indices, parts, strict=True)
    return tuple(found[i] for i in range(len(arrays)))


def _join_arrays(arrays: Sequence[CopyOperand]) -> CopyOperand:
    """Returns the elements of arrays of one dtype in one row; an array alone stays as it is."""
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([np.ravel(array) for array in arrays])
    return _join(*arrays)


@jax.jit
def _join(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.ravel(array) for array in arrays])


@functools.partial(jax.jit, static_argnums=1)
def _split(whole: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = jnp.split(whole, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
