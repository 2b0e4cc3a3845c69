"""Host reads: small values reach the host straight from the stream, without a detour through XLA.

XLA hands a copy to the host from thread to thread, and first wants the array defined anew: 0.6
milliseconds after the kernel that made the value. A copy into page-locked memory, on the stream
that graphs are launched on, is there 10 microseconds after it.
"""

from __future__ import annotations

import collections
import ctypes
from typing import Any

import numpy as np

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.cuda.memory.staging import SMALLEST_CHUNK_BYTES
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pinned.host_block import HostBlock


class HostRead:
    """A copy to the host that was begun.

    Args:
        reads: that began it.
        block: of page-locked memory, which the stream writes.
        event: recorded behind the copy.
        aval: shape and dtype of the value.
    """

    __slots__ = ("_aval", "_block", "_event", "_reads")

    def __init__(self, reads: HostReads, block: HostBlock, event: int, aval: Any) -> None:
        self._aval, self._event, self._reads = aval, event, reads
        self._block: HostBlock | None = block

    def finish(self) -> np.ndarray[Any, Any]:
        """Waits for the copy, and returns the value; to be called once.

        Raises:
            CudaError: work before it has failed on the GPU.
        """
        block, aval = self._block, self._aval
        assert block is not None
        self._reads.events.synchronize(self._event)
        content = ctypes.string_at(block.address, aval.size * aval.dtype.itemsize)
        self._block = None
        self._reads.recycle(block, self._event)
        # An array over bytes is read-only.
        return np.ndarray(aval.shape, aval.dtype, content)

    def __del__(self) -> None:
        # No call of the driver or an allocator here, see Note [Finalisers] of `Arena`.
        try:
            if self._block is not None:
                self._reads.dropped.append((self._block, self._event))
        except AttributeError:
            # Made by half: nothing was begun that it would have to end.
            return


class HostReads:
    """Copies values of one GPU to the host. Safe from several threads.

    Args:
        order: of the GPU's work.
        allocator: of page-locked memory.

    Attributes:
        events: behind the copies.
        dropped: reads that were never finished; the stream may still write their memory.
    """

    def __init__(self, order: JaxOrder, allocator: CachingHostAllocator) -> None:
        self._order, self._allocator = order, allocator
        self.events = CudaEvents(order.driver)
        self.dropped: collections.deque[tuple[HostBlock, int]] = collections.deque()

    def start(self, address: int, aval: Any) -> HostRead:
        """Begins to read a value after all work that was enqueued so far.

        Args:
            address: of the first byte; it may be written again by later work.
            aval: shape and dtype; it has at least one byte.

        Raises:
            OutOfMemoryError: the machine has no more page-locked memory.
        """
        order, nbytes = self._order, aval.size * aval.dtype.itemsize
        with order.use_context():
            self._collect()
            # Of a size that copies to the GPU take, too.
            block = self._allocator.allocate(max(nbytes, SMALLEST_CHUNK_BYTES))
            try:
                order.driver.copy_async(block.address, address, nbytes, order.stream)
                event = self.events.record(order.stream)
            except BaseException:
                # No event knows of the copy; the block may serve again only after it.
                order.synchronize()
                self._allocator.free(block)
                raise
        return HostRead(self, block, event, aval)

    def recycle(self, block: HostBlock, event: int) -> None:
        """Takes back what a read that is over has used."""
        self.events.release(event)
        self._allocator.free(block)

    def _collect(self) -> None:
        """Takes back what was dropped and is written by now."""
        for _ in range(len(self.dropped)):
            try:
                block, event = self.dropped.popleft()
            except IndexError:
                return
            if self.events.is_done(event):
                self.recycle(block, event)
            else:
                self.dropped.append((block, event))
