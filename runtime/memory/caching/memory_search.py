"""MemorySearch: where an allocation finds memory when no free block fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.allocator_errors import refuse_request
from tracegraph.runtime.memory.caching.block import Block, BlockPool, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.expandable_blocks import grow
from tracegraph.runtime.memory.caching.pools import Pools
from tracegraph.runtime.memory.caching.reclaim import (
    collect_garbage,
    release_free,
    release_freeable,
    release_oversize,
)
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.history import Frames

# Device, bytes of the wanted segment, bytes that may be reserved at most, free bytes of the device.
OutOfMemoryObserver: TypeAlias = Callable[[int, int, int, int], None]


class Request(NamedTuple):
    """What an allocation wants.

    Attributes:
        pool: that serves it.
        nbytes: rounded size.
        segment_bytes: size of a new segment for it.
        stream: of the block.
        frames: call stack of the request, if one was recorded.
    """

    pool: BlockPool
    nbytes: int
    segment_bytes: int
    stream: int
    frames: Frames | None


class MemorySearch:
    """Asks one source after the other. Not locked: the allocator's lock guards it.

    Args:
        store: the blocks of the allocator.
        uses: blocks that other streams still read.
        pools: the private pools.
        device: its index.

    Attributes:
        free_memory_callbacks: each may free blocks, and says whether it has.
        observers: called before an out-of-memory error.
    """

    def __init__(self, store: BlockStore, uses: StreamUses, pools: Pools, device: int) -> None:
        self._store = store
        self._uses = uses
        self._pools = pools
        self._device = device
        self.free_memory_callbacks: list[Callable[[], bool]] = []
        self.observers: list[OutOfMemoryObserver] = []

    def find(self, request: Request) -> Block:
        """Returns a block in no list, at least as large as wanted.

        Raises:
            OutOfMemoryError: no source has one.
        """
        block = self._ask_callbacks(request)
        if block is not None:
            return block
        collect_garbage(self._store, request.frames)
        block = self._reserve(request)
        if block is None and self._rejects(request):
            self._store.statistics.num_oom_rejections += 1
            raise self._run_out(request)
        block = block or self._release_and_reserve(request) or self._borrow(request)
        if block is None:
            raise self._run_out(request)
        return block

    def release_cached(self, frames: Frames | None, *, keeps_default: bool = False) -> None:
        """Gives all free segments back that nobody needs, as soon as other streams allow it.

        Args:
            frames: call stack of the request, if one was recorded.
            keeps_default: the default pool keeps its own; it does so during a capture anyway.
        """
        if not keeps_default and not self._uses.is_capturing:
            self._synchronize(None)
            default = self._store.default
            release_free(self._store, (default.large, default.small), frames)
        for pool in self._pools.freeable:
            release_freeable(self._store, pool, frames)

    def release_pool(self, pool: Pool, frames: Frames | None) -> None:
        """Gives the free segments of one freeable pool back, as soon as other streams allow it."""
        if not self._uses.is_capturing:
            self._synchronize(pool)
        release_freeable(self._store, pool, frames)

    def _ask_callbacks(self, request: Request) -> Block | None:
        freed = [callback() for callback in self.free_memory_callbacks]
        if not any(freed):
            return None
        return self._store.take_free(request.pool, request.nbytes, request.stream)

    def _reserve(self, request: Request) -> Block | None:
        pool, nbytes, segment_bytes, stream, frames = request
        if self._store.uses_expandable(pool):
            return grow(self._store, pool, nbytes, segment_bytes, stream, frames)
        return self._store.reserve(pool, segment_bytes, stream, frames)

    def _rejects(self, request: Request) -> bool:
        is_beyond = self._store.exceeds_limit(request.segment_bytes)
        return is_beyond and self._store.config.throw_on_cudamalloc_oom

    def _release_and_reserve(self, request: Request) -> Block | None:
        pool, nbytes, _, stream, frames = request
        if release_oversize(self._store, pool, nbytes, stream, frames):
            block = self._reserve(request)
            if block is not None:
                return block
        if self._uses.is_capturing:
            return None
        self.release_cached(frames)
        self._store.statistics.num_alloc_retries += 1
        return self._reserve(request)

    def _borrow(self, request: Request) -> Block | None:
        if request.pool.owner.is_private:
            return None
        # One that nobody needs any more lends nothing: its memory may go back at any time.
        private = self._store.private.values()
        lenders = [pool for pool in private if pool.use_on_oom and pool.use_count]
        for lender in lenders:
            part = lender.small if request.pool.is_small else lender.large
            block = self._store.take_free(part, request.nbytes, request.stream)
            if block is not None:
                return block
        return None

    def _synchronize(self, pool: Pool | None) -> None:
        self._store.statistics.num_sync_all_streams += 1
        self._uses.synchronize_all(pool)

    def _run_out(self, request: Request) -> OutOfMemoryError:
        store, owner = self._store, request.pool.owner
        provider = owner.provider or store.provider
        free_bytes = provider.available_bytes()
        if store.history.is_enabled:
            store.history.note(
                "oom",
                0,
                request.nbytes,
                request.stream,
                owner.pool_id,
                request.frames,
                device_free=free_bytes,
            )
        store.statistics.num_ooms += 1
        total_bytes = provider.total_bytes()
        allowed_bytes = total_bytes if store.allowed_bytes is None else store.allowed_bytes
        for observer in self.observers:
            observer(self._device, request.segment_bytes, allowed_bytes, free_bytes)
        return refuse_request(store, request.segment_bytes, owner, self._device)
