"""DirectAllocator: an allocator that keeps nothing, each block a segment of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.memory.caching.allocator_errors import refuse_free, refuse_size
from tracegraph.runtime.memory.caching.block import Block, BlockPool
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.checkpoint import PoolCheckpoint, RestoredPool
from tracegraph.runtime.memory.caching.memory_search import MemorySearch, Request
from tracegraph.runtime.memory.caching.reclaim import release_freeable
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import EventSource, NoEvents, Provider
from tracegraph.runtime.memory.sizes import ABSURD_BYTES, SMALL_BYTES
from tracegraph.runtime.memory.statistics import Statistics


class DirectAllocator(CachingAllocator):
    """A CachingAllocator in everything but the cache: what is freed goes back to the provider.

    For providers that cache by themselves, as the driver's pool or a user's library, and for tools
    that find wrong accesses: a block has just the bytes that were asked for. A freed block that
    other streams still use goes back when they are done.

    Args:
        provider: where blocks come from.
        config: the settings; of those of the native backend only the memory fraction counts.
        events: of the device's streams; None for a device on which nothing runs asynchronously.
        device: its index.
        counts: keep statistics; without, as where caching is turned off, all figures stay 0.
        trim: what `empty_cache` calls, to empty the provider's own cache.

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
        config = _without_expandable(config or AllocatorConfig())
        super().__init__(provider, config=config, device=device)
        self._uses = StreamUses(events or NoEvents(), self._give_back)
        self._search = MemorySearch(self._store, self._uses, self._pools, device)
        self._counts, self._trim = counts, trim

    def __repr__(self) -> str:
        return f"DirectAllocator(device={self.device}, provider={self._store.provider.name})"

    @property
    def statistics(self) -> Statistics:
        """What was done so far; nothing but zeros unless the allocator counts."""
        return super().statistics if self._counts else Statistics()

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of ``nbytes`` bytes, at least 1; its contents are undefined.

        Args:
            nbytes: its size.
            stream: on which the block may be used without more ado.

        Raises:
            OutOfMemoryError: the provider has not that much, or the size is absurd.
            TracegraphError: the size is negative.
        """
        with self._store.lock:
            self._begin(stream)
            owner = self._pools.choose(stream)
            pool = owner.small if nbytes <= SMALL_BYTES else owner.large
            return self._allocate(pool, nbytes, stream)

    def allocate_exact(self, nbytes: int, pool_id: PoolId, stream: int = 0) -> Block:
        """Returns a block of a private pool: the arena of a graph.

        Args:
            nbytes: its size.
            pool_id: of a private pool.
            stream: on which the block may be used without more ado.

        Raises:
            OutOfMemoryError: the provider has not that much, or the size is absurd.
            TracegraphError: the size is negative, or there is no such pool.
        """
        with self._store.lock:
            self._begin(stream)
            return self._allocate(self._pools.find(pool_id).exact, nbytes, stream)

    def configure(self, config: AllocatorConfig) -> None:
        """Replaces all settings; of those of the native backend only the memory fraction counts."""
        super().configure(_without_expandable(config))

    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Puts back what other streams have finished with, and empties the provider's own cache.

        Args:
            pool_id: of a private pool; then the provider's own cache stays.
        """
        with self._store.lock:
            self._begin(0)
            for pool in self._pools.freeable:
                if pool_id in (None, pool.pool_id):
                    release_freeable(self._store, pool)
            if pool_id is None and self._trim is not None:
                self._trim()

    def get_checkpoint(self, pool_id: PoolId) -> PoolCheckpoint:
        """Refuses: where nothing is kept nothing can be brought back.

        Raises:
            UnsupportedError: always.
        """
        raise _refuse_checkpoint(pool_id)

    def set_checkpoint(
        self, pool_id: PoolId, state: PoolCheckpoint, stale: Iterable[Block] = ()
    ) -> RestoredPool:
        """Refuses, see `get_checkpoint`.

        Raises:
            UnsupportedError: always.
        """
        del state, stale
        raise _refuse_checkpoint(pool_id)

    def _allocate(self, pool: BlockPool, nbytes: int, stream: int) -> Block:
        if not 0 <= nbytes < ABSURD_BYTES:
            raise refuse_size(nbytes, self.device)
        frames = self.history.capture_frames() if self.history.is_enabled else None
        # No address is that of two blocks, also not of empty ones.
        size = max(nbytes, 1)
        block = self._search.find(Request(pool, size, size, stream, frames))
        return self._store.hand_out(block, size, nbytes, frames, splits=False)

    def _free(self, block: Block, frames: Frames | None) -> None:
        if not self._is_in_use(block):
            raise refuse_free(block, self.device)
        self._store.mark_freed(block, frames)
        if block.stream_uses:
            self._uses.defer(block)
        else:
            self._give_back(block, frames)

    def _give_back(self, block: Block, frames: Frames | None = None) -> None:
        self._store.put_back(block, frames)
        self._store.release(block, frames)
        owner = block.pool.owner
        if owner.is_private and not owner.use_count:
            release_freeable(self._store, owner)


def _without_expandable(config: AllocatorConfig) -> AllocatorConfig:
    return dataclasses.replace(config, expandable_segments=False)


def _refuse_checkpoint(pool_id: PoolId) -> UnsupportedError:
    return UnsupportedError(
        f"there are no checkpoints of pool {pool_id} without a cache",
        where="TRACEGRAPH_NO_MEMORY_CACHING, TRACEGRAPH_ALLOC_CONF or change_current_allocator",
        why="a checkpoint says which blocks of kept segments are live; here no segment is kept",
        fix="use the caching allocator: backend:native, and TRACEGRAPH_NO_MEMORY_CACHING unset",
        anchor="pool",
    )
