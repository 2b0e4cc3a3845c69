"""CachingAllocator: one per device; keeps freed memory for reuse, with the rules of PyTorch's.

Order of an allocation: blocks whose events are over are put back. Then, each only if those before
it found nothing: best fit among the free blocks; callbacks that free memory; garbage collection and
a new segment; oversize segments given back and a new segment; all cached segments given back and a
new segment; pools that lend when memory runs out; the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tracegraph.runtime.memory.caching.allocator_errors import (
    refuse_address,
    refuse_fraction,
    refuse_free,
    refuse_size,
    refuse_stream,
)
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
)
from tracegraph.runtime.memory.caching.pooled_allocator import PooledAllocator
from tracegraph.runtime.memory.caching.reclaim import release_free
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import Frames, History
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId
from tracegraph.runtime.memory.providers.provider import EventSource, NoEvents, Provider
from tracegraph.runtime.memory.sizes import (
    ABSURD_BYTES,
    SMALL_BYTES,
    choose_segment_bytes,
    round_exact,
    round_size,
)
from tracegraph.runtime.memory.snapshots.segment_report import describe_segments
from tracegraph.runtime.memory.statistics import Statistics


class CachingAllocator(PooledAllocator):
    """Hands out blocks of device memory and keeps freed ones for reuse. Safe from several threads.

    A block is served again on its own stream at once, since work of one stream runs in order. Other
    streams that use it are to be named with `record_stream`.

    Args:
        provider: where segments come from.
        config: the settings.
        events: of the device's streams; None for a device on which nothing runs asynchronously.
        device: its index.

    Attributes:
        history: what happened, if it is recorded.
        device: as given.

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
        self.device = device
        self.history = History()
        config = config or AllocatorConfig()
        store = BlockStore(provider, config, self.history)
        super().__init__(store, StreamUses(events or NoEvents(), store.put_back))
        self._search = MemorySearch(store, self._uses, self._pools, device)
        # At every call; `with` on the lock would take three times as long.
        self._acquire, self._release = store.lock.acquire, store.lock.release
        self._stale: set[Block] = set()
        self._fraction = 1.0
        self.set_memory_fraction(config.per_process_memory_fraction)

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
        with self._store.lock:
            self._drain()
            return self._store.statistics

    @property
    def memory_fraction(self) -> float:
        """The share of the device that may be reserved, from 0 to 1."""
        return self._fraction

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of at least ``nbytes`` bytes; its contents are undefined.

        Args:
            nbytes: wanted size, rounded up to 512 bytes or as the settings say.
            stream: on which the block may be used without more ado.

        Raises:
            OutOfMemoryError: no step gave that much, or the size is absurd.
            TracegraphError: the size is negative.
        """
        if not 0 <= nbytes < ABSURD_BYTES:
            raise refuse_size(nbytes, self.device)
        history = self.history
        frames = history.capture_frames() if history.is_enabled else None
        self._acquire()
        try:
            self._begin(stream)
            store = self._store
            size = round_size(nbytes, store.config)
            owner = self._pools.choose(stream) if self._pools.routes else store.default
            pool = owner.small if size <= SMALL_BYTES else owner.large
            block = store.take_free(pool, size, stream)
            if block is None:
                segment_bytes = choose_segment_bytes(size, store.config)
                block = self._search.find(Request(pool, size, segment_bytes, stream, frames))
            splits = store.has_worthy_rest(block, size)
            return store.hand_out(block, size, nbytes, frames, splits=splits)
        finally:
            self._release()

    def allocate_exact(self, nbytes: int, pool_id: PoolId, stream: int = 0) -> Block:
        """Returns a block that is a whole segment of a private pool: the arena of a graph.

        Args:
            nbytes: wanted size, rounded up to 512 bytes, above 1 MiB to 32 KiB, above 128 MiB to
                2 MiB.
            pool_id: of a private pool.
            stream: on which the block may be used without more ado.

        Raises:
            OutOfMemoryError: no step gave that much, or the size is absurd.
            TracegraphError: the size is negative, or there is no such pool.
        """
        if not 0 <= nbytes < ABSURD_BYTES:
            raise refuse_size(nbytes, self.device)
        frames = self.history.capture_frames() if self.history.is_enabled else None
        with self._store.lock:
            self._begin(stream)
            pool = self._pools.find(pool_id).exact
            size = round_exact(nbytes)
            block = self._store.take_free(pool, size, stream)
            if block is None:
                # Arenas are few and large: those that are too small are not kept beside a new one.
                release_free(self._store, (pool,), frames)
                block = self._search.find(Request(pool, size, size, stream, frames))
            return self._store.hand_out(block, size, nbytes, frames, splits=False)

    def free(self, block: Block) -> None:
        """Takes back a block; it is kept for reuse, once no stream reads it any more.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        history = self.history
        frames = history.capture_free_frames() if history.is_enabled else None
        self._acquire()
        try:
            if self._returned:
                self._drain()
            self._free(block, frames)
        finally:
            self._release()

    def has_block(self, address: int) -> bool:
        """True when a block in use begins at an address."""
        with self._store.lock:
            self._drain()
            block = self._store.active.get(address)
            return block is not None and block.is_allocated

    def find_block(self, address: int) -> Block:
        """Returns the block in use that begins at an address.

        Raises:
            TracegraphError: there is none.
        """
        with self._store.lock:
            self._drain()
            block = self._store.active.get(address)
            if block is None or not block.is_allocated:
                raise refuse_address(address, self.device)
            return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses a block: after `free`, reuse waits for that stream.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        with self._store.lock:
            if not self._is_in_use(block):
                raise refuse_stream(block, stream, self.device)
            self._uses.record(block, stream)

    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Gives free segments back to the provider.

        Args:
            pool_id: of a private pool that nobody needs any more, for its segments only; None for
                all segments of the default pool and of such pools. During a capture, or while
                requests go to a private pool, only the latter.
        """
        frames = self.history.capture_free_frames() if self.history.is_enabled else None
        with self._store.lock:
            self._drain()
            if pool_id is None:
                self._search.release_cached(frames, keeps_default=bool(self._pools.routes))
                return
            for pool in self._pools.freeable:
                if pool.pool_id == pool_id:
                    self._search.release_pool(pool, frames)

    def configure(self, config: AllocatorConfig) -> None:
        """Replaces all settings; blocks that exist stay as they are."""
        with self._store.lock:
            before = self._store.config
            self._store.set_config(config)
            if config.per_process_memory_fraction != before.per_process_memory_fraction:
                self.set_memory_fraction(config.per_process_memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved.

        Args:
            fraction: share of the device's memory, from 0 to 1; 1 for no limit.

        Raises:
            ConfigError: it is no such number.
        """
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise refuse_fraction(fraction, self.device)
        with self._store.lock:
            total = self._store.provider.total_bytes() if fraction < 1 else 0
            self._store.allowed_bytes = int(fraction * total) if fraction < 1 else None
            self._fraction = float(fraction)

    def add_free_memory_callback(self, callback: Callable[[], bool]) -> None:
        """Has ``callback`` called, under the lock, before a new segment is reserved.

        Args:
            callback: may free blocks, and says whether it has.
        """
        with self._store.lock:
            self._search.free_memory_callbacks.append(callback)

    def add_out_of_memory_observer(self, observer: OutOfMemoryObserver) -> None:
        """Has ``observer`` called, under the lock, before an out-of-memory error.

        Args:
            observer: gets the device, the bytes of the wanted segment, the most that may be
                reserved, and the free bytes of the device.
        """
        with self._store.lock:
            self._search.observers.append(observer)

    def get_checkpoint(self, pool_id: PoolId) -> PoolCheckpoint:
        """Returns which blocks of a private pool are live.

        Raises:
            TracegraphError: there is no such pool, or nobody needs it.
        """
        with self._store.lock:
            self._drain()
            return take_checkpoint(self._store, self._pools.find_used(pool_id))

    def set_checkpoint(
        self, pool_id: PoolId, state: PoolCheckpoint, stale: Iterable[Block] = ()
    ) -> RestoredPool:
        """Makes exactly the blocks of a checkpoint live again, at their old places.

        Args:
            pool_id: of the pool.
            state: of `get_checkpoint`.
            stale: live blocks whose owners lose them: when such an owner frees, nothing happens.

        Raises:
            TracegraphError: the pool has not got the segments of the checkpoint any more, or a
                stale block is not live.
        """
        with self._store.lock:
            self._drain()
            pool = self._pools.find_used(pool_id)
            lost = tuple(stale)
            restored = restore_checkpoint(self._store, self._uses, pool, state, lost)
            self._stale.update(lost)
            return restored

    def snapshot(self, pool_id: PoolId | None = None) -> list[dict[str, Any]]:
        """Returns all segments with their blocks, in the keys of a snapshot file.

        Args:
            pool_id: only the segments of this private pool; None for those of all pools.
        """
        with self._store.lock:
            self._drain()
            segments = describe_segments(self._store, self.device, pool_id)
            if self.history.is_enabled:
                active_bytes = sum(segment["active_size"] for segment in segments)
                self.history.note("snapshot", 0, active_bytes, 0, pool_id or DEFAULT_POOL_ID)
            return segments

    def _begin(self, stream: int) -> None:
        if self._returned:
            self._drain()
        if self._uses.is_capturing:
            self._uses.find_reusable(stream)
        else:
            self._uses.poll()

    def _is_in_use(self, block: Block) -> bool:
        return block.is_allocated and self._store.active.get(block.address) is block

    def _is_lost(self, block: Block) -> bool:
        """Says, once, whether a checkpoint took the block from the owner who frees it now."""
        if block not in self._stale:
            return False
        self._stale.remove(block)
        return True

    def _free(self, block: Block, frames: Frames | None) -> None:
        if not self._is_in_use(block):
            if self._is_lost(block):
                return
            raise refuse_free(block, self.device)
        self._store.mark_freed(block, frames)
        if block.stream_uses:
            self._uses.defer(block)
        else:
            self._store.put_back(block, frames)
