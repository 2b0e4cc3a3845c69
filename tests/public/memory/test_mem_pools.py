"""MemPool and use_mem_pool: the user pools of PyTorch's TestMemPool, by the public names."""

from __future__ import annotations

import concurrent.futures
import gc
import pathlib
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.pluggable_library import PluggableLibrary
from tracegraph.memory import (
    MemPool,
    caching_allocator_alloc,
    caching_allocator_delete,
    empty_cache,
    memory_reserved,
    use_mem_pool,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def baseline() -> Iterator[int]:
    gc.collect()
    empty_cache()
    before = memory_reserved()
    yield before
    gc.collect()
    empty_cache()
    assert memory_reserved() == before


@pytest.fixture
def library(tmp_path: pathlib.Path) -> PluggableLibrary:
    return PluggableLibrary(tmp_path)


def count_segments(pool: MemPool) -> int:
    return len(pool.snapshot())


def find_pool_of(address: int) -> tuple[int, int]:
    (found,) = (
        segment["segment_pool_id"]
        for segment in tg.memory.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == address
    )
    return found


def test_mempool_id() -> None:
    numbers = [MemPool().id.number, tg.graph_pool_handle().number, MemPool().id.number]
    assert numbers == sorted(set(numbers))


def test_mempool_multithread() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: MemPool().id, range(40)))
    assert len(set(ids)) == 40


def test_mempool_empty_cache(baseline: int) -> None:
    pool = MemPool()
    with use_mem_pool(pool):
        address = caching_allocator_alloc(MIB)
        empty_cache()
    del pool
    gc.collect()
    empty_cache()
    # The memory outlives the object that names the pool.
    assert memory_reserved() == baseline + 2 * MIB
    caching_allocator_delete(address)
    assert memory_reserved() == baseline + 2 * MIB
    empty_cache()
    assert memory_reserved() == baseline


def test_mempool_empty_cache_inactive(baseline: int) -> None:
    pool = MemPool()
    cached = caching_allocator_alloc(MIB)
    caching_allocator_delete(cached)
    with use_mem_pool(pool):
        caching_allocator_delete(caching_allocator_alloc(MIB))
        empty_cache()
        assert memory_reserved() == baseline + 4 * MIB
    empty_cache()
    # The pool is needed still, and keeps what is free in it.
    assert memory_reserved() == baseline + 2 * MIB


def test_mempool_with_allocator(library: PluggableLibrary) -> None:
    pool = MemPool(library.open())
    assert pool.use_count() == 1
    with use_mem_pool(pool):
        assert pool.use_count() == 2
        addresses = [caching_allocator_alloc(MIB), caching_allocator_alloc(MIB)]
        assert (count_segments(pool), library.read("live_bytes")) == (1, 2 * MIB)
        addresses.append(caching_allocator_alloc(MIB))
        assert (count_segments(pool), library.read("live_bytes")) == (2, 4 * MIB)
    assert pool.use_count() == 1
    assert library.read_last() == (0, 0)
    for address in addresses:
        caching_allocator_delete(address)
    assert library.read("live_count") == 2
    outside = caching_allocator_alloc(MIB)
    assert find_pool_of(outside) == (0, 0)
    caching_allocator_delete(outside)
    del pool
    gc.collect()
    assert (library.read("live_count"), library.read("wrong_frees")) == (0, 0)


def test_memory_deleted_after_its_allocator(library: PluggableLibrary) -> None:
    allocator = library.open()
    pool = MemPool(allocator)
    with use_mem_pool(pool):
        address = caching_allocator_alloc(5)
    del allocator, pool
    gc.collect()
    empty_cache()
    assert library.read("live_count") == 1
    caching_allocator_delete(address)
    empty_cache()
    assert library.read("live_count") == 0


def test_mempool_limited_memory_with_allocator(library: PluggableLibrary) -> None:
    pool = MemPool(library.open(), use_on_oom=True)
    with use_mem_pool(pool):
        caching_allocator_delete(caching_allocator_alloc(32 * MIB))
    total = tg.memory.mem_get_info()[1]
    # Nothing more may be reserved, and the pool lends what it has.
    tg.memory.set_per_process_memory_fraction(memory_reserved() / total)
    try:
        address = caching_allocator_alloc(30 * MIB)
        assert find_pool_of(address) == pool.id
        with pytest.raises(tg.OutOfMemoryError):
            caching_allocator_alloc(30 * MIB)
        caching_allocator_delete(address)
        del pool
        gc.collect()
        tg.memory.set_per_process_memory_fraction(0.0)
        with pytest.raises(tg.OutOfMemoryError):
            caching_allocator_alloc(30 * MIB)
    finally:
        tg.memory.set_per_process_memory_fraction(1.0)
    assert library.read("live_count") == 0


def test_a_pool_lends_only_if_it_is_to() -> None:
    pool = MemPool()
    with use_mem_pool(pool):
        caching_allocator_delete(caching_allocator_alloc(32 * MIB))
    total = tg.memory.mem_get_info()[1]
    tg.memory.set_per_process_memory_fraction(memory_reserved() / total)
    try:
        with pytest.raises(tg.OutOfMemoryError):
            caching_allocator_alloc(30 * MIB)
    finally:
        tg.memory.set_per_process_memory_fraction(1.0)


def test_mempool_no_split() -> None:
    pool = MemPool(no_split=True)
    with use_mem_pool(pool):
        addresses = [caching_allocator_alloc(size) for size in (512, 1024, MIB, 2 * MIB)]
    assert count_segments(pool) == 4
    assert all(len(segment["blocks"]) == 1 for segment in pool.snapshot())
    for address in addresses:
        caching_allocator_delete(address)


def test_nested_mempool() -> None:
    outer, inner = MemPool(), MemPool()
    with use_mem_pool(outer):
        addresses = [caching_allocator_alloc(2 * MIB)]
        with use_mem_pool(inner):
            addresses.append(caching_allocator_alloc(2 * MIB))
            assert (outer.use_count(), inner.use_count()) == (2, 2)
        addresses += [caching_allocator_alloc(20 * MIB)]
    addresses.append(caching_allocator_alloc(2 * MIB))
    assert [find_pool_of(address) for address in addresses] == [
        outer.id,
        inner.id,
        outer.id,
        (0, 0),
    ]
    assert (count_segments(outer), count_segments(inner)) == (2, 1)
    for address in addresses:
        caching_allocator_delete(address)


def test_mempool_ctx_multithread() -> None:
    pool = MemPool()
    inside, go_on = threading.Event(), threading.Event()
    found: dict[str, int] = {}

    def work() -> None:
        with use_mem_pool(pool):
            found["inside"] = caching_allocator_alloc(MIB)
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    found["outside"] = caching_allocator_alloc(MIB)
    go_on.set()
    thread.join()
    assert find_pool_of(found["inside"]) == pool.id
    assert find_pool_of(found["outside"]) == (0, 0)
    for address in found.values():
        caching_allocator_delete(address)


def test_mempool_emptycache_multithread(baseline: int) -> None:
    def work(_: int) -> None:
        pool = MemPool()
        with use_mem_pool(pool):
            address = caching_allocator_alloc(MIB)
        caching_allocator_delete(address)
        del pool
        empty_cache()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(20))) == [None] * 20
    empty_cache()
    assert memory_reserved() == baseline


def test_a_pool_serves_one_context_at_a_time() -> None:
    pool = MemPool()
    with use_mem_pool(pool):
        with pytest.raises(tg.TracegraphError, match="already"), use_mem_pool(pool):
            pass
        assert pool.use_count() == 2
    assert pool.use_count() == 1


def test_an_exception_leaves_the_pool_as_it_was() -> None:
    pool = MemPool()
    kept: list[int] = []

    def fail() -> None:
        with use_mem_pool(pool):
            kept.append(caching_allocator_alloc(100))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert pool.use_count() == 1
    (address,) = kept
    outside = caching_allocator_alloc(100)
    assert (find_pool_of(address), find_pool_of(outside)) == (pool.id, (0, 0))
    for each in (address, outside):
        caching_allocator_delete(each)


def test_a_context_keeps_its_pool() -> None:
    context = use_mem_pool(MemPool())
    with context:
        gc.collect()
        address = caching_allocator_alloc(100)
    caching_allocator_delete(address)


def test_a_capture_inside_of_a_context_has_a_pool_of_its_own() -> None:
    pool = MemPool()
    captured = tg.capture(lambda x: x * 2)
    with use_mem_pool(pool):
        captured(jnp.ones(100))
        assert count_segments(pool) == 0
    assert captured.pool() != pool.id
    del captured


def test_the_text_of_a_pool_names_it() -> None:
    pool = MemPool()
    assert repr(pool).startswith(f"MemPool(id={pool.id}, CachingAllocator(device=0, provider=host")
