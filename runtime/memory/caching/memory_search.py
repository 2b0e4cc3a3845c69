"""MemorySearch: where an allocation finds memory when no free block fits, and what is released."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block, Pool, SizeClass
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.expandable_blocks import expand, shrink
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID
from tracegraph.runtime.memory.providers.provider import Provider
from tracegraph.runtime.memory.sizes import format_size

# Device, bytes of the wanted segment, bytes that may be reserved at most, free bytes of the device.
OutOfMemoryObserver: TypeAlias = Callable[[int, int, int, int], None]


class Request(NamedTuple):
    """What an allocation wants.

    Attributes:
        size_class: that serves it.
        nbytes: rounded size.
        segment_bytes: size of a new segment for it.
        stream: of the block.
        frames: call stack of the request, if one was recorded.
    """

    size_class: SizeClass
    nbytes: int
    segment_bytes: int
    stream: int
    frames: Frames | None


class MemorySearch:
    """Tries one source after the other. Not locked: the allocator's lock guards it.

    Args:
        store: the blocks of the allocator.
        uses: blocks that other streams still read.
        pools: the private pools.

    Attributes:
        free_memory_callbacks: each may free blocks, and says whether it has.
        observers: called before an out-of-memory error.
    """

    def __init__(self, store: BlockStore, uses: StreamUses, pools: PoolRouter) -> None:
        self._store = store
        self._uses = uses
        self._pools = pools
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
            raise self._make_noted_error(request)
        block = block or self._release_and_reserve(request) or self._borrow(request)
        if block is None:
            raise self._make_noted_error(request)
        return block

    def release_cached(self, frames: Frames | None, *, keeps_default: bool = False) -> None:
        """Releases all free segments without users, as soon as other streams allow it.

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
        """Releases the free segments of one freeable pool, as soon as other streams allow it."""
        if not self._uses.is_capturing:
            self._synchronize(pool)
        release_freeable(self._store, pool, frames)

    def _ask_callbacks(self, request: Request) -> Block | None:
        freed = [callback() for callback in self.free_memory_callbacks]
        if not any(freed):
            return None
        return self._store.take_free(request.size_class, request.nbytes, request.stream)

    def _reserve(self, request: Request) -> Block | None:
        size_class, nbytes, segment_bytes, stream, frames = request
        if self._store.uses_expandable(size_class):
            return expand(self._store, size_class, nbytes, segment_bytes, stream, frames)
        return self._store.reserve(size_class, segment_bytes, stream, frames)

    def _rejects(self, request: Request) -> bool:
        is_beyond = self._store.exceeds_limit(request.segment_bytes)
        return is_beyond and self._store.config.throw_on_cudamalloc_oom

    def _release_and_reserve(self, request: Request) -> Block | None:
        size_class, nbytes, _, stream, frames = request
        if release_oversize(self._store, size_class, nbytes, stream, frames):
            block = self._reserve(request)
            if block is not None:
                return block
        if self._uses.is_capturing:
            return None
        self.release_cached(frames)
        self._store.statistics.num_alloc_retries += 1
        return self._reserve(request)

    def _borrow(self, request: Request) -> Block | None:
        if request.size_class.pool_id != DEFAULT_POOL_ID:
            return None
        # One without users lends nothing: its memory may be released at any time.
        private = self._store.private.values()
        lenders = [pool for pool in private if pool.use_on_oom and pool.use_count]
        for lender in lenders:
            size_class = lender.small if request.size_class.is_small else lender.large
            block = self._store.take_free(size_class, request.nbytes, request.stream)
            if block is not None:
                return block
        return None

    def _synchronize(self, pool: Pool | None) -> None:
        self._store.statistics.num_sync_all_streams += 1
        self._uses.synchronize_all(pool)

    def _make_noted_error(self, request: Request) -> OutOfMemoryError:
        store, size_class = self._store, request.size_class
        provider = size_class.provider or store.provider
        free_bytes = provider.available_bytes()
        if store.history.is_enabled:
            store.history.note(
                "oom",
                0,
                request.nbytes,
                request.stream,
                size_class.pool_id,
                request.frames,
                device_free=free_bytes,
            )
        store.statistics.num_ooms += 1
        total_bytes = provider.total_bytes()
        allowed_bytes = total_bytes if store.allowed_bytes is None else store.allowed_bytes
        for observer in self.observers:
            observer(store.device, request.segment_bytes, allowed_bytes, free_bytes)
        return _make_memory_error(store, request.segment_bytes, provider)


def collect_garbage(store: BlockStore, frames: Frames | None = None) -> None:
    """Releases free segments of the default pool that no request has used for a long time.

    Runs where the reserved bytes have passed the threshold. Each pass takes all blocks of at least
    mean age, until the target is met; it is not cut short then, so that the next one comes late.
    """
    allowed, threshold = store.allowed_bytes, store.config.garbage_collection_threshold
    if allowed is None or not threshold:
        return
    target_bytes = store.reserved_bytes - int(threshold * allowed)
    if target_bytes <= 0:
        return
    aging = [block for block in store.default.large.free if not block.is_split]
    while aging and target_bytes > 0:
        mean_age = sum(block.age for block in aging) / len(aging)
        old = [block for block in aging if block.age >= mean_age and block.expandable is None]
        if not old:
            return
        aging = [block for block in aging if block.age < mean_age or block.expandable is not None]
        target_bytes -= sum(block.nbytes for block in old)
        release_all(store, old, frames)


def release_oversize(
    store: BlockStore, size_class: SizeClass, nbytes: int, stream: int, frames: Frames | None = None
) -> bool:
    """Releases cached segments that are never split, just enough to make room for a request.

    Args:
        store: all blocks.
        size_class: of the request.
        nbytes: rounded size of the request.
        stream: of the request; segments of other streams are left alone.
        frames: call stack of the request, if one was recorded.

    Returns:
        Whether enough was released. False where the settings have no ``max_split_size_mb``.
    """
    limit = store.config.max_split_bytes
    if limit is None:
        return False
    wanted_bytes = max(nbytes, limit)
    fitting = size_class.free.find(wanted_bytes, stream)
    if fitting is not None and fitting.expandable is None:
        store.release(fitting, frames)
        return True
    released_bytes = 0
    for block in reversed(size_class.free.list_from(limit, stream)):
        if released_bytes >= wanted_bytes:
            break
        if block.expandable is None:
            released_bytes += block.nbytes
            store.release(block, frames)
    return released_bytes >= wanted_bytes


def release_free(
    store: BlockStore, size_classes: Iterable[SizeClass], frames: Frames | None = None
) -> None:
    """Releases all free segments of some size classes, and the free pages of expandable ones."""
    for size_class in size_classes:
        free = list(size_class.free)
        whole = [block for block in free if not block.is_split and block.expandable is None]
        release_all(store, whole, frames)
        for block in free:
            if block.expandable is not None:
                shrink(store, block, frames)


def release_all(store: BlockStore, blocks: list[Block], frames: Frames | None) -> None:
    """Releases the segments of blocks that are whole segments and free."""
    for block in blocks:
        store.release(block, frames)


def release_freeable(store: BlockStore, pool: Pool, frames: Frames | None = None) -> None:
    """Releases the free segments of a private pool without users.

    The pool itself disappears with its last segment.
    """
    release_free(store, pool.size_classes, frames)
    if not pool.segment_count and store.private.get(pool.pool_id) is pool:
        del store.private[pool.pool_id]
        store.statistics.drop_pool(pool.pool_id)
        pool.close()


def _make_memory_error(
    store: BlockStore, segment_bytes: int, provider: Provider
) -> OutOfMemoryError:
    """Returns the error of a request that nothing could satisfy.

    Args:
        store: all blocks.
        segment_bytes: size of the segment that was wanted.
        provider: that the segment was to come from.
    """
    statistics = store.statistics.all
    allocated_bytes = statistics.allocated_bytes.current
    private_bytes = sum(pool.free_bytes for pool in store.private.values())
    cached_bytes = statistics.reserved_bytes.current - allocated_bytes - private_bytes
    total, free = provider.total_bytes(), provider.available_bytes()
    allowed = store.allowed_bytes
    parts = [
        f"device {store.device} ({provider.name}) has {format_size(total)}, of which "
        f"{format_size(free)} is free",
        f"{format_size(allowed)} allowed ({allowed / total:.2%})" if allowed is not None else "",
        f"{format_size(allocated_bytes)} allocated",
        f"{format_size(private_bytes)} free in private pools of graphs" if private_bytes else "",
        f"{format_size(cached_bytes)} reserved but unallocated",
    ]
    hint = "free arrays, use a smaller batch, or drop graphs that are not replayed any more"
    if cached_bytes > segment_bytes and not store.config.expandable_segments:
        hint += "; TRACEGRAPH_ALLOC_CONF=expandable_segments:True avoids fragmentation"
    return OutOfMemoryError(
        f"out of memory: tried to allocate {format_size(segment_bytes)}",
        where="; ".join(part for part in parts if part),
        why=_explain(store, segment_bytes, free),
        fix=hint,
        anchor="out-of-memory",
    )


def _explain(store: BlockStore, segment_bytes: int, free_bytes: int) -> str:
    if store.exceeds_limit(segment_bytes):
        return "the share of the device that this process may reserve is used up"
    if segment_bytes <= free_bytes:
        return "the provider has that much, but not in one piece"
    return "no cached block fits, and the device has no segment of that size left"
