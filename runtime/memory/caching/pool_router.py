"""PoolRouter: the private pools of an allocator, their users, and the captures that fill them."""

from __future__ import annotations

from collections.abc import Callable

from tracegraph.runtime.errors import InternalError, TracegraphError
from tracegraph.runtime.memory.caching.block import Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId
from tracegraph.runtime.memory.providers.provider import Provider


class PoolRouter:
    """The private pools of one allocator. Safe from several threads, under the allocator's lock.

    A pool is made by its first user, counts its users, and becomes *freeable* when that count is 0:
    then its free segments are released with the next `empty_cache` or when memory runs out, and the
    pool itself is deleted with its last segment.

    Args:
        store: the blocks of the allocator.
        uses: those that other streams still read, which captures hold back.

    Attributes:
        routes: which requests go to which pool; the last one that matches counts.
    """

    def __init__(self, store: BlockStore, uses: StreamUses) -> None:
        self._store, self._uses = store, uses
        self.routes: list[tuple[Pool, Callable[[int], bool]]] = []

    @property
    def freeable(self) -> tuple[Pool, ...]:
        """The pools without users."""
        return tuple(pool for pool in self._store.private.values() if not pool.use_count)

    def create_or_increment(
        self,
        pool_id: PoolId,
        *,
        provider: Provider | None = None,
        no_split: bool = False,
        use_on_oom: bool = False,
    ) -> None:
        """Makes a private pool with one user, or counts one more user of it.

        Args:
            pool_id: names it.
            provider: where its segments come from; None for the allocator's own.
            no_split: each block has a segment of its own.
            use_on_oom: it serves the default pool before that runs out of memory.

        Raises:
            TracegraphError: its last user is gone, or it exists and has its own settings.
        """
        if pool_id == DEFAULT_POOL_ID:
            raise _make_pool_error(
                f"cannot use the pool {pool_id} as a private pool",
                pool_id,
                why="(0, 0) names the default pool, which serves all other requests",
                fix="make an id with new_pool_id()",
            )
        store = self._store
        with store.lock:
            if pool_id not in store.private:
                store.statistics.add_pool(pool_id)
                store.private[pool_id] = Pool(
                    pool_id,
                    store.statistics,
                    provider=provider,
                    no_split=no_split,
                    use_on_oom=use_on_oom,
                )
                return
            pool = self.find_used(pool_id)
            if provider is not None or no_split or use_on_oom:
                raise _make_pool_error(
                    f"cannot change the pool {pool_id}",
                    pool_id,
                    why="provider, no_split and use_on_oom are chosen when a pool is made",
                    fix="leave them out for a pool that exists, or make a new pool",
                )
            pool.use_count += 1

    def find_freeable(self, pool_id: PoolId) -> Pool | None:
        """Returns the pool of this id if it has no users."""
        return next((pool for pool in self.freeable if pool.pool_id == pool_id), None)

    def begin(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Sends requests to a pool, which is made if need be and has one more user from now on.

        Args:
            pool_id: of a pool that exists, or names a new one.
            matches: says of the stream of a request whether it goes there; called in the
                requesting thread, under the lock. Of several pools the last begun counts.

        Raises:
            TracegraphError: requests go to this pool already, or its last user is gone.
        """
        with self._store.lock:
            if any(pool.pool_id == pool_id for pool, _ in self.routes):
                raise _make_pool_error(
                    f"requests go to the pool {pool_id} already",
                    pool_id,
                    why="a capture, or a pool context, that uses it is under way",
                    fix="end that one first, or use another pool",
                )
            self.create_or_increment(pool_id)
            self.routes.append((self.find(pool_id), matches))

    def end(self, pool_id: PoolId) -> None:
        """Sends no more requests to a pool; its count of users stays.

        Raises:
            InternalError: no requests go to this pool.
        """
        with self._store.lock:
            kept = self._list_others(pool_id)
            if len(kept) == len(self.routes):
                raise InternalError(
                    f"no requests go to the pool {pool_id}",
                    where=f"private pool {pool_id}",
                    why="each end needs its own begin before it",
                )
            self.routes[:] = kept

    def _list_others(self, pool_id: PoolId) -> list[tuple[Pool, Callable[[int], bool]]]:
        return [route for route in self.routes if route[0].pool_id != pool_id]

    def begin_capture(self, pool_id: PoolId, order: CaptureOrder | None = None) -> None:
        """Says that streams are captured: until the end no event is recorded or queried.

        Args:
            pool_id: that the capture allocates from; names the capture.
            order: of its nodes; heeded where ``graph_capture_record_stream_reuse`` is on.

        Raises:
            InternalError: a capture into this pool is under way.
        """
        with self._store.lock:
            reuses = self._store.config.graph_capture_record_stream_reuse
            self._uses.begin_capture(pool_id, order if reuses else None)

    def end_capture(self, pool_id: PoolId) -> None:
        """Says that a capture is over.

        Raises:
            InternalError: no capture into this pool is under way.
        """
        with self._store.lock:
            self._uses.end_capture(pool_id)

    def release(self, pool_id: PoolId) -> None:
        """Counts one user of a pool less; without any, its free memory may be released.

        Raises:
            TracegraphError: there is no such pool, or it has no users.
        """
        with self._store.lock:
            self.find_used(pool_id).use_count -= 1

    def use_count(self, pool_id: PoolId) -> int:
        """Returns how many users a pool has.

        Raises:
            TracegraphError: there is no such pool.
        """
        with self._store.lock:
            return self.find(pool_id).use_count

    def count_bytes(self, pool_id: PoolId) -> tuple[int, int]:
        """Returns the reserved and the allocated bytes of a pool.

        Raises:
            TracegraphError: there is no such pool.
        """
        with self._store.lock:
            self.find(pool_id)
            live = (block for block in self._store.active.values() if block.is_allocated)
            mine = (block.nbytes for block in live if block.size_class.pool_id == pool_id)
            return self._store.statistics.private_reserved[pool_id]["all"].current, sum(mine)

    def find(self, pool_id: PoolId) -> Pool:
        """Returns the pool of this id.

        Raises:
            TracegraphError: there is none.
        """
        pool = self._store.private.get(pool_id)
        if pool is None:
            raise _make_pool_error(
                f"there is no pool {pool_id}",
                pool_id,
                why="a pool lives while a graph, a pool object or a block in it lives",
                fix="keep what the pool belongs to",
            )
        return pool

    def find_used(self, pool_id: PoolId) -> Pool:
        """Returns the pool of this id, which has users.

        Raises:
            TracegraphError: there is none, or its last user is gone.
        """
        pool = self.find(pool_id)
        if not pool.use_count:
            raise _make_pool_error(
                f"cannot use the pool {pool_id} again",
                pool_id,
                why="its last user is gone, so its memory may be released at any time",
                fix="keep a user of the pool alive, or make a new pool",
            )
        return pool

    def choose(self, stream: int) -> Pool:
        """Returns the pool that serves a request on ``stream``: the innermost that matches."""
        for pool, matches in reversed(self.routes):
            if matches(stream):
                return pool
        return self._store.default


def _make_pool_error(what: str, pool_id: PoolId, *, why: str, fix: str) -> TracegraphError:
    """Returns the error of a pool that is not in the state that a call needs."""
    return TracegraphError(what, where=f"private pool {pool_id}", why=why, fix=fix, anchor="pool")
