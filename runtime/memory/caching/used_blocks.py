"""UsedBlocks: the blocks that users hold, and how they are freed, from finalisers too."""

from __future__ import annotations

import collections
from collections.abc import Callable

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId


class UsedBlocks:
    """Finds and frees the blocks of an allocator, and ends uses of its private pools.

    Note [Finalisers]. A finaliser may run inside any call, also inside the allocator's own, in the
    same thread. So it must not change anything there and then: it calls `free_later` or
    `release_pool_later`, which only note it, unless the allocator is idle at that moment. The
    next call of the allocator does what was noted, in its order.

    Args:
        store: all blocks of the allocator.
        uses: the freed ones that other streams still read.
        pools: the private pools.
        put_back: called with each block that no stream reads any more, and the call stack of its
            free; neither this nor the next refers to the allocator.
        release_pool: called with each pool whose last user a finaliser was.

    Attributes:
        noted: what finalisers have returned. Where there is anything, `drain` is due.
    """

    def __init__(
        self,
        store: BlockStore,
        uses: StreamUses,
        pools: PoolRouter,
        put_back: Callable[[Block, Frames | None], None],
        release_pool: Callable[[Pool, Frames | None], None],
    ) -> None:
        self._store, self._uses, self._pools = store, uses, pools
        self._put_back, self._release_pool = put_back, release_pool
        self._active = store.active
        self._lost: set[Block] = set()
        self.noted: collections.deque[Block | PoolId] = collections.deque()

    def free(self, block: Block, frames: Frames | None) -> None:
        """Frees a block, under the allocator's lock.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        if not block.is_allocated or self._active.get(block.address) is not block:
            if block not in self._lost:
                raise _make_free_error(block, self._store.device)
            self._lost.remove(block)
            return
        self._store.mark_freed(block, frames)
        if block.stream_uses:
            self._uses.defer(block)
        else:
            self._put_back(block, frames)

    def lose(self, blocks: tuple[Block, ...]) -> None:
        """Ignores later frees of some blocks by users that have lost them."""
        self._lost.update(blocks)

    def find(self, address: int) -> Block:
        """Returns the block in use that begins at an address.

        Raises:
            TracegraphError: there is none.
        """
        with self._store.lock:
            self.drain()
            block = self._active.get(address)
            if block is None or not block.is_allocated:
                raise _make_address_error(address, self._store.device)
            return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses a block: after `free`, reuse waits for that stream.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        with self._store.lock:
            if not block.is_allocated or self._active.get(block.address) is not block:
                raise _make_stream_error(block, stream, self._store.device)
            self._uses.record(block, stream)

    def free_later(self, block: Block) -> None:
        """Frees a block as soon as possible. For finalisers: see Note [Finalisers]."""
        self.noted.append(block)
        self._drain_if_idle()

    def release_pool_later(self, pool_id: PoolId) -> None:
        """Counts one user of a pool less as soon as possible, and releases what it leaves."""
        self.noted.append(pool_id)
        self._drain_if_idle()

    def drain(self) -> None:
        """Does what finalisers have noted, under the allocator's lock."""
        while self.noted:
            noted = self.noted.popleft()
            if isinstance(noted, Block):
                self.free(noted, None)
                continue
            self._pools.release(noted)
            # What is noted behind it may be a block of this pool.
            self.drain()
            self._release_if_freeable(noted)

    def _release_if_freeable(self, pool_id: PoolId) -> None:
        history = self._store.history
        frames = history.capture_free_frames() if history.is_enabled else None
        pool = self._store.private.get(pool_id)
        if pool is not None and not pool.use_count:
            self._release_pool(pool, frames)

    def _drain_if_idle(self) -> None:
        lock = self._store.lock
        # Owned by this thread: the finaliser runs inside a call of it.
        if lock._is_owned() or not lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            self.drain()
        finally:
            lock.release()


def _make_free_error(block: Block, device: int) -> TracegraphError:
    """Returns the error of a block that is not in use."""
    return TracegraphError(
        f"cannot free the block at {block.address:#x}: it is not in use in this allocator",
        where=f"caching allocator of device {device}, {block!r}",
        why="it was freed before or belongs to another allocator; its bytes may be in use",
        fix="free each block once, in the allocator that allocated it",
        anchor="pool",
    )


def _make_stream_error(block: Block, stream: int, device: int) -> TracegraphError:
    """Returns the error of a stream that is named for a block which is not in use."""
    return TracegraphError(
        f"cannot record stream {stream} on the block at {block.address:#x}: it is not in use",
        where=f"caching allocator of device {device}, {block!r}",
        why="after it was freed, its bytes may be in use by another owner",
        fix="record the stream before the block is freed",
        anchor="pool",
    )


def _make_address_error(address: int, device: int) -> TracegraphError:
    """Returns the error of an address at which no block begins."""
    return TracegraphError(
        f"no block of this allocator is in use at {address:#x}",
        where=f"caching allocator of device {device}",
        why="it was freed before, or was not allocated here, or points into the middle of a block",
        fix="pass the address that the allocation returned, once",
        anchor="pool",
    )
