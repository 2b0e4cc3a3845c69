"""CudaContext: what buffers of one GPU share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.arrays.array_parts import PartRows
from tracegraph.runtime.cuda.driver.calls import CopyRows
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.held_memory import HeldMemory
from tracegraph.runtime.cuda.memory.host_reads import HostRead, HostReads
from tracegraph.runtime.cuda.memory.pinned_pages import find_pinned_allocator
from tracegraph.runtime.cuda.memory.staging import Staging
from tracegraph.runtime.definition.packing import is_packable
from tracegraph.runtime.jax_interop import ArrayImpl, to_row_major
from tracegraph.runtime.streams.stream import Stream

_get_pointer = ArrayImpl.unsafe_buffer_pointer
# Origins of arrays that are remembered.
MAX_KNOWN = 64
# Of values that are read here; JAX reads larger ones. Reads above this were not tried.
LARGEST_READ_BYTES = 1 << 20


class CudaContext:
    """The driver, the order with JAX's work, the staging memory and what is held for streams.

    Args:
        jax_device: a GPU of JAX.
        order: of JAX's work on it and ours.
    """

    def __init__(self, jax_device: Any, order: JaxOrder) -> None:
        self.jax_device, self.order = jax_device, order
        self.driver = order.driver
        self.pinned = find_pinned_allocator(self.driver, order.primary)
        self.staging = Staging(self.driver, order.stream, self.pinned)
        self.held = HeldMemory(order)
        self._reads = HostReads(order, self.pinned)
        # What says that an array is here: arrays of one origin share the object. It is held, so
        # that no other gets its id.
        self._known: dict[int, Any] = {}

    def synchronize(self) -> None:
        """Blocks the host until all work that was enqueued so far is done."""
        self.order.synchronize()

    def is_idle(self) -> bool:
        """True when all work that was enqueued so far is done."""
        return self.order.is_idle()

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocator's number of a stream, and registers the stream."""
        return self.order.number_stream(stream)

    def start_read(self, address: int, aval: Any) -> HostRead | None:
        """Begins to copy a small value to the host, see `HostReads`; None for one that is not."""
        nbytes = aval.size * aval.dtype.itemsize
        if not 0 < nbytes <= LARGEST_READ_BYTES or is_packable(aval.dtype):
            return None
        return self._reads.start(address, aval)

    def hold(self, array: Any, memory: Any, stream: Stream) -> None:
        """Keeps memory of JAX's own for a stream of the user, see `HeldMemory`."""
        self.held.record(array, memory, stream)

    def make_overwriter(self, array: Any) -> Callable[[Any], None] | None:
        """Returns what copies values into the memory of a plain array, see `InputWriter`."""
        order, copy, stream = self.order, self.driver.copy_async, self.order.stream
        try:
            order.await_array(array)
        except RuntimeError:
            # It was deleted, or never made.
            return None
        target, nbytes, dtype = _get_pointer(array), array.nbytes, array.dtype
        known, thread, primary = self._known, order.thread, order.primary

        # Between two replays: short for an array on this GPU, see Note [Hot path].
        def overwrite(value: Any) -> None:
            if type(value) is not ArrayImpl or id(value.sharding) not in known:
                if not isinstance(value, jax.Array):
                    self.stage(np.ascontiguousarray(np.asarray(value, dtype=dtype)), target)
                    return
                value = self._bring(value)
            value = to_row_major(value)
            order.await_array(value)
            if thread.context != primary:
                order.enter_thread()
            if nbytes:
                copy(target, _get_pointer(value), nbytes, stream)

        return overwrite

    def copy_part(self, part: int, whole: int, rows: PartRows, *, is_cut: bool) -> None:
        """Enqueues a copy of the first part of an array into the whole, or, cut, out of it.

        Args:
            part: address of the part, whose rows are side by side.
            whole: address of the whole array.
            rows: of the part.
            is_cut: True when the part is written.
        """
        if not rows.count * rows.nbytes:
            return
        target, source = (part, whole) if is_cut else (whole, part)
        order = self.order
        order.enter_thread()
        if rows.count == 1:
            self.driver.copy_async(target, source, rows.nbytes, order.stream)
            return
        pitches = (rows.nbytes, rows.pitch_bytes)
        target_pitch, source_pitch = pitches if is_cut else pitches[::-1]
        copy = CopyRows(target, target_pitch, source, source_pitch, rows.nbytes, rows.count)
        self.driver.copy_rows_async(copy, order.stream)

    def _bring(self, array: Any) -> Any:
        """Returns an array of the same value on this GPU, and remembers arrays of its origin."""
        if array.devices() != {self.jax_device}:
            # JAX orders its copy with the work of both devices.
            return jax.device_put(array, self.jax_device)
        if type(array) is ArrayImpl and len(self._known) < MAX_KNOWN:
            self._known[id(array.sharding)] = array.sharding
        return array

    def copy_array(self, array: Any, target: int, nbytes: int) -> None:
        """Enqueues a copy of a plain array on this GPU, which may still be on its way."""
        array = to_row_major(array)
        self.order.await_array(array)
        self.copy(target, _get_pointer(array), nbytes)

    def load(self, content: bytes, target: int) -> None:
        """Enqueues a copy of host bytes to a device address."""
        self.stage(np.frombuffer(content, np.uint8), target)

    def stage(self, array: np.ndarray[Any, Any], target: int) -> None:
        """Enqueues a copy of a contiguous host array, which the caller may change at once."""
        with self.order.use_context():
            self.staging.copy(array, target)

    def fill(self, target: int, value: int, nbytes: int) -> None:
        """Enqueues setting every byte of a device range after all work so far."""
        with self.order.use_context():
            self.driver.fill_async(target, value, 1, nbytes, self.order.stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueues a copy between device addresses after all work so far."""
        if not nbytes:
            return
        with self.order.use_context():
            self.driver.copy_async(target, source, nbytes, self.order.stream)
