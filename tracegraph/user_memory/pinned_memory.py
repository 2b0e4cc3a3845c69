"""Pinned arrays: NumPy arrays in page-locked memory, from which a GPU copies by itself.

Note [What the caller may change]
A NumPy array that is passed to a captured function may be changed as soon as the call returns,
because its bytes are copied at once. That holds for a pinned array too, as `pin_memory` makes it by
default. The copy costs the host as much time as the bytes take. With ``non_blocking=True`` the
caller promises not to change the array before the GPU has read it; then nothing is copied on the
host. `synchronize_copies` waits until the array may be changed again. The promise belongs to the
memory: it holds for views of the array as well. Dropping the array early is always safe: its memory
is used again only after the last copy.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator, find_host_block
from tracegraph.runtime.memory.pinned.host_block import HostBlock


class _PinnedBytes:
    """What a pinned array and its views hold; NumPy reads its address."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, block: HostBlock, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
        }


def pin_memory(tree: Any, *, non_blocking: bool = False) -> Any:
    """Copies arrays into page-locked memory.

    On the host device the memory is ordinary, and all else is the same.

    Args:
        tree: a NumPy or JAX array of any numeric dtype, or a tree of them. Other leaves, and arrays
            that are pinned in this way already, are returned as they are.
        non_blocking: a captured function copies straight from the memory of the array, also after
            the call has returned. Do not change the array before `synchronize_copies`.

    Returns:
        A tree with a writable, C-contiguous NumPy array of the same shape, dtype and values for
        each array.

    Raises:
        TracegraphError: an array has a dtype without fixed size, or a mask.
        OutOfMemoryError: the machine has no more memory that can be locked.

    Example:
        >>> batch = tg.memory.pin_memory({"name": "first", "x": np.arange(3.0)})
        >>> batch
        {'name': 'first', 'x': array([0., 1., 2.])}
        >>> tg.memory.is_pinned(batch["x"]), tg.memory.is_pinned(np.arange(3.0))
        (True, False)
    """
    allocator = find_host_allocator()

    def pin(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | jax.Array) or _is_pinned_so(leaf, non_blocking):
            return leaf
        return _copy_to_pinned(leaf, allocator, non_blocking)

    return jax.tree_util.tree_map(pin, tree)


def is_pinned(array: Any) -> bool:
    """Returns True when `pin_memory` made an array, or the array that it is a view of.

    Args:
        array: anything; only NumPy arrays are ever pinned.
    """
    return _find_block(array) is not None


def synchronize_copies(tree: Any) -> None:
    """Blocks the host until all copies of pinned arrays that are enqueued now have read them.

    Args:
        tree: of pinned arrays; other leaves are passed over.

    Example:
        >>> batch = tg.memory.pin_memory(np.zeros(4), non_blocking=True)
        >>> tg.memory.synchronize_copies(batch)
        >>> batch[:] = 1
    """
    for leaf in jax.tree_util.tree_leaves(tree):
        found = _find_block(leaf)
        if found is not None:
            allocator, block = found
            allocator.synchronize(block)


def find_host_allocator() -> CachingHostAllocator:
    """Returns the allocator of the pinned memory of JAX's default device.

    Its statistics count what is staged on the way to a GPU as well.
    """
    return find_device(is_checking=False).host_allocator


def empty_host_cache() -> None:
    """Frees the page-locked memory that no array and no copy uses."""
    find_host_allocator().empty_cache()


def _copy_to_pinned(
    array: Any, allocator: CachingHostAllocator, non_blocking: bool
) -> np.ndarray[Any, Any]:
    source = _read_on_host(array)
    block = allocator.allocate(source.nbytes, is_non_blocking=non_blocking)
    owner = _PinnedBytes(block, source.nbytes)
    # The finaliser runs anywhere, also inside the allocator, and must not wait for it.
    weakref.finalize(owner, allocator.free_later, block).atexit = False
    pinned = np.asarray(owner).view(source.dtype).reshape(source.shape)
    np.copyto(pinned, source)
    return pinned


def _read_on_host(array: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    if isinstance(array, np.ma.MaskedArray) or is_key or array.dtype.hasobject:
        raise TracegraphError(
            f"an array of type {type(array).__name__}, dtype {array.dtype}, cannot be pinned",
            where="argument `tree` of pin_memory",
            why="a GPU copies plain bytes; masks, Python objects and typed keys are more than that",
            fix="pin a plain array: `x.filled()`, `x.astype(float)` or `jax.random.key_data(x)`",
            anchor="pinned",
        )
    return np.asarray(array)


def _find_block(array: Any) -> tuple[CachingHostAllocator, HostBlock] | None:
    return find_host_block(array.ctypes.data) if isinstance(array, np.ndarray) else None


def _is_pinned_so(array: Any, non_blocking: bool) -> bool:
    found = _find_block(array)
    if found is None or found[1].is_non_blocking != non_blocking:
        return False
    return array.flags.c_contiguous and array.flags.writeable
