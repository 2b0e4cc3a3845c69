"""DirectAllocator: an allocator without a cache, each block a segment of its own."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.runtime.memory.caching.block import Block, Pool, SizeClass
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.memory_search import (
    MemorySearch,
    Request,
    release_free,
    release_freeable,
)
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.caching.repair import repair
from tracegraph.runtime.memory.caching.segment_report import describe_segments
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.caching.used_blocks import UsedBlocks
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource, NoEvents, Provider
from tracegraph.runtime.memory.sizes import SMALL_BYTES, check_size
from tracegraph.runtime.memory.statistics import Statistics


class DirectAllocator:
    """An `Allocator` that caches nothing: what is freed returns to the provider.

    For providers that cache by themselves, as the driver's pool or a user's library, and for tools
    that find wrong accesses: a block has just the bytes that were requested. A freed block that
    other streams still use is released when they are done. There are no checkpoints of pools,
    which say which blocks of cached segments are live.

    Args:
        provider: where blocks come from.
        config: the settings; of those of the native backend only the memory fraction counts.
        events: of the device's streams; None for a device on which nothing runs asynchronously.
        device: its index.
        counts: keep statistics; without, as where caching is turned off, all figures stay 0.
        trim: what `empty_cache` calls, to empty the provider's own cache.

    Attributes:
        device: as given.
        history: what happened, if it is recorded.
        provider: as given; private pools may have their own.
        lock: re-entrant; to be held where several calls belong together.
        pools: the private pools, and the captures that fill them.

    Example:
        >>> from tracegraph.runtime.memory.providers.host import HostProvider
        >>> provider = HostProvider()
        >>> allocator = DirectAllocator(provider)
        >>> block = allocator.allocate(1000)
        >>> block.nbytes, provider.reserved_bytes
        (1000, 1000)
        >>> allocator.free(block)
        >>> provider.reserved_bytes
        0
    """

    def __init__(
        self,
        provider: Provider,
        *,
        config: AllocatorConfig | None = None,
        events: EventSource | None = None,
        device: int = 0,
        counts: bool = False,
        trim: Callable[[], None] | None = None,
    ) -> None:
        config = dataclasses.replace(config or AllocatorConfig(), expandable_segments=False)
        store = BlockStore(provider, config, device)
        # Of the parts only: none of them refers to the allocator.
        put_back = functools.partial(_put_back_and_release, store)
        self._store, self._uses = store, StreamUses(events or NoEvents(), put_back)
        self.device, self.provider, self.history = device, provider, store.history
        self.lock, self.pools = store.lock, PoolRouter(store, self._uses)
        self._search = MemorySearch(store, self._uses, self.pools)
        release_pool = functools.partial(_release_pool, store, self._uses)
        parts = (store, self._uses, self.pools)
        mend = functools.partial(_repair_and_release, store, self._uses)
        self._used = UsedBlocks(*parts, put_back, release_pool, mend)
        self._counts, self._trim = counts, trim
        # At interpreter exit the process frees all memory by itself.
        weakref.finalize(self, store.close).atexit = False

    def __repr__(self) -> str:
        return f"DirectAllocator(device={self.device}, provider={self.provider.name})"

    @property
    def config(self) -> AllocatorConfig:
        """The settings."""
        return self._store.config

    @property
    def statistics(self) -> Statistics:
        """What was done so far; nothing but zeros unless the allocator counts."""
        with self.lock, self._used:
            return self._store.statistics if self._counts else Statistics()

    @property
    def memory_fraction(self) -> float:
        """The share of the device that may be reserved, from 0 to 1."""
        return self._store.memory_fraction

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved, see `CachingAllocator.set_memory_fraction`.

        Raises:
            ConfigError: it is no number from 0 to 1.
        """
        with self.lock:
            self._store.set_memory_fraction(fraction)

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of ``nbytes`` bytes, at least 1; its contents are undefined.

        Args:
            nbytes: its size.
            stream: on which the block may be used at once.

        Raises:
            OutOfMemoryError: the provider has too little memory, or the size is absurd.
            TracegraphError: the size is negative.
        """
        block = None
        try:
            with self.lock, self._used:
                self._uses.advance(stream)
                pool = self.pools.choose(stream)
                size_class = pool.small if nbytes <= SMALL_BYTES else pool.large
                block = self._allocate(size_class, nbytes, stream)
        except BaseException:
            self._used.free_unreturned(block)
            raise
        return block

    def allocate_exact(self, nbytes: int, pool_id: PoolId, stream: int = 0) -> Block:
        """Returns a block of a private pool: the arena of a graph.

        Args:
            nbytes: its size.
            pool_id: of a private pool.
            stream: on which the block may be used at once.

        Raises:
            OutOfMemoryError: the provider has too little memory, or the size is absurd.
            TracegraphError: the size is negative, or there is no such pool.
        """
        block = None
        try:
            with self.lock, self._used:
                self._uses.advance(stream)
                block = self._allocate(self.pools.find(pool_id).exact, nbytes, stream)
        except BaseException:
            self._used.free_unreturned(block)
            raise
        return block

    def free(self, block: Block) -> None:
        """Frees a block; its memory is released, once no stream reads it any more.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        frames = self.history.capture_free_frames() if self.history.is_enabled else None
        with self.lock, self._used:
            self._used.free(block, frames)

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
        """Notes that another stream uses a block: its release waits for that stream.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        self._used.record_stream(block, stream)

    def empty_cache(self) -> None:
        """Releases what other streams have finished with, and empties the provider's own cache."""
        with self.lock, self._used:
            self._uses.advance(0)
            for pool in self.pools.freeable:
                release_freeable(self._store, pool)
            if self._trim is not None:
                self._trim()

    def snapshot(self, pool_id: PoolId | None = None) -> list[dict[str, Any]]:
        """Returns all segments with their blocks, in the keys of a snapshot file.

        Args:
            pool_id: only the segments of this private pool; None for those of all pools.
        """
        with self.lock, self._used:
            return describe_segments(self._store, pool_id)

    def _allocate(self, size_class: SizeClass, nbytes: int, stream: int) -> Block:
        check_size(nbytes, self.device)
        frames = self.history.capture_frames() if self.history.is_enabled else None
        # No address is that of two blocks, also not of empty ones.
        size = max(nbytes, 1)
        block = self._search.find(Request(size_class, size, size, stream, frames))
        return self._store.mark_allocated(block, size, nbytes, frames, splits=False)


def _put_back_and_release(store: BlockStore, block: Block, frames: Frames | None = None) -> None:
    store.put_back(block, frames)
    store.release(block, frames)
    pool = store.private.get(block.size_class.pool_id)
    if pool is not None and not pool.use_count:
        release_freeable(store, pool)


def _repair_and_release(store: BlockStore, uses: StreamUses) -> None:
    repair(store, uses)
    for pool in (store.default, *store.private.values()):
        release_free(store, pool.size_classes)


def _release_pool(store: BlockStore, uses: StreamUses, pool: Pool, _: Frames | None) -> None:
    uses.advance(0)
    release_freeable(store, pool)
