"""Getting memory back: garbage collection and the release of cached segments."""

from __future__ import annotations

from collections.abc import Iterable

from tracegraph.runtime.memory.caching.block import Block, BlockPool, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.expandable_blocks import shrink
from tracegraph.runtime.memory.history import Frames


def collect_garbage(store: BlockStore, frames: Frames | None = None) -> None:
    """Gives back free segments of the default pool that nobody asked for in a long time.

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
    store: BlockStore, pool: BlockPool, nbytes: int, stream: int, frames: Frames | None = None
) -> bool:
    """Gives back cached segments that are never split, just enough to make room for a request.

    Args:
        store: all blocks.
        pool: of the request.
        nbytes: rounded size of the request.
        stream: of the request; segments of other streams are left alone.
        frames: call stack of the request, if one was recorded.

    Returns:
        Whether enough was given back. False where the settings have no ``max_split_size_mb``.
    """
    limit = store.config.max_split_bytes
    if limit is None:
        return False
    wanted_bytes = max(nbytes, limit)
    fitting = pool.free.find(wanted_bytes, stream)
    if fitting is not None and fitting.expandable is None:
        store.release(fitting, frames)
        return True
    released_bytes = 0
    for block in reversed(pool.free.list_from(limit, stream)):
        if released_bytes >= wanted_bytes:
            break
        if block.expandable is None:
            released_bytes += block.nbytes
            store.release(block, frames)
    return released_bytes >= wanted_bytes


def release_free(
    store: BlockStore, parts: Iterable[BlockPool], frames: Frames | None = None
) -> None:
    """Gives back all free segments of some block pools, and the free pages of growing ones."""
    for part in parts:
        whole = [block for block in part.free if not block.is_split and block.expandable is None]
        growing = [block for block in part.free if block.expandable is not None]
        release_all(store, whole, frames)
        for block in growing:
            shrink(store, block, frames)


def release_all(store: BlockStore, blocks: list[Block], frames: Frames | None) -> None:
    """Gives back the segments of blocks that are whole segments and free."""
    for block in blocks:
        store.release(block, frames)


def release_freeable(store: BlockStore, pool: Pool, frames: Frames | None = None) -> None:
    """Gives back the free segments of a private pool that nobody needs any more.

    The pool itself disappears with its last segment.
    """
    release_free(store, (pool.small, pool.large, pool.exact), frames)
    if not pool.segment_count and store.private.get(pool.pool_id) is pool:
        del store.private[pool.pool_id]
        store.statistics.drop_pool(pool.pool_id)
        # Old blocks may still point to the pool; its provider need not live as long.
        pool.provider = None
