"""OwnedBuffer: resident state in memory that XLA owns, updated in place by donation."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.definition.graph import BufferSlot, ReplayClock
from tracegraph.runtime.host.buffer import MappedBytes
from tracegraph.runtime.jax_interop import make_aval, to_immutable

# What XLA:CPU wants of memory that it takes as it is.
_ALIGNMENT = 64


class OwnedBuffer:
    """A static buffer that one call reads and overwrites.

    Note [In place]. XLA:CPU updates an argument in place only if the memory is its own; bytes of
    the arena it would copy, at every call. So where one call alone reads and updates a resident
    value, the value lives in an array that XLA made, which is donated to the call and comes back as
    its result: the same memory, at the same address, whatever the number of leaves. Another view of
    it would make the donation fail; so readers get copies and writers go by the address.

    Args:
        slot: name, shape and dtype.
        arena: of the graph that it belongs to.
        jax_device: the JAX device that owns the memory.
        clock: counts the replays of the graph.
    """

    __slots__ = (
        "__weakref__",
        "_argument_index",
        "_arguments",
        "arena",
        "aval",
        "clock",
        "dtype",
        "jax_device",
        "name",
        "nbytes",
        "shape",
    )
    context = None
    memory = None

    def __init__(self, slot: BufferSlot, arena: Arena, jax_device: Any, clock: ReplayClock) -> None:
        self.name, self.shape, self.dtype = slot.name, slot.shape, slot.dtype
        self.arena, self.jax_device, self.clock = arena, jax_device, clock
        self.nbytes = slot.nbytes
        self.aval = make_aval(slot.shape, slot.dtype, weak_type=slot.weak_type)
        self._arguments: list[Any] = [self._make_array()]
        self._argument_index = 0
        clock.unfinished.append(weakref.ref(self))

    def wait(self) -> None:
        """Waits for the array."""
        while True:
            array = self.alias
            try:
                array.block_until_ready()
            except RuntimeError:
                # Another thread's call has used it up, and leaves a new one.
                if array is not self.alias:
                    continue
            return

    def bind(self, arguments: list[Any], index: int) -> None:
        """Puts the array into a call's argument list, where each launch leaves the new one."""
        arguments[index] = self.alias
        self._arguments, self._argument_index = arguments, index

    @property
    def alias(self) -> Any:
        """The array itself; to be donated, and not to be read in any other way."""
        return self._arguments[self._argument_index]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.alias.unsafe_buffer_pointer()

    @property
    def view(self) -> np.ndarray[Any, Any]:
        """A copy of the current bytes, see Note [In place]."""
        return self.snapshot()

    def snapshot(self) -> np.ndarray[Any, Any]:
        """Returns a private copy of the current bytes."""
        return self._map_bytes().copy()

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype, or a Python scalar, into the buffer."""
        if isinstance(value, Array):
            value = value.peek()
        np.copyto(self._map_bytes(), np.asarray(value, dtype=self.dtype))

    def write_part(self, array: Any) -> None:
        """Copies a smaller array in; what is behind it stays."""
        part = self._map_bytes()[tuple(map(slice, array.shape))]
        np.copyto(part, np.asarray(array, dtype=self.dtype))

    def reads(self, _array: Any) -> bool:
        """False: resident state is always copied in."""
        return False

    def read_at(self, _address: int, /) -> bool:
        """Returns False: state is copied."""
        return False

    def make_writer(self) -> Callable[[Any], None]:
        """Returns `write`: resident state is always copied in."""
        return self.write

    def fill_bytes(self, byte: int) -> None:
        """Sets every byte, to make a premature read visible."""
        ctypes.memset(self.address, byte, self.nbytes)

    def restore(self) -> bool:
        """Makes a new array if a failed launch has used up the old one; True if it had."""
        if not self.alias.is_deleted():
            return False
        self._arguments[self._argument_index] = self._make_array()
        return True

    def _make_array(self) -> Any:
        return to_immutable(_make_zeros(self.shape, self.dtype), self.aval, self.jax_device)

    def _map_bytes(self) -> np.ndarray[Any, Any]:
        """Returns the memory as a NumPy array of which XLA knows nothing."""
        array = self.alias
        array.block_until_ready()
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        memory = MappedBytes(array, array.unsafe_buffer_pointer(), self.nbytes)
        return np.asarray(memory).view(self.dtype).reshape(self.shape)


def _make_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns memory that XLA copies into its own at once, for it is aligned to the dtype only.

    `jnp.zeros` would compile a program for each shape.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT + dtype.itemsize, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT + dtype.itemsize
    return memory[start : start + nbytes].view(dtype).reshape(shape)
