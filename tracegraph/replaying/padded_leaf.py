"""PaddedLeaf: an argument that is smaller than its static input, on its way to the graph.

Its slot copies it to the front of the static input; what is behind it stays whatever was there. The
owner of the graph has proved that nothing of that reaches a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegraph.replaying.private_copies import is_late
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_parts import PartRows, find_part_rows
from tracegraph.runtime.jax_interop import ArrayImpl

# From an array and a larger shape to the array with something behind it.
Pad = Callable[[Any, tuple[int, ...]], Any]


class PaddedLeaf:
    """An array that stands for a larger one of which it is the first part.

    Args:
        array: as the user gave it; it is held.
        memory: a plain array over its memory, or the array itself, of NumPy.
        shape: of the larger array.
        pad: makes the larger array.
    """

    __slots__ = ("_array", "_pad", "memory", "shape")

    def __init__(self, array: Any, memory: Any, shape: tuple[int, ...], pad: Pad) -> None:
        self._array, self.memory, self.shape, self._pad = array, memory, shape, pad

    def pad(self) -> Any:
        """Returns the larger array, for what takes none but whole ones."""
        return self._pad(self._array, self.shape)


def defer_padding(array: Any, shape: tuple[int, ...], pad: Pad) -> Any:
    """Returns a PaddedLeaf, or the larger array where one copy does not take the part.

    Args:
        array: of JAX or NumPy.
        shape: of the larger array.
        pad: makes the larger array.

    Example:
        >>> leaf = defer_padding(jnp.ones(3), (4,), lambda array, shape: jnp.zeros(shape))
        >>> leaf.memory.shape, leaf.shape, leaf.pad().shape
        ((3,), (4,), (4,))
    """
    memory: Any = array.find_memory() if type(array) is Array else array
    rows = find_part_rows(array.shape, shape, array.dtype)
    if rows is None or not _can_copy(memory, rows):
        return pad(array, shape)
    if is_late(memory):
        # Here, where no lock is held: it may be waiting for a call of the same graph.
        memory.block_until_ready()
    return PaddedLeaf(array, memory, shape, pad)


def _can_copy(memory: Any, rows: PartRows) -> bool:
    # From a NumPy array one row: the host pads inner axes as fast as it copies them.
    if type(memory) is np.ndarray:
        return rows.count == 1
    return type(memory) is ArrayImpl and not memory.is_deleted()


def pad_leaves(tree: Any) -> Any:
    """Returns a tree with the larger array in the place of each PaddedLeaf."""
    return jax.tree.map(_pad_leaf, tree)


def _pad_leaf(leaf: Any) -> Any:
    return leaf.pad() if type(leaf) is PaddedLeaf else leaf
