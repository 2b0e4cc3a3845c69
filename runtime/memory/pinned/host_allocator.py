"""The caching host allocator: page-locked memory, kept for reuse, and never reused under a copy.

Goes past 400 lines because what is freed, reused and repaired is guarded by one lock.

Note [Copies that read pinned memory]
A copy from page-locked memory runs when its stream comes to it, long after the call that enqueued
it. So each copy is announced by `record_event`, and a block that is freed meanwhile is used again
only when the events behind its copies are over. The event is recorded at the copy, not when
the block is freed: blocks are freed by finalisers, which must not call the driver. A copy that a
graph has captured runs again at every replay; no event tells when the last one is over. So such a
block is kept until the private pool of that capture is released.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Callable

from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pinned.event_poller import EventPoller
from tracegraph.runtime.memory.pinned.host_block import (
    HostBlock,
    HostPool,
    HostPools,
    PendingBlocks,
    make_pageable_error,
    make_pin_error,
)
from tracegraph.runtime.memory.pinned.host_pages import HostPageProvider, PageSource
from tracegraph.runtime.memory.pinned.host_repair import repair
from tracegraph.runtime.memory.pinned.host_statistics import HostStatistics
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource, NoEvents
from tracegraph.runtime.memory.providers.segment import Segment

_allocators: weakref.WeakSet[CachingHostAllocator] = weakref.WeakSet()
_allocators_lock = threading.Lock()
# Of the host's memory: the driver locks whole pages.
PAGE_BYTES = 4096


class _Mending:
    """Has the next call repair what an interrupt leaves half done; used under the lock.

    Args:
        freed: what the next call looks at first.
    """

    def __init__(self, freed: collections.deque[HostBlock | None]) -> None:
        self._freed = freed

    def __enter__(self) -> None:
        """Begins a call."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends it."""
        if error is not None and not isinstance(error, TracegraphError):
            self._freed.appendleft(None)


class CachingHostAllocator:
    """Allocates page-locked memory by powers of two. Safe from several threads.

    Args:
        provider: page-locks memory.
        config: the options that begin with ``pinned_``.
        events: of the device; None where every copy is over when its call returns.

    Attributes:
        statistics: counts since it was made, see `HostStatistics`.

    Example:
        >>> from tracegraph.runtime.memory.pinned.host_pages import PlainPages
        >>> allocator = CachingHostAllocator(PlainPages())
        >>> block = allocator.allocate(40_000)
        >>> block.nbytes
        65536
        >>> allocator.free(block)
        >>> allocator.allocate(50_000) is block
        True
    """

    def __init__(
        self,
        provider: HostPageProvider,
        *,
        config: AllocatorConfig | None = None,
        events: EventSource | None = None,
    ) -> None:
        self.statistics = HostStatistics()
        self._config = config or AllocatorConfig()
        self._events: EventSource = events or NoEvents()
        self._source = PageSource(provider, self._config)
        self._pending = PendingBlocks(self._events)
        self._pools = HostPools()
        self._map = self._pools.map
        # None for an interrupt: the records are repaired.
        self._freed: collections.deque[HostBlock | None] = collections.deque()
        self._mending = _Mending(self._freed)
        self._surplus: collections.deque[HostBlock] = collections.deque()
        # Not re-entrant: what a finaliser does inside `allocate` must not find it free.
        self._lock = threading.Lock()
        # Held while memory is freed, when the other one is free.
        self._release_lock = threading.Lock()
        self._poller: EventPoller | None = None
        self._has_non_blocking = False
        # At interpreter exit the process frees all memory by itself.
        parts = (self._source, self._events, self._pools, self._pending)
        weakref.finalize(self, _close, *parts).atexit = False
        with _allocators_lock:
            _allocators.add(self)

    def __repr__(self) -> str:
        figures = self.statistics
        return (
            f"CachingHostAllocator(provider={self._source.provider.name}, "
            f"reserved={figures.allocated_bytes.current:,} bytes, "
            f"active={figures.active_bytes.current:,} bytes)"
        )

    @property
    def config(self) -> AllocatorConfig:
        """The settings."""
        return self._config

    @property
    def reserved_bytes(self) -> int:
        """Page-locked bytes held, in use or not."""
        return self.statistics.allocated_bytes.current

    def configure(self, config: AllocatorConfig) -> None:
        """Replaces all settings; memory that is held already stays as it is."""
        with self._lock:
            self._config = self._source.config = config
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.stop()

    def allocate(
        self,
        nbytes: int,
        stream: int = 0,
        *,
        is_non_blocking: bool = False,
        is_exact: bool = False,
    ) -> HostBlock:
        """Returns a block of at least ``nbytes`` bytes; its contents are undefined.

        Args:
            nbytes: wanted size, rounded up to a power of two unless it is to be exact.
            stream: for which it is; while that one is captured, the block comes from its pool.
            is_non_blocking: the user promises not to change it while copies read it.
            is_exact: round up to whole pages only, for what is large and lives long.

        Raises:
            OutOfMemoryError: the machine has no more memory that can be locked.
            InternalError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise make_pin_error(f"cannot pin {nbytes:,} bytes", "an array has zero bytes or more")
        size, block = _round_pages(nbytes) if is_exact else self._round_size(nbytes), None
        try:
            with self._lock, self._mending:
                self._reclaim()
                pool = self._pools.find_capturing(stream) or self._pools.common
                block = self._take(pool, size)
                if self._config.pinned_use_background_threads and self._poller is None:
                    self._poller = EventPoller(self)
            if self._surplus:
                self._release_surplus()
            block = block or self._reserve(size, pool)
        except BaseException:
            if block is not None:
                self.free_later(block)
            raise
        block.requested_bytes, block.is_non_blocking = nbytes, is_non_blocking
        self._has_non_blocking = self._has_non_blocking or is_non_blocking
        return block

    def free(self, block: HostBlock) -> None:
        """Frees a block, for reuse once all copies that read it are over.

        Raises:
            InternalError: the block was freed before, or is not of this allocator.
        """
        with self._lock, self._mending:
            if not block.is_allocated or self._map.blocks.get(block.address) is not block:
                raise make_pin_error(
                    f"cannot free the pinned block at {block.address:#x}: it is not in use",
                    "it was freed before or belongs to another allocator",
                )
            self._free(block)
        if self._surplus:
            self._release_surplus()

    def free_later(self, block: HostBlock) -> None:
        """Frees a block at the next call; never waits and never calls the driver.

        For finalisers, which may run anywhere, also in the middle of `allocate`.
        """
        self._freed.append(block)

    def record_event(self, block: HostBlock, stream: int) -> None:
        """Notes that the work enqueued so far on a stream reads the block.

        See Note [Copies that read pinned memory].

        Args:
            block: in use.
            stream: that the copy was put on.
        """
        with self._lock, self._mending:
            pool = self._pools.find_capturing(stream)
            if pool is not None and pool.pool_id is not None:
                pool.kept.add(block)
                block.captured_by.add(pool.pool_id)
                return
            event = self._events.record(stream)
            older = block.events.get(stream)
            block.events[stream] = event
            if older is not None:
                self._events.release(older)

    def synchronize(self, block: HostBlock) -> None:
        """Blocks the host until all copies so far that read the block are over."""
        with self._lock:
            events = list(block.events.values())
        for event in events:
            self._events.synchronize(event)

    def find_block(self, address: int) -> HostBlock | None:
        """Returns the block in use that an address lies in, None if there is none."""
        with self._lock, self._mending:
            self._drain()
            block = self._map.find(address)
            return block if block is not None and block.is_allocated else None

    def empty_cache(self) -> None:
        """Releases what is not in use; private pools of living graphs keep theirs."""
        with self._lock, self._mending:
            self._reclaim()
            for block in self._pools.common.take_all():
                self._discard(block)
        if self._surplus:
            self._release_surplus()

    def poll(self) -> None:
        """Makes blocks whose copies are over free again; every `allocate` does so too."""
        with self._lock, self._mending:
            self._reclaim()
        if self._surplus:
            self._release_surplus()

    def begin_allocate_to_pool(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Begins a capture: what its streams allocate comes from a private pool.

        Args:
            pool_id: of the capture; made when there is none.
            matches: whether a stream belongs to the capture.

        Raises:
            InternalError: a capture to this pool is under way.
        """
        with self._lock, self._mending:
            self._pools.begin(pool_id, matches)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Ends a capture; its pool stays until it is released."""
        with self._lock, self._mending:
            self._pools.end(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Ends one use of a private pool; after the last, its blocks join the common pool.

        No replay of a graph of the pool may be running or follow.
        """
        with self._lock, self._mending:
            for block in self._pools.release(pool_id):
                self._free(block)
        if self._surplus:
            self._release_surplus()

    def find_source(self, address: int, stream: int) -> HostBlock | None:
        """Returns the block of host memory that a copy to a device may read at any later time.

        Args:
            address: of host memory.
            stream: that the copy is put on.

        Returns:
            None for memory that the caller may change at once; it has to be copied at once.

        Raises:
            CaptureError: a capture of the stream is under way, and the memory is not page-locked.
        """
        # Most processes have no such block, and for the copy of a small array each step counts.
        if not self._has_non_blocking and not self._pools.is_any_capturing:
            return None
        block = self.find_block(address)
        with self._lock:
            is_captured = self._pools.find_capturing(stream) is not None
        if block is None and is_captured:
            raise make_pageable_error(address, stream)
        return block if block is not None and (block.is_non_blocking or is_captured) else None

    def _round_size(self, nbytes: int) -> int:
        limit_bytes = self._config.pinned_max_round_bytes
        if limit_bytes is not None and nbytes > limit_bytes:
            return nbytes
        return 1 << max(nbytes - 1, 0).bit_length()

    def _take(self, pool: HostPool, size: int) -> HostBlock | None:
        block = pool.take(size)
        if block is not None:
            self._mark_allocated(block)
        return block

    def _mark_allocated(self, block: HostBlock) -> None:
        self.statistics.count_request(block.nbytes)
        block.is_allocated = True

    def _reserve(self, size: int, pool: HostPool) -> HostBlock:
        """Page-locks a new block; the lock is free meanwhile, for it takes long."""
        try:
            segment = self._allocate_segment(size)
        except OutOfMemoryError:
            block = self._relieve(size, pool)
            if block is not None:
                return block
            segment = self._allocate_segment(size)
        block = None
        try:
            block = HostBlock(segment, pool)
            with self._lock, self._mending:
                self._map.add(block)
                self.statistics.count_block(size)
                self._mark_allocated(block)
        except BaseException:
            if block is not None and block.is_allocated:
                self.free_later(block)
            elif not self._source.is_reserved(segment):
                self._surplus.append(block or HostBlock(segment, pool))
            raise
        return block

    def _allocate_segment(self, size: int) -> Segment:
        segment = self._source.take_reserved(size)
        if segment is not None:
            return segment
        start = time.perf_counter_ns()
        segment = self._source.allocate(size)
        try:
            with self._lock:
                self.statistics.count_host_alloc((time.perf_counter_ns() - start) // 1000)
        except BaseException:
            self._source.free(segment)
            raise
        return segment

    def _relieve(self, size: int, pool: HostPool) -> HostBlock | None:
        """Waits for the pending copies; returns a block that fits, or empties the cache."""
        with self._lock, self._mending:
            if not self._pools.is_any_capturing:
                self._pending.synchronize()
            self._reclaim()
            block = self._take(pool, size)
            if block is not None:
                return block
        self.empty_cache()
        return None

    def _reclaim(self) -> None:
        self._drain()
        # Events must not be queried during a capture.
        if self._pools.is_any_capturing:
            return
        for block in self._pending.poll():
            self._put_back(block)

    def _drain(self) -> None:
        while self._freed:
            # It leaves the queue when that is done, for an interrupt may come in between.
            block = self._freed[0]
            if block is None:
                repair(self._pools, self._pending, self.statistics, self._surplus)
            elif block.is_allocated:
                self._free(block)
            self._freed.popleft()

    def _free(self, block: HostBlock) -> None:
        block.is_allocated = False
        # A block that graphs copy from is free again when their pools are released.
        if block.captured_by:
            return
        if block.events:
            self._pending.add(block)
            return
        self._put_back(block)

    def _put_back(self, block: HostBlock) -> None:
        self.statistics.count_end(block.nbytes)
        limit_bytes = self._config.pinned_max_cached_bytes
        if limit_bytes is not None and block.nbytes > limit_bytes:
            self._discard(block)
            return
        block.pool.put(block)

    def _discard(self, block: HostBlock) -> None:
        """Forgets a free block; its memory is freed once the lock is free."""
        if self._source.is_reserved(block.segment):
            block.pool.put(block)
            return
        self._surplus.append(block)
        self._map.remove(block)
        self.statistics.count_drop(block.nbytes)

    def _release_surplus(self) -> None:
        with self._release_lock:
            self._free_surplus()

    def _free_surplus(self) -> None:
        while self._surplus:
            start, segment = time.perf_counter_ns(), self._surplus[0].segment
            self._source.free(segment)
            # Without another call in between: Note [Interrupts].
            self._surplus.popleft()
            with self._lock:
                self.statistics.count_host_free((time.perf_counter_ns() - start) // 1000)


def _round_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES


def find_host_block(address: int) -> tuple[CachingHostAllocator, HostBlock] | None:
    """Returns the block in use that an address lies in, of any allocator of the process."""
    with _allocators_lock:
        allocators = list(_allocators)
    for allocator in allocators:
        block = allocator.find_block(address)
        if block is not None:
            return allocator, block
    return None


def _close(
    source: PageSource, events: EventSource, pools: HostPools, pending: PendingBlocks
) -> None:
    # No method: the finaliser must not point back to the allocator.
    pending.synchronize()
    pending.poll()
    for block in pools.map.blocks.values():
        for event in block.events.values():
            # A copy may still be reading it.
            events.synchronize(event)
            events.release(event)
        if not source.is_reserved(block.segment):
            source.free(block.segment)
    source.close()
    pools.clear()
