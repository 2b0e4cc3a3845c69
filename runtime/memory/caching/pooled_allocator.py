"""PooledAllocator: the part of the caching allocator that concerns private pools and captures."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.caching.pools import Pools
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import Provider


class PooledAllocator(abc.ABC):
    """Whose requests go where, and what finalisers have returned. Safe from several threads.

    Note [Finalisers]. A finaliser may run inside any call, also inside the allocator's own, in the
    same thread. So it must not change anything there and then: it calls `free_later` or
    `release_pool_later`, which only take a note, unless nobody is in the allocator at that moment.
    Whoever enters the allocator next does what was noted, in its order.

    Args:
        store: the blocks.
        uses: those that other streams still read.
    """

    def __init__(self, store: BlockStore, uses: StreamUses) -> None:
        self._store = store
        self._uses = uses
        self._pools = Pools(store)
        self._returned: collections.deque[Block | PoolId] = collections.deque()

    @property
    def provider(self) -> Provider:
        """Where segments come from, those of pools with a provider of their own apart."""
        return self._store.provider

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Re-entrant; to be held where several calls belong together."""
        return self._store.lock

    def free_later(self, block: Block) -> None:
        """Takes back a block as soon as that can be. For finalisers: see Note [Finalisers]."""
        self._returned.append(block)
        self._drain_if_idle()

    def release_pool_later(self, pool_id: PoolId) -> None:
        """Counts one user less and gives back what nobody needs then. For finalisers, likewise."""
        self._returned.append(pool_id)
        self._drain_if_idle()

    def create_or_increment_pool(
        self,
        pool_id: PoolId,
        *,
        provider: Provider | None = None,
        no_split: bool = False,
        use_on_oom: bool = False,
    ) -> None:
        """Makes a private pool that one user needs, or counts one more user of it.

        Args:
            pool_id: names it.
            provider: where its segments come from; None for the allocator's own.
            no_split: each block has a segment of its own.
            use_on_oom: it serves the default pool before that runs out of memory.

        Raises:
            TracegraphError: its last user is gone, or it exists and has its own settings.
        """
        with self._store.lock:
            self._pools.create_or_increment(pool_id, provider, no_split, use_on_oom)

    def begin_allocate_to_pool(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Sends requests to a private pool, which has one more user from now on.

        Args:
            pool_id: of a pool that exists, or names a new one.
            matches: says of the stream of a request whether it goes there; called in the
                requesting thread, under the lock. Of several pools the last begun counts.

        Raises:
            TracegraphError: requests go to this pool already, or its last user is gone.
        """
        with self._store.lock:
            self._pools.begin(pool_id, matches)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Sends no more requests to a private pool; its count of users stays.

        Raises:
            TracegraphError: no requests go to this pool.
        """
        with self._store.lock:
            self._pools.end(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Counts one user of a private pool less; without any, its free memory may be given back.

        Raises:
            TracegraphError: there is no such pool, or nobody needs it.
        """
        with self._store.lock:
            self._pools.release(pool_id)

    def use_count(self, pool_id: PoolId) -> int:
        """Returns how many users need a private pool.

        Raises:
            TracegraphError: there is no such pool.
        """
        with self._store.lock:
            return self._pools.find(pool_id).use_count

    def pool_bytes(self, pool_id: PoolId) -> tuple[int, int]:
        """Returns the reserved and the allocated bytes of a private pool.

        Raises:
            TracegraphError: there is no such pool.
        """
        with self._store.lock:
            self._drain()
            return self._pools.count_bytes(pool_id)

    def mark_capture_begin(self, pool_id: PoolId, order: CaptureOrder | None = None) -> None:
        """Says that streams are captured: until the end no event is recorded or asked.

        Args:
            pool_id: that the capture allocates from; names the capture.
            order: of its nodes; heeded where ``graph_capture_record_stream_reuse`` is on.

        Raises:
            TracegraphError: a capture into this pool is under way.
        """
        with self._store.lock:
            reuses = self._store.config.graph_capture_record_stream_reuse
            self._uses.begin_capture(pool_id, order if reuses else None)

    def mark_capture_end(self, pool_id: PoolId) -> None:
        """Says that a capture is over.

        Raises:
            TracegraphError: no capture into this pool is under way.
        """
        with self._store.lock:
            self._uses.end_capture(pool_id)

    def _drain_if_idle(self) -> None:
        lock = self._store.lock
        # Owned by this thread: the finaliser runs inside a call of it.
        if lock._is_owned() or not lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            self._drain()
        finally:
            lock.release()

    def _drain(self) -> None:
        while self._returned:
            noted = self._returned.popleft()
            if isinstance(noted, Block):
                self._free(noted, None)
                continue
            self._pools.release(noted)
            self.empty_cache(noted)

    @abc.abstractmethod
    def empty_cache(self, pool_id: PoolId | None = None) -> None:
        """Gives free segments back to the provider."""

    @abc.abstractmethod
    def _free(self, block: Block, frames: Frames | None) -> None: ...
