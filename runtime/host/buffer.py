"""HostBuffer: one static buffer of a graph, as a NumPy view of the arena's bytes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.definition.graph import BufferSlot, ReplayClock
from tracegraph.runtime.jax_interop import alias_host_memory, make_aval, to_immutable


class HostBuffer:
    """A static buffer: its address never changes.

    Note [Rebinding]. XLA:CPU takes its arguments from wherever they are and puts its results into
    memory of its own. So an immutable array given for a copied input is not copied: the calls that
    read this input are pointed at it, as a CUDA graph's node parameters are patched. And a result
    that leaves the graph as an immutable value is returned as XLA made it. What stays inside the
    graph (temporaries between regions, constants, state that several regions read) is in the arena.

    Args:
        slot: name, place, shape and dtype.
        arena: where its bytes are; the buffer holds it, so they outlive arrays that read them.
        jax_device: the JAX device that computes on this memory.
        clock: counts the replays of the graph that owns the buffer.

    Attributes:
        alias: a JAX array over these very bytes, None where JAX cannot alias the dtype.
        sites: the argument lists, with the index in each, that a rebound input is written into.
        result: the last result that leaves the graph as XLA made it.
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
        "result",
        "shape",
        "sites",
        "view",
    )
    context = None
    memory = None

    def __init__(self, slot: BufferSlot, arena: Arena, jax_device: Any, clock: ReplayClock) -> None:
        self.name, self.shape, self.dtype = slot.name, slot.shape, slot.dtype
        self.arena, self.jax_device, self.clock = arena, jax_device, clock
        self.view, self.nbytes = _view_bytes(arena, slot), slot.nbytes
        self.address = arena.locate(slot.offset)
        self.aval = make_aval(slot.shape, slot.dtype, weak_type=slot.weak_type)
        self.alias = alias_host_memory(self.view, jax_device)
        self.sites: list[tuple[list[Any], int]] = []
        self.result: Any = None

    def take_result(self) -> Any:
        """Returns the result, and drops it."""
        result, self.result = self.result, None
        return result

    def snapshot(self) -> np.ndarray[Any, Any]:
        """Returns a private copy of the current bytes."""
        return self.view.copy()

    def to_jax(self, snapshot: np.ndarray[Any, Any]) -> Any:
        """Returns a private copy as an immutable JAX array."""
        return to_immutable(snapshot, self.aval, self.jax_device)

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype, or a Python scalar, into the buffer."""
        if isinstance(value, Array):
            value = value.peek()
        np.copyto(self.view, np.asarray(value, dtype=self.dtype))
        self.clock.has_copied = True
        for arguments, index in self.sites:
            arguments[index] = self.alias

    def write_part(self, array: Any) -> None:
        """Copies a smaller array in; what is behind it stays."""
        part = self.view[tuple(map(slice, array.shape))]
        np.copyto(part, np.asarray(array, dtype=self.dtype))
        self.clock.has_copied = True
        for arguments, index in self.sites:
            arguments[index] = self.alias

    def reads(self, array: Any) -> bool:
        """True while the one call that reads the input takes a plain array as it is."""
        return [arguments[index] is array for arguments, index in self.sites] == [True]

    def read_at(self, _address: int, /) -> bool:
        """Returns False: state is copied."""
        return False

    def make_writer(self) -> Callable[[Any], None]:
        """Returns what takes a plain JAX array on this device, see Note [Rebinding]."""
        if len(self.sites) == 1:
            arguments, index = self.sites[0]
            return functools.partial(arguments.__setitem__, index)
        return self._rebind if self.sites else self.write

    def _rebind(self, value: Any) -> None:
        for arguments, index in self.sites:
            arguments[index] = value

    def fill_bytes(self, byte: int) -> None:
        """Sets every byte, to make a stale or premature read visible."""
        ctypes.memset(self.address, byte, self.nbytes)


class MappedBytes:
    """Memory that NumPy can view; the view holds what owns the memory.

    Args:
        owner: what keeps the memory.
        address: of the first byte.
        nbytes: how many.
    """

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _view_bytes(arena: Arena, slot: BufferSlot) -> np.ndarray[Any, Any]:
    """Returns the slot's bytes of the arena with its shape and dtype."""
    segment = arena.find_block(slot.offset).segment
    view = np.asarray(MappedBytes(segment, arena.locate(slot.offset), slot.nbytes))
    return view.view(slot.dtype).reshape(slot.shape)
