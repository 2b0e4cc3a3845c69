"""Blocks of page-locked host memory, the pools of free ones, and those that copies still read."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tracegraph.runtime.errors import CaptureError, InternalError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource
from tracegraph.runtime.memory.providers.segment import Segment


class HostBlock:
    """A piece of page-locked memory, in use until it is freed. Compares by identity.

    Attributes:
        segment: its memory; a block is a whole segment.
        address: of its first byte.
        nbytes: its size, a power of two unless it is very large.
        requested_bytes: what was requested last.
        pool: that it returns to.
        is_allocated: True until it is freed.
        is_non_blocking: its user promised not to change it while copies read it.
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
        "is_non_blocking",
        "nbytes",
        "pool",
        "requested_bytes",
        "segment",
    )

    def __init__(self, segment: Segment, pool: HostPool) -> None:
        self.segment, self.pool = segment, pool
        self.address, self.nbytes = segment.address, segment.nbytes
        self.requested_bytes = self.event_count = 0
        self.is_allocated = self.is_non_blocking = False
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
        matches: which streams allocate from it now; None outside of captures.
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


class BlockMap:
    """Finds the block that an address lies in."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self.blocks: dict[int, HostBlock] = {}

    def add(self, block: HostBlock) -> None:
        """Adds a block that overlaps no other."""
        self.blocks[block.address] = block
        bisect.insort(self._addresses, block.address)

    def remove(self, block: HostBlock) -> None:
        """Removes a block."""
        del self._addresses[bisect.bisect_left(self._addresses, block.address)]
        del self.blocks[block.address]

    def repair(self) -> None:
        """Makes the order of addresses anew."""
        self._addresses[:] = sorted(self.blocks)

    def find(self, address: int) -> HostBlock | None:
        """Returns the block of an address, None if it lies in no block."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        block = self.blocks[self._addresses[index]]
        return block if address < block.address + block.nbytes else None


class HostPools:
    """All blocks, and which pool serves a stream. Its owner holds a lock during every call.

    Attributes:
        map: all blocks, by address.
        common: serves everything outside of captures.
        is_any_capturing: True while a capture is under way.
    """

    def __init__(self) -> None:
        self.map = BlockMap()
        self.common = HostPool()
        self.is_any_capturing = False
        self._private: dict[PoolId, HostPool] = {}

    def find_capturing(self, stream: int) -> HostPool | None:
        """Returns the pool of the capture that a stream belongs to, None outside of captures."""
        for pool in self._private.values() if self.is_any_capturing else ():
            if pool.matches is not None and pool.matches(stream):
                return pool
        return None

    def begin(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Begins a capture; makes its pool if there is none.

        Raises:
            InternalError: a capture to this pool is under way.
        """
        pool = self._private.setdefault(pool_id, HostPool(pool_id))
        if pool.matches is not None:
            raise make_pin_error(
                f"pool {pool_id} is captured to already", "one capture uses a pool at a time"
            )
        pool.use_count += 1
        pool.matches = matches
        self.is_any_capturing = True

    def end(self, pool_id: PoolId) -> None:
        """Ends a capture; its pool stays.

        Raises:
            InternalError: there is no such pool.
        """
        self._find(pool_id).matches = None
        pools = self._private.values()
        self.is_any_capturing = any(pool.matches is not None for pool in pools)

    def release(self, pool_id: PoolId) -> list[HostBlock]:
        """Ends one use of a pool; after the last, its blocks belong to the common pool.

        Args:
            pool_id: of a private pool.

        Returns:
            Freed blocks that only graphs of this pool have copied from.

        Raises:
            InternalError: there is no such pool.
        """
        pool = self._find(pool_id)
        pool.use_count -= 1
        if pool.use_count:
            return []
        del self._private[pool_id]
        for block in pool.take_all():
            self.common.put(block)
        for block in self.map.blocks.values():
            if block.pool is pool:
                block.pool = self.common
        for block in pool.kept:
            block.captured_by.discard(pool_id)
        return [each for each in pool.kept if not each.is_allocated and not each.captured_by]

    def repair(self, surplus: Collection[HostBlock]) -> None:
        """Empties the free lists, and settles which pool each block belongs to.

        Args:
            surplus: blocks that leave the map.
        """
        for block in surplus:
            self.map.blocks.pop(block.address, None)
        self.map.repair()
        self.is_any_capturing = any(pool.matches is not None for pool in self._private.values())
        for pool in (self.common, *self._private.values()):
            pool.take_all()
        living = self._private.keys()
        for block in self.map.blocks.values():
            block.captured_by &= living
            if block.pool.pool_id not in living:
                block.pool = self.common
        for pool_id, pool in self._private.items():
            for block in pool.kept:
                block.captured_by.add(pool_id)

    def clear(self) -> None:
        """Forgets all blocks: a free block and its pool refer to each other."""
        for pool in (self.common, *self._private.values()):
            pool.take_all()
            pool.kept.clear()

    def _find(self, pool_id: PoolId) -> HostPool:
        pool = self._private.get(pool_id)
        if pool is None:
            raise make_pin_error(
                f"there is no pool {pool_id} of pinned memory", "it was released before"
            )
        return pool


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

    def repair(self, blocks: Iterable[HostBlock]) -> None:
        """Settles after an interrupt which of these blocks, all that there are, wait for events."""
        freed = {block: 0 for block in blocks if not block.is_allocated}
        for stream, queue in tuple(self._queues.items()):
            # A block that still has its events was interrupted while they were queued.
            kept = [entry for entry in queue if entry[1] in freed and not entry[1].events]
            for _, block in kept:
                freed[block] += 1
            self._queues[stream] = collections.deque(kept)
        for block, event_count in freed.items():
            block.event_count = event_count
            if block.events and not block.captured_by:
                self.add(block)

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


def make_pin_error(what: str, why: str) -> InternalError:
    """Returns the error of a caller that uses pinned memory wrongly."""
    return InternalError(
        what,
        where="caching host allocator",
        why=why,
    )


def make_pageable_error(address: int, stream: int) -> CaptureError:
    """Returns the error of a captured copy whose host memory is not page-locked."""
    return CaptureError(
        "a copy of ordinary host memory is captured",
        where=f"host address {address:#x}, stream {stream:#x}",
        why="the driver reads such memory during the call, but a graph copies at each replay",
        fix="copy the array with `tg.memory.pin_memory` first, and keep it alive",
        anchor="pinned",
    )
