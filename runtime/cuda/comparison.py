"""Comparing device memory bit for bit, and making copies of arrays, without compiling per shape."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.cuda.buffer import CudaContext
from tracegraph.runtime.cuda.jax_order import allocate_all, allocate_arrays, make_weak
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer
BLOCK_BYTES = 4 << 10
MANY_ARRAYS, ROUNDS = 64, 8
SMALL_CHUNK_BYTES, CHUNK_BYTES = 1 << 20, 16 << 20


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
    copies = []
    for array, copy in zip(arrays, _allocate_like(arrays, context.jax_device), strict=True):
        context.order.await_array(array)
        source, target = _get_pointer(array), _get_pointer(copy)
        nbytes = array.nbytes
        split = array.size // 2 * array.dtype.itemsize if is_rotated else 0
        context.copy(target, source + split, nbytes - split)
        context.copy(target + nbytes - split, source, split)
        copies.append(make_weak(copy) if array.aval.weak_type else copy)
    return copies


def _allocate_like(arrays: Sequence[jax.Array], jax_device: Any) -> list[jax.Array]:
    """Returns an array with undefined contents for each of these, of its shape and dtype.

    A model's layers have the same shapes. So a small program that is run a few times gives most of
    the arrays: XLA takes half a millisecond to compile each result.
    """
    shapes = [(array.shape, np.dtype(array.dtype)) for array in arrays]
    rounds = ROUNDS if len(shapes) >= MANY_ARRAYS else 1
    counts = collections.Counter(shapes)
    most = tuple(shape for shape, count in counts.items() for _ in range(count // rounds))
    rest = tuple(shape for shape, count in counts.items() for _ in range(count % rounds))
    free: dict[Any, list[jax.Array]] = {shape: [] for shape in counts}
    for group in filter(None, (*(most,) * rounds, rest)):
        for shape, array in zip(group, allocate_all(group, jax_device), strict=True):
            free[shape].append(array)
    return [free[shape].pop() for shape in shapes]


def find_unequal(context: CudaContext, pairs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns which pairs of device ranges differ in any bit; the host waits once.

    Args:
        context: of the GPU.
        pairs: two addresses and a number of bytes each.
    """
    # Both sides are copied into rooms of one of two sizes, so that no range needs a program of its
    # own; a block of a room holds bytes of one pair only.
    total = sum(-(-nbytes // BLOCK_BYTES) for _, _, nbytes in pairs) * BLOCK_BYTES
    chunk = SMALL_CHUNK_BYTES if total <= SMALL_CHUNK_BYTES else CHUNK_BYTES
    shape = (chunk // BLOCK_BYTES, BLOCK_BYTES)
    rooms = allocate_arrays(shape, np.dtype(np.uint8), False, context.jax_device, 2)
    verdicts: list[tuple[list[tuple[int, int]], Any]] = []
    members: list[tuple[int, int]] = []
    used = 0
    for index, (one, other, nbytes) in enumerate(pairs):
        done = 0
        while done < nbytes:
            part = min(nbytes - done, chunk - used)
            for room, source in zip(rooms, (one, other), strict=True):
                if not used:
                    # What an earlier range left behind would be compared as well.
                    context.fill(_get_pointer(room), 0, chunk)
                context.copy(_get_pointer(room) + used, source + done, part)
            blocks = -(-part // BLOCK_BYTES)
            members.append((index, blocks))
            used, done = used + blocks * BLOCK_BYTES, done + part
            if used == chunk:
                verdicts.append((members, _compare_blocks(*rooms)))
                members, used = [], 0
    if members:
        verdicts.append((members, _compare_blocks(*rooms)))
    return sorted(
        {index for members, unequal in verdicts for index in _list_owners(members, unequal)}
    )


def _list_owners(members: Sequence[tuple[int, int]], unequal: jax.Array) -> list[int]:
    """Returns whose blocks differ; members are pairs and their numbers of blocks, in order."""
    indices, counts = zip(*members, strict=True)
    owners = np.repeat(indices, counts)
    return np.unique(owners[np.asarray(unequal)[: owners.size]]).tolist()


@jax.jit
def _compare_blocks(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.any(one != other, axis=1)
