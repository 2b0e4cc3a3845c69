"""PrivatePool: one user of a pool, sharing by id and by handle, scratch, and when memory is
freed."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
from typing import Any

import pytest

from tests.oracles import error_lines
from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.private_pool import (
    PrivatePool,
    announce_pool,
    find_pool,
    graph_pool_handle,
    join_pool,
    withdraw_pool,
)
from tracegraph.runtime.memory.providers.host import HostProvider

MIB = 1 << 20


def make_allocator(limit_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(HostProvider(limit_bytes))


def test_pool_ids_are_pairs_and_never_repeat():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: new_pool_id(), range(1000)))
    assert len(set(ids)) == 1000
    assert all(second == 0 for _, second in ids)
    assert str(PoolId(7)) == "(7, 0)"


def test_a_block_is_a_whole_segment_and_all_bytes_go_when_the_pool_goes():
    allocator = make_allocator()
    pool = PrivatePool(PoolId(700), allocator)
    block = pool.allocate(20 * MIB + 1)
    assert block.nbytes == block.segment.nbytes == pool.reserved_bytes == 20 * MIB + (32 << 10)
    assert allocator.provider.available_bytes() > 0
    assert repr(pool).startswith("PrivatePool((700, 0), provider=host, reserved=21,004,288 bytes")
    pool.free_later(block)
    assert (pool.reserved_bytes, pool.allocated_bytes) == (21_004_288, 0)
    assert pool.allocate(15 * MIB) is not None
    assert pool.reserved_bytes == 21_004_288
    del pool
    gc.collect()
    # The block is still in use: nothing is taken from its user.
    assert allocator.statistics.all.reserved_bytes.current == 21_004_288


def test_a_pool_without_blocks_leaves_nothing():
    allocator = make_allocator()
    pool = PrivatePool(new_pool_id(), allocator)
    pool.free_later(pool.allocate(1000))
    pool_id = pool.pool_id
    del pool
    gc.collect()
    assert allocator.statistics.all.reserved_bytes.current == 0
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pools.use_count(pool_id)


def test_a_pool_dropped_inside_the_allocator_goes_when_the_call_is_over():
    """As when the collector finds it there, see Note [Finalisers] of UsedBlocks."""
    allocator = make_allocator()
    provider: Any = allocator.provider
    held = [PrivatePool(new_pool_id(), allocator)]
    held[0].free_later(held[0].allocate(1000))
    with allocator.lock:
        held.clear()
        gc.collect()
        assert provider.reserved_bytes == 1024
    allocator.statistics.to_dict()
    assert provider.reserved_bytes == 0


def test_a_pool_is_joined_by_its_id():
    allocator = make_allocator()
    pool_id = new_pool_id()
    pool = join_pool(pool_id, allocator)
    assert join_pool(pool_id, allocator) is find_pool(pool_id) is pool
    assert allocator.pools.use_count(pool_id) == 1
    with pytest.raises(TracegraphError, match="is one of another device") as caught:
        join_pool(pool_id, make_allocator())
    error_lines.match(
        caught.value, f"the pool {pool_id} is", f"private pool {pool_id} of Cach", "a pool", "share"
    )
    del pool
    gc.collect()
    with pytest.raises(TracegraphError) as caught:
        find_pool(pool_id)
    where = f"private pool {pool_id}"
    error_lines.match(caught.value, "there is no pool", where, "a pool lives", "keep the captured")


def test_a_handle_is_a_pool_before_there_is_one():
    allocator = make_allocator()
    handle = graph_pool_handle()
    assert find_pool(handle) is None
    for _ in range(2):
        pool = join_pool(handle, allocator)
        assert find_pool(handle) is pool
        pool.free_later(pool.allocate(10))
        del pool
        gc.collect()
        assert allocator.statistics.all.reserved_bytes.current == 0


def test_an_announced_pool_is_one_until_it_is_withdrawn():
    pool_id = new_pool_id()
    announce_pool(pool_id)
    assert find_pool(pool_id) is None
    withdraw_pool(pool_id)
    with pytest.raises(TracegraphError, match="there is no pool"):
        find_pool(pool_id)


def test_a_pool_has_as_many_users_as_joined():
    allocator = make_allocator()
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    pool = join_pool(pool_id, allocator)
    assert allocator.pools.use_count(pool_id) == 2
    del pool
    gc.collect()
    assert allocator.pools.use_count(pool_id) == 1


def test_scratch_is_the_smallest_that_fits():
    pool = PrivatePool(new_pool_id(), make_allocator())
    small, large = pool.share_scratch(1024), pool.share_scratch(4096)
    assert pool.share_scratch(600) is pool.share_scratch(1000) is small
    assert pool.share_scratch(1025) is large
    assert pool.allocated_bytes == 1024 + 4096
    del small
    gc.collect()
    assert pool.allocated_bytes == 4096
    assert pool.share_scratch(600) is large


def test_out_of_memory_names_the_pool_and_loses_nothing():
    pool = PrivatePool(PoolId(701), make_allocator(10_000))
    kept = pool.allocate(5000)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(MIB)
    error_lines.match(
        caught.value,
        "out of memory: tried to allocate 1.00 MiB",
        "private pool (701, 0) with 5,120 bytes, device 0 (host) has 9.77 KiB",
        "a graph keeps all of its buffers",
        "donate the state",
    )
    assert pool.reserved_bytes == kept.nbytes == 5120
    assert pool.allocate(4000).nbytes == 4096


def test_free_arenas_that_are_too_small_are_not_kept_beside_a_new_one():
    pool = PrivatePool(new_pool_id(), make_allocator(10_000))
    pool.free_later(pool.allocate(2000))
    pool.free_later(pool.allocate(3000))
    assert pool.reserved_bytes == 3072
    block = pool.allocate(9000)
    assert block.nbytes == pool.reserved_bytes == 9216


def test_threads_share_a_pool():
    pool = PrivatePool(new_pool_id(), make_allocator())
    start = threading.Barrier(4)

    def work(mark: int) -> bool:
        start.wait()
        is_intact = True
        for turn in range(100):
            block = pool.allocate(512 * (1 + turn % 3))
            storage = block.segment.storage
            storage[:] = mark
            is_intact = is_intact and bool((storage == mark).all())
            pool.free_later(block)
        return is_intact

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 5)))
    assert pool.allocated_bytes == 0
    assert pool.reserved_bytes <= 4 * 3 * 1536
