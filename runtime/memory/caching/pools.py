"""Pools: the private pools of an allocator, who needs them, and whose requests they serve."""

from __future__ import annotations

from collections.abc import Callable

from tracegraph.runtime.memory.caching.allocator_errors import refuse_pool
from tracegraph.runtime.memory.caching.block import Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId
from tracegraph.runtime.memory.providers.provider import Provider


class Pools:
    """The private pools of one allocator. Not locked: the allocator's lock guards it.

    A pool is made by the first who needs it, counts those who do, and becomes *freeable* when that
    count is 0: then its free segments go back to the provider with the next `empty_cache` or
    when memory runs out, and the pool itself goes with its last segment.

    Args:
        store: the blocks of the allocator.

    Attributes:
        routes: whose requests go to which pool; the last one that matches counts.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.routes: list[tuple[Pool, Callable[[int], bool]]] = []

    @property
    def freeable(self) -> tuple[Pool, ...]:
        """The pools that nobody needs any more."""
        return tuple(pool for pool in self._store.private.values() if not pool.use_count)

    def find(self, pool_id: PoolId) -> Pool:
        """Returns the pool of this id.

        Raises:
            TracegraphError: there is none.
        """
        pool = self._store.private.get(pool_id)
        if pool is None:
            raise refuse_pool(
                f"there is no pool {pool_id}",
                pool_id,
                why="a pool lives while a graph, a pool object or a block in it lives",
                fix="keep what the pool belongs to",
            )
        return pool

    def find_used(self, pool_id: PoolId) -> Pool:
        """Returns the pool of this id, which somebody needs.

        Raises:
            TracegraphError: there is none, or nobody needs it any more.
        """
        pool = self.find(pool_id)
        if not pool.use_count:
            raise refuse_pool(
                f"cannot use the pool {pool_id} again",
                pool_id,
                why="its last user is gone, so its memory may be given back at any time",
                fix="keep a user of the pool alive, or make a new pool",
            )
        return pool

    def count_bytes(self, pool_id: PoolId) -> tuple[int, int]:
        """Returns the reserved and the allocated bytes of a private pool.

        Raises:
            TracegraphError: there is no such pool.
        """
        pool = self.find(pool_id)
        live = (block for block in self._store.active.values() if block.is_allocated)
        allocated_bytes = sum(block.nbytes for block in live if block.pool.owner is pool)
        return self._store.statistics.private_reserved[pool_id]["all"].current, allocated_bytes

    def create_or_increment(
        self, pool_id: PoolId, provider: Provider | None, no_split: bool, use_on_oom: bool
    ) -> None:
        """Makes a pool that one user needs, or counts one more user of a living pool.

        Raises:
            TracegraphError: nobody needs the pool any more, or it exists and has its own settings.
        """
        if pool_id == DEFAULT_POOL_ID:
            raise refuse_pool(
                f"cannot use the pool {pool_id} as a private pool",
                pool_id,
                why="(0, 0) names the default pool, which serves everybody",
                fix="make an id with new_pool_id()",
            )
        if pool_id not in self._store.private:
            self._store.private[pool_id] = Pool(
                pool_id,
                self._store.statistics,
                provider=provider,
                no_split=no_split,
                use_on_oom=use_on_oom,
            )
            self._store.statistics.add_pool(pool_id)
            return
        pool = self.find_used(pool_id)
        if provider is not None or no_split or use_on_oom:
            raise refuse_pool(
                f"cannot change the pool {pool_id}",
                pool_id,
                why="provider, no_split and use_on_oom are chosen when a pool is made",
                fix="leave them out for a pool that exists, or make a new pool",
            )
        pool.use_count += 1

    def begin(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Sends requests to a pool, which is made if need be and has one more user from now on.

        Raises:
            TracegraphError: requests are sent to this pool already, or it is freeable.
        """
        if any(pool.pool_id == pool_id for pool, _ in self.routes):
            raise refuse_pool(
                f"requests go to the pool {pool_id} already",
                pool_id,
                why="a capture, or a pool context, that uses it is under way",
                fix="end that one first, or use another pool",
            )
        self.create_or_increment(pool_id, None, no_split=False, use_on_oom=False)
        self.routes.append((self.find(pool_id), matches))

    def end(self, pool_id: PoolId) -> None:
        """Sends no more requests to a pool; its count of users stays.

        Raises:
            TracegraphError: no requests are sent to this pool.
        """
        kept = [route for route in self.routes if route[0].pool_id != pool_id]
        if len(kept) == len(self.routes):
            raise refuse_pool(
                f"no requests go to the pool {pool_id}",
                pool_id,
                why="each end needs its own begin before it",
                fix="internal error in tracegraph: please report this text",
            )
        self.routes[:] = kept

    def release(self, pool_id: PoolId) -> None:
        """Counts one user less.

        Raises:
            TracegraphError: there is no such pool, or nobody needs it.
        """
        self.find_used(pool_id).use_count -= 1

    def choose(self, stream: int) -> Pool:
        """Returns the pool that serves a request on ``stream``: the innermost that matches."""
        for pool, matches in reversed(self.routes):
            if matches(stream):
                return pool
        return self._store.default
