"""CudaBuffer: one static buffer of a graph on a GPU, and copies of it that leave the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_parts import find_part_rows
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.memory.host_values import HostValues
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_arrays
from tracegraph.runtime.definition.graph import BufferSlot, ReplayClock
from tracegraph.runtime.definition.packing import pack
from tracegraph.runtime.jax_interop import (
    HOST_KINDS,
    ArrayImpl,
    find_sharding,
    is_in_memory_of,
    is_row_major,
    make_aval,
    to_plain,
    to_row_major,
)

_get_pointer = ArrayImpl.unsafe_buffer_pointer
_is_ready = ArrayImpl.is_ready
_wait = ArrayImpl.block_until_ready
# Origins of arrays that a writer remembers.
MAX_KNOWN = 64
# XLA's kernels assume that parameters are aligned like its own allocations.
ALIGNMENT = 256


class DeviceValue:
    """A private copy of a buffer's bytes on the GPU, in memory of JAX's own.

    Args:
        raw: a plain array that work on the stream is writing.
        context: of its GPU.
    """

    __slots__ = ("_context", "_raw", "address")

    def __init__(self, raw: Any, context: CudaContext) -> None:
        self._raw, self._context = raw, context
        # Kept, because `to_jax` may exchange the array over the memory while others copy from it.
        self.address = _get_pointer(raw)

    def copy(self) -> DeviceValue:
        """Returns itself: it is not written again."""
        return self

    def block_until_ready(self) -> None:
        """Blocks the host until the bytes are there."""
        self._context.order.synchronize()

    def is_ready(self) -> bool:
        """True when a read would not wait."""
        return self._context.order.is_idle()

    def to_jax(self) -> Any:
        """Returns the value as a plain array over the same memory; one thread at a time."""
        self._raw = self._context.order.define(self._raw)
        return self._raw


class DeviceView:
    """The current bytes of a buffer, to be copied before the next replay.

    Args:
        address: of the first byte.
        copy: returns a private copy of them.
    """

    __slots__ = ("address", "copy")

    def __init__(self, address: int, copy: Callable[[], DeviceValue]) -> None:
        self.address, self.copy = address, copy


class CudaBuffer:
    """A static buffer: an address in the arena that the graph's nodes are bound to.

    Note [Rebinding on a GPU]. Changing a pointer in the parameters of a node of an executable graph
    costs half a microsecond, a copy on a stream four to five. So a plain array given for a copied
    input is not copied, unless it is misaligned or of another layout: the nodes that read the input
    are pointed at it. And a result that leaves the graph as an immutable value is written to memory
    of JAX's own, which changes only when the last value is still in use. Not rebound are buffers
    that live in the graph (state, constants) and those that nodes inside a library's own graph
    touch, which cannot be changed. An input that is lent has no memory before something must be
    copied into it: Note [Lent inputs].

    Args:
        slot: name, place, shape and dtype.
        arena: where its bytes are; the buffer holds it, so they outlive arrays that read them.
        context: of its GPU.
        clock: counts the replays of the graph that owns the buffer.
        host_values: of the graph, for a buffer in host memory.

    Attributes:
        patchers: functions that point one executable graph at another address for this buffer.
        memory: None, since the next replay may write the bytes.
        is_unread: True for an input that no node touches.
        is_lent: True for an input without memory of its own.
    """

    __slots__ = (
        "_bound",
        "_is_packed",
        "address",
        "arena",
        "aval",
        "clock",
        "context",
        "dtype",
        "host_values",
        "is_lent",
        "is_unread",
        "jax_device",
        "name",
        "nbytes",
        "patchers",
        "shape",
    )
    memory = None

    def __init__(
        self,
        slot: BufferSlot,
        arena: Arena,
        context: CudaContext,
        clock: ReplayClock,
        host_values: HostValues | None = None,
    ) -> None:
        self.name, self.shape, self.dtype = slot.name, slot.shape, slot.dtype
        self.arena, self.context, self.clock = arena, context, clock
        self.host_values = host_values
        self.jax_device = context.jax_device
        self.nbytes = slot.nbytes
        self._is_packed = slot.is_packed
        self.is_lent = slot.is_lent
        # Of what is lent none, until `hold_memory`.
        self.address = 0 if slot.is_outside else arena.locate(slot.offset)
        if host_values is not None:
            self.address = host_values.locate(slot)
        self._bound = self.address
        self.aval = make_aval(slot.shape, slot.dtype, weak_type=slot.weak_type)
        self.patchers: Sequence[Callable[[int], None]] = ()
        self.is_unread = False

    @property
    def view(self) -> DeviceView:
        """The bytes themselves, for a copy."""
        return DeviceView(self.address, self.snapshot)

    def snapshot(self) -> DeviceValue:
        """Returns a private copy of the current bytes."""
        aval = self.aval
        (raw,) = allocate_arrays(aval.shape, aval.dtype, aval.weak_type, self.jax_device, 1)
        self.context.copy(_get_pointer(raw), self.address, self.nbytes)
        return DeviceValue(raw, self.context)

    def write(self, value: Any) -> None:
        """Enqueues a copy of an array of the same shape and dtype, or a Python scalar."""
        self.hold_memory()
        self._rebind(self.address)
        if isinstance(value, Array):
            value = value.peek()
        if isinstance(value, DeviceValue | DeviceView):
            self.context.copy(self.address, value.address, self.nbytes)
            return
        value = to_plain(value)
        if isinstance(value, jax.Array) and is_in_memory_of(value, self.jax_device):
            self.context.copy_array(value, self.address, self.nbytes)
            return
        host = np.ascontiguousarray(np.asarray(value, dtype=self.dtype))
        self.context.stage(pack(host) if self._is_packed else host, self.address)

    def write_part(self, array: Any) -> None:
        """Enqueues a copy of a smaller array; what is behind it stays."""
        if self.is_unread:
            return
        self.hold_memory()
        self._rebind(self.address)
        if not isinstance(array, jax.Array):
            # The first rows only: other parts of NumPy arrays are padded on the host.
            self.context.stage(np.ascontiguousarray(np.asarray(array, self.dtype)), self.address)
            return
        rows = find_part_rows(array.shape, self.shape, self.dtype)
        assert rows is not None
        array = to_row_major(array)
        self.context.order.await_array(array)
        self.context.copy_part(_get_pointer(array), self.address, rows, is_cut=False)

    def reads(self, array: Any) -> bool:
        """True while the graph reads a plain array that it took where the array is."""
        return self.is_unread or self._bound == _get_pointer(array)

    def read_at(self, address: int, /) -> bool:
        """Has the graph read the input at an address, see Note [Rebinding on a GPU]."""
        if self.is_unread:
            return True
        if not self.patchers or address % ALIGNMENT or self._is_packed:
            return False
        self._rebind(address)
        return True

    def make_writer(self) -> Callable[[Any], None]:
        """Returns what takes a plain JAX array on this device, see Note [Rebinding on a GPU]."""
        if self.is_unread:
            return _ignore
        if len(self.patchers) != 1:
            return self._take
        order = self.context.order
        patch, await_array = self.patchers[0], order.await_array
        enter_thread, thread, primary = order.enter_thread, order.thread, order.primary
        expected = find_sharding(self.jax_device)
        # Arrays of one origin share the object that says where they are; it is held, so that no
        # other gets its id.
        known = {id(expected): expected}
        # With one dimension there is only one layout.
        has_layouts = len(self.shape) > 1
        # Arrays that were found to be made, by address: Note [Arrays that were never made].
        made: dict[int, Callable[[], Any]] = {}

        def take(value: Any) -> None:
            sharding = value.sharding
            if id(sharding) not in known:
                if not is_here(value, expected):
                    self.write(value)
                    return
                if len(known) < MAX_KNOWN:
                    known[id(sharding)] = sharding
            address = _get_pointer(value)
            if has_layouts and not is_row_major(value):
                self.write(value)
                return
            if value is not made.get(address, _find_nothing)():
                # As in `JaxOrder.await_array`; an array that was made once stays so.
                if _is_ready(value):
                    _wait(value)
                    if len(made) == MAX_KNOWN:
                        made.clear()
                    made[address] = weakref.ref(value)
                else:
                    await_array(value)
            if address != self._bound:
                if address % ALIGNMENT:
                    self.write(value)
                    return
                if thread.context != primary:
                    enter_thread()
                # Unknown until the driver has accepted it.
                self._bound = 0
                patch(address)
                self._bound = address

        return take

    def _take(self, value: Any) -> None:
        if not is_here(value, find_sharding(self.jax_device)) or not self.patchers:
            self.write(value)
            return
        address = _get_pointer(value)
        if address % ALIGNMENT or not is_row_major(value):
            self.write(value)
            return
        self.context.order.await_array(value)
        self._rebind(address)

    def hold_memory(self) -> None:
        """Gets memory for a lent input, which is to be copied in.

        Raises:
            OutOfMemoryError: the pool has none.
        """
        if not self.address:
            self.address = self.arena.allocate_beside(self.nbytes).address

    def _rebind(self, address: int) -> None:
        if address == self._bound:
            return
        self.context.order.enter_thread()
        self._bound = 0
        for patch in self.patchers:
            patch(address)
        self._bound = address


def is_here(array: Any, expected: Any) -> bool:
    """True for an array in the memory of the buffer's device, False for one that JAX moves there.

    Args:
        array: a plain array.
        expected: the sharding of arrays on the buffer's device.

    Raises:
        ValueError: the user has committed it to another device; the caller says so.
    """
    if array.sharding.device_set == expected.device_set:
        return array.sharding.memory_kind not in HOST_KINDS
    if array.committed:
        raise ValueError(f"wanted an array on {expected}, got one on {array.sharding}")
    return False


def _find_nothing() -> None:
    """Stands for a reference to no array."""


def _ignore(_value: Any) -> None:
    """Takes the value of an input that nothing reads."""
