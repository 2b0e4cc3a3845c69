"""HostValues: the page-locked memory of what a graph keeps in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from tracegraph.runtime.definition.graph import BufferSlot
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator


class HostValues:
    """Page-locked memory of one graph, freed when the graph and its buffers are gone.

    Kernels and memcpys reach it at the address that the host has for it. The memory means nothing
    between two replays, but copies of the last one may still be under way when the graph goes: so
    each launch is noted, and the allocator waits for it.

    Args:
        allocator: of page-locked memory.
        slots: what is in host memory, at least one.

    Attributes:
        address: of the first byte.
        nbytes: how many, from there on.
    """

    def __init__(self, allocator: CachingHostAllocator, slots: Sequence[BufferSlot]) -> None:
        self._start = min(slot.offset for slot in slots)
        self.nbytes = max(slot.offset + slot.nbytes for slot in slots) - self._start
        self._allocator, self._block = allocator, allocator.allocate(self.nbytes, is_exact=True)
        self.address = self._block.address
        weakref.finalize(self, allocator.free_later, self._block).atexit = False

    def locate(self, slot: BufferSlot) -> int:
        """Returns the address of the first byte of a slot."""
        return self.address + slot.offset - self._start

    def note_launch(self, stream: int) -> None:
        """Notes that the work enqueued so far on a stream uses the memory."""
        self._allocator.record_event(self._block, stream)
