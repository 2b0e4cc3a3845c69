"""Comparing device memory bit for bit, and making copies of arrays, without compiling per shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.cuda.buffer import CudaContext
from tracegraph.runtime.cuda.jax_order import allocate_all, allocate_arrays, make_weak
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer
CHUNK_BYTES = 64 << 20
SMALLEST_CHUNK_BYTES = 1 << 20


def copy_arrays(
    context: CudaContext, arrays: Sequence[jax.Array], *, is_rotated: bool
) -> list[jax.Array]:
    """Returns private copies of plain arrays on the device.

    Args:
        context: of the GPU.
        arrays: plain arrays on it.
        is_rotated: exchange the two halves of each: other inputs with the same values in them, so
            that indices stay in range and floats stay finite.
    """
    shapes = tuple((array.shape, np.dtype(array.dtype)) for array in arrays)
    copies = []
    for array, copy in zip(arrays, allocate_all(shapes, context.jax_device), strict=True):
        context.order.await_array(array)
        source, target = _get_pointer(array), _get_pointer(copy)
        size = int(np.prod(array.shape, dtype=np.int64))
        split = size // 2 * np.dtype(array.dtype).itemsize if is_rotated else 0
        nbytes = size * np.dtype(array.dtype).itemsize
        context.copy(target, source + split, nbytes - split)
        context.copy(target + nbytes - split, source, split)
        copies.append(make_weak(copy) if array.aval.weak_type else copy)
    return copies


def find_unequal(context: CudaContext, pairs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns which pairs of device ranges differ in any bit.

    Args:
        context: of the GPU.
        pairs: two addresses and a number of bytes each.
    """
    total = sum(nbytes for _, _, nbytes in pairs)
    chunk = min(max(1 << max(total - 1, 1).bit_length(), SMALLEST_CHUNK_BYTES), CHUNK_BYTES)
    rooms = allocate_arrays((chunk,), np.dtype(np.uint8), False, context.jax_device, 2)
    targets = [_get_pointer(room) for room in rooms]
    for target in targets:
        context.fill(target, 0, chunk)
    # Ranges are compared together as long as they fit, and in halves only if something differs.
    verdicts: list[tuple[list[int], Any]] = []
    members: list[int] = []
    used = 0
    for index, (one, other, nbytes) in enumerate(pairs):
        done = 0
        while done < nbytes:
            part = min(nbytes - done, chunk - used)
            for target, source in zip(targets, (one, other), strict=True):
                context.copy(target + used, source + done, part)
            members.append(index)
            used, done = used + part, done + part
            if used == chunk:
                verdicts.append((members, _is_equal(*rooms)))
                members, used = [], 0
    verdicts.append((members, _is_equal(*rooms)))
    suspects = sorted({i for indices, is_equal in verdicts if not bool(is_equal) for i in indices})
    if len(suspects) <= 1:
        return suspects
    middle = len(suspects) // 2
    return [
        half[index]
        for half in (suspects[:middle], suspects[middle:])
        for index in find_unequal(context, [pairs[i] for i in half])
    ]


@jax.jit
def _is_equal(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.array_equal(one, other)
