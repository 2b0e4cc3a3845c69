"""HostBuffer: one static buffer of a graph, as a NumPy view of the arena's bytes."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.array import Array
from tracegraph.runtime.graph import BufferSlot, ReplayClock
from tracegraph.runtime.jax_interop import ArrayImpl, alias_host_memory, make_aval, to_immutable


class HostBuffer:
    """A static buffer: its address never changes; its generation says which replay wrote it.

    Args:
        slot: name, place, shape and dtype.
        arena: where its bytes are; the buffer holds it, so they outlive every array that reads them.
        jax_device: the JAX device that computes on this memory.
        clock: counts the replays of the graph that owns the buffer.
    """

    __slots__ = (
        "address",
        "alias",
        "arena",
        "aval",
                "clock",
        "dtype",
        "jax_device",
        "name",
        "nbytes",
        "shape",
        "view",
    )

    def __init__(
        self, slot: BufferSlot, arena: Arena, jax_device: Any, clock: ReplayClock
    ) -> None:
        self.name, self.shape, self.dtype = slot.name, slot.shape, slot.dtype
        self.arena, self.jax_device, self.clock = arena, jax_device, clock
        self.view = _view_bytes(arena, slot)
        self.nbytes = self.view.nbytes
        self.address = arena.address + slot.offset
        self.aval = make_aval(slot.shape, slot.dtype, weak_type=slot.weak_type)
        self.alias = alias_host_memory(self.view, jax_device)

    @property
    def generation(self) -> int:
        """Number of the last replay."""
        return self.clock.generation

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever reads or writes the arena."""
        return self.clock.lock

    def as_argument(self) -> Any:
        """Returns a JAX array over these very bytes, or a copy where JAX cannot alias the dtype."""
        if self.alias is not None:
            return self.alias
        return to_immutable(self.view.copy(), self.aval, self.jax_device)

    def snapshot(self) -> np.ndarray[Any, Any]:
        """Returns a private copy of the present bytes."""
        return self.view.copy()

    def to_jax(self, snapshot: np.ndarray[Any, Any]) -> Any:
        """Returns a private copy as an immutable JAX array."""
        return to_immutable(snapshot, self.aval, self.jax_device)

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype, or a Python scalar, into the buffer."""
        if type(value) is ArrayImpl and self.alias is not None:
            # The pointer is valid only once the computation that defines it has finished.
            value.block_until_ready()
            if not len(value.devices()) == 1 or value.nbytes != self.nbytes:
                raise ValueError(f"{self.name}: cannot copy {value.aval} into {self.aval}")
            ctypes.memmove(self.address, value.unsafe_buffer_pointer(), self.nbytes)
            return
        if isinstance(value, Array):
            value = value.peek()
        np.copyto(self.view, np.asarray(value, dtype=self.dtype))

    def fill_bytes(self, byte: int) -> None:
        """Sets every byte, to make a stale or premature read visible."""
        ctypes.memset(self.address, byte, self.nbytes)


def _view_bytes(arena: Arena, slot: BufferSlot) -> np.ndarray[Any, Any]:
    """Returns the slot's bytes of the arena with its shape and dtype."""
    start = arena.block.offset + slot.offset
    nbytes = slot.dtype.itemsize * int(np.prod(slot.shape, dtype=np.int64))
    return arena.block.segment.storage[start : start + nbytes].view(slot.dtype).reshape(slot.shape)
