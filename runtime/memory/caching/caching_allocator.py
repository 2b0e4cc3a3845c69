"""CachingAllocator: one per device; keeps freed memory for reuse, with the rules of PyTorch's.

Order of an allocation: blocks whose events are over are put back. Then, each only if those before
it found nothing: best fit among the free blocks; callbacks that free memory; garbage collection and
a new segment; oversize segments released and a new segment; all cached segments released and a new
segment; pools that lend when memory runs out; the error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.checkpoint import (
    PoolCheckpoint,
    RestoredPool,
    restore_checkpoint,
    take_checkpoint,
)
from tracegraph.runtime.memory.caching.memory_search import (
    MemorySearch,
    OutOfMemoryObserver,
    Request,
    release_free,
)
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.caching.repair import repair
from tracegraph.runtime.memory.caching.segment_report import describe_segments
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.caching.used_blocks import UsedBlocks
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource, NoEvents, Provider
from tracegraph.runtime.memory.sizes import (
    ABSURD_BYTES,
    SMALL_BYTES,
    check_size,
    choose_segment_bytes,
    round_exact,
    round_size,
)
from tracegraph.runtime.memory.statistics import Statistics


class CachingAllocator:
    """An `Allocator` that keeps freed blocks for reuse. Safe from several threads.

    A block is reused on its own stream at once, since work of one stream runs in order. Other
    streams that use it are to be named with `record_stream`.

    Args:
        provider: where segments come from.
        config: the settings.
        events: of the device's streams; None for a device on which nothing runs asynchronously.
        device: its index.

    Attributes:
        device: as given.
        history: what happened, if it is recorded.
        provider: as given; private pools may have their own.
        lock: re-entrant; to be held where several calls belong together.
        pools: the private pools, and the captures that fill them.

    Example:
        >>> from tracegraph.runtime.memory.providers.host import HostProvider
        >>> allocator = CachingAllocator(HostProvider())
        >>> block = allocator.allocate(1000)
        >>> block.nbytes, allocator.statistics.to_dict()["reserved_bytes.all.current"]
        (1024, 2097152)
        >>> address = block.address
        >>> allocator.free(block)
        >>> allocator.allocate(600).address == address
        True
    """

    def __init__(
        self,
        provider: Provider,
        *,
        config: AllocatorConfig | None = None,
        events: EventSource | None = None,
        device: int = 0,
    ) -> None:
        store = BlockStore(provider, config or AllocatorConfig(), device)
        self._store, self._uses = store, StreamUses(events or NoEvents(), store.put_back)
        self.device, self.provider, self.history = device, provider, store.history
        self.lock, self.pools = store.lock, PoolRouter(store, self._uses)
        self._search = MemorySearch(store, self._uses, self.pools)
        release_pool = self._search.release_pool
        parts = (store, self._uses, self.pools)
        mend = functools.partial(repair, store, self._uses)
        self._used = UsedBlocks(*parts, store.put_back, release_pool, mend)
        self._noted = self._used.noted
        # At interpreter exit the process frees all memory by itself.
        weakref.finalize(self, store.close).atexit = False

    def __repr__(self) -> str:
        total = self.statistics.all
        return (
            f"CachingAllocator(device={self.device}, provider={self._store.provider.name}, "
            f"reserved={total.reserved_bytes.current:,} bytes, "
            f"allocated={total.allocated_bytes.current:,} bytes)"
        )

    @property
    def config(self) -> AllocatorConfig:
        """The settings."""
        return self._store.config

    @property
    def statistics(self) -> Statistics:
        """What was done so far, with the blocks that finalisers have returned."""
        with self.lock, self._used:
            return self._store.statistics

    @property
    def memory_fraction(self) -> float:
        """The share of the device that may be reserved, from 0 to 1."""
        return self._store.memory_fraction

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of at least ``nbytes`` bytes; its contents are undefined.

        Args:
            nbytes: wanted size, rounded up to 512 bytes or as the settings say.
            stream: on which the block may be used at once.

        Raises:
            OutOfMemoryError: no step found enough memory, or the size is absurd.
            TracegraphError: the size is negative.
        """
        if not 0 <= nbytes < ABSURD_BYTES:
            check_size(nbytes, self.device)
        history = self.history
        frames = history.capture_frames() if history.is_enabled else None
        block = None
        try:
            # `with`, for an interrupt may come between a call of `acquire` and the next statement.
            with self.lock:
                try:
                    if self._noted:
                        self._used.drain()
                    self._uses.advance(stream)
                    store = self._store
                    size = round_size(nbytes, store.config)
                    pool = self.pools.choose(stream) if self.pools.routes else store.default
                    size_class = pool.small if size <= SMALL_BYTES else pool.large
                    block = store.take_free(size_class, size, stream)
                    if block is None:
                        segment_bytes = choose_segment_bytes(size, store.config)
                        request = Request(size_class, size, segment_bytes, stream, frames)
                        block = self._search.find(request)
                    splits = store.has_worthy_rest(block, size)
                    block = store.mark_allocated(block, size, nbytes, frames, splits=splits)
                except BaseException as error:
                    self._used.note_interrupt(error)
                    raise
        except BaseException:
            self._used.free_unreturned(block)
            raise
        return block

    def allocate_exact(self, nbytes: int, pool_id: PoolId, stream: int = 0) -> Block:
        """Returns a block that is a whole segment of a private pool: the arena of a graph.

        Args:
            nbytes: wanted size, rounded up to 512 bytes, above 1 MiB to 32 KiB, above 128 MiB to
                2 MiB.
            pool_id: of a private pool.
            stream: on which the block may be used at once.

        Raises:
            OutOfMemoryError: no step found enough memory, or the size is absurd.
            TracegraphError: the size is negative, or there is no such pool.
        """
        check_size(nbytes, self.device)
        frames = self.history.capture_frames() if self.history.is_enabled else None
        block = None
        try:
            with self.lock, self._used:
                self._uses.advance(stream)
                size_class = self.pools.find(pool_id).exact
                size = round_exact(nbytes)
                block = self._store.take_free(size_class, size, stream)
                if block is None:
                    # Arenas are few and large: those too small are not kept beside a new one.
                    release_free(self._store, (size_class,), frames)
                    block = self._search.find(Request(size_class, size, size, stream, frames))
                block = self._store.mark_allocated(block, size, nbytes, frames, splits=False)
        except BaseException:
            self._used.free_unreturned(block)
            raise
        return block

    def free(self, block: Block) -> None:
        """Frees a block; it is kept for reuse, once no stream reads it any more.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        history = self.history
        frames = history.capture_free_frames() if history.is_enabled else None
        with self.lock:
            try:
                if self._noted:
                    self._used.drain()
                self._used.free(block, frames)
            except BaseException as error:
                self._used.note_interrupt(error)
                raise

    def free_later(self, block: Block) -> None:
        """Frees a block as soon as possible. For finalisers: see Note [Finalisers]."""
        self._used.free_later(block)

    def give_back_with(
        self, owner: object, items: Sequence[Block | PoolId], kept: object = None
    ) -> None:
        """Frees blocks, and ends uses of pools, as soon as possible after an object is gone.

        Args:
            owner: the object.
            items: the blocks and pools that it holds when it goes; it may add some until then.
            kept: what else must live until then.
        """
        self._used.give_back_with(owner, items, (self, kept))

    def release_pool_later(self, pool_id: PoolId) -> None:
        """Counts one user of a private pool less, and releases what it leaves. For finalisers."""
        self._used.release_pool_later(pool_id)

    def pool_bytes(self, pool_id: PoolId) -> tuple[int, int]:
        """Returns the reserved and the allocated bytes of a private pool.

        Raises:
            TracegraphError: there is no such pool.
        """
        with self.lock, self._used:
            return self.pools.count_bytes(pool_id)

    def find_block(self, address: int) -> Block:
        """Returns the block in use that begins at an address.

        Raises:
            TracegraphError: there is none.
        """
        return self._used.find(address)

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses a block: after `free`, reuse waits for that stream.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        self._used.record_stream(block, stream)

    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Releases free segments to the provider.

        Args:
            pool_id: of a private pool without users, for its segments only; None for all segments
                of the default pool and of such pools. During a capture, or while requests go to a
                private pool, only the latter.
        """
        frames = self.history.capture_free_frames() if self.history.is_enabled else None
        with self.lock, self._used:
            if pool_id is None:
                self._search.release_cached(frames, keeps_default=bool(self.pools.routes))
                return
            pool = self.pools.find_freeable(pool_id)
            if pool is not None:
                self._search.release_pool(pool, frames)

    def configure(self, config: AllocatorConfig) -> None:
        """Replaces all settings; blocks that exist stay as they are."""
        with self.lock:
            before = self.config
            self._store.set_config(config)
            if config.per_process_memory_fraction != before.per_process_memory_fraction:
                self._store.set_memory_fraction(config.per_process_memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved.

        Args:
            fraction: share of the device's memory, from 0 to 1; 1 for no limit.

        Raises:
            ConfigError: it is no such number.
        """
        with self.lock:
            self._store.set_memory_fraction(fraction)

    def add_free_memory_callback(self, callback: Callable[[], bool]) -> None:
        """Has ``callback`` called, under the lock, before a new segment is reserved.

        Args:
            callback: may free blocks, and says whether it has.
        """
        with self.lock:
            self._search.free_memory_callbacks.append(callback)

    def add_out_of_memory_observer(self, observer: OutOfMemoryObserver) -> None:
        """Has ``observer`` called, under the lock, before an out-of-memory error.

        Args:
            observer: gets the device, the bytes of the wanted segment, the most that may be
                reserved, and the free bytes of the device.
        """
        with self.lock:
            self._search.observers.append(observer)

    def get_checkpoint(self, pool_id: PoolId) -> PoolCheckpoint:
        """Returns which blocks of a private pool are live.

        Raises:
            TracegraphError: there is no such pool, or it has no users.
        """
        with self.lock, self._used:
            return take_checkpoint(self._store, self.pools.find_used(pool_id))

    def set_checkpoint(
        self, pool_id: PoolId, state: PoolCheckpoint, stale: Iterable[Block] = ()
    ) -> RestoredPool:
        """Makes exactly the blocks of a checkpoint live again, at their old places.

        Args:
            pool_id: of the pool.
            state: of `get_checkpoint`.
            stale: live blocks whose owners lose them: when such an owner frees, nothing happens.

        Raises:
            TracegraphError: segments of the checkpoint are not in the pool any more, or a
                stale block is not live.
        """
        with self.lock, self._used:
            pool, lost = self.pools.find_used(pool_id), tuple(stale)
            before = frozenset(self._used.list_live(pool_id))
            try:
                restored = restore_checkpoint(self._store, self._uses, pool, state, lost)
            except BaseException:
                self._used.abandon(pool_id, before)
                raise
            self._used.lose(lost)
            return restored

    def snapshot(self, pool_id: PoolId | None = None) -> list[dict[str, Any]]:
        """Returns all segments with their blocks, in the keys of a snapshot file.

        Args:
            pool_id: only the segments of this private pool; None for those of all pools.
        """
        with self.lock, self._used:
            return describe_segments(self._store, pool_id)
