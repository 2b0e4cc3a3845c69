"""Blocks of page-locked host memory: what is free, by size, and what copies are still reading."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource
from tracegraph.runtime.memory.providers.segment import Segment


class HostBlock:
    """A piece of page-locked memory, in use until it is freed. Compares by identity.

    Attributes:
        segment: its memory; a block is a whole segment.
        address: of its first byte.
        nbytes: its size, a power of two unless it is very large.
        requested_bytes: what was asked for last.
        pool: that it returns to.
        is_allocated: True until it is freed.
        is_direct: its user promised not to change it while copies read it.
        events: one event per stream, behind the last copy there that reads it.
        captured_by: pools whose graphs copy from it at every replay.
        event_count: events that a freed block still waits for.
    """

    __slots__ = (
        "address",
        "captured_by",
        "event_count",
        "events",
        "is_allocated",
        "is_direct",
        "nbytes",
        "pool",
        "requested_bytes",
        "segment",
    )

    def __init__(self, segment: Segment, pool: HostPool) -> None:
        self.segment, self.pool = segment, pool
        self.address, self.nbytes = segment.address, segment.nbytes
        self.requested_bytes = self.event_count = 0
        self.is_allocated = self.is_direct = False
        self.events: dict[int, Any] = {}
        self.captured_by: set[PoolId] = set()

    def __repr__(self) -> str:
        state = "allocated" if self.is_allocated else "free"
        return f"HostBlock({self.address:#x}, {self.nbytes:,} bytes, {state})"


class HostPool:
    """Free blocks by their size: the common pool, or the private one of captures.

    Attributes:
        pool_id: of a private pool; None for the common one.
        use_count: graphs and contexts that hold it.
        matches: which streams allocate from it at present; None outside of captures.
        kept: blocks that graphs of this pool copy from.
    """

    def __init__(self, pool_id: PoolId | None = None) -> None:
        self.pool_id = pool_id
        self.use_count = 0
        self.matches: Callable[[int], bool] | None = None
        self.kept: set[HostBlock] = set()
        self._free: dict[int, list[HostBlock]] = collections.defaultdict(list)

    def take(self, nbytes: int) -> HostBlock | None:
        """Returns the block of exactly this size that became free last, None if there is none."""
        blocks = self._free.get(nbytes)
        return blocks.pop() if blocks else None

    def put(self, block: HostBlock) -> None:
        """Keeps a free block for the next request of its size."""
        self._free[block.nbytes].append(block)

    def take_all(self) -> list[HostBlock]:
        """Returns all free blocks, which leave the pool."""
        blocks = [block for same in self._free.values() for block in same]
        self._free.clear()
        return blocks


class PendingBlocks:
    """Freed blocks that copies are still reading: one queue per stream, in the order of the stream.

    Args:
        events: of the device.
    """

    def __init__(self, events: EventSource) -> None:
        self._events = events
        self._queues: dict[int, collections.deque[tuple[Any, HostBlock]]] = {}

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def add(self, block: HostBlock) -> None:
        """Takes a freed block with the events that it has."""
        block.event_count = len(block.events)
        for stream, event in block.events.items():
            self._queues.setdefault(stream, collections.deque()).append((event, block))
        block.events = {}

    def poll(self) -> list[HostBlock]:
        """Returns the blocks whose copies are all done; never waits."""
        done = []
        for queue in self._queues.values():
            # A slow stream holds up its own blocks only.
            while queue and self._events.is_done(queue[0][0]):
                event, block = queue.popleft()
                self._events.release(event)
                block.event_count -= 1
                if not block.event_count:
                    done.append(block)
        return done

    def synchronize(self) -> None:
        """Blocks the host until all copies are done; a later `poll` returns the blocks."""
        for queue in self._queues.values():
            for event, _ in queue:
                self._events.synchronize(event)


class BlockMap:
    """Finds the block that an address lies in."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self.blocks: dict[int, HostBlock] = {}

    def add(self, block: HostBlock) -> None:
        """Adds a block that overlaps no other."""
        bisect.insort(self._addresses, block.address)
        self.blocks[block.address] = block

    def remove(self, block: HostBlock) -> None:
        """Removes a block."""
        del self.blocks[block.address]
        del self._addresses[bisect.bisect_left(self._addresses, block.address)]

    def find(self, address: int) -> HostBlock | None:
        """Returns the block of an address, None if it lies in no block."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        block = self.blocks[self._addresses[index]]
        return block if address < block.address + block.nbytes else None
