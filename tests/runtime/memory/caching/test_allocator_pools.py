"""Private pools of the caching allocator: who uses them, what they serve, when they go."""

from __future__ import annotations

import threading
import weakref

import pytest

from tests.fakes.scripted_provider import GIB, ScriptedProvider
from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId, new_pool_id
from tracegraph.runtime.memory.sizes import MIB


def _everything(stream: int) -> bool:
    return True


def _count_segments(allocator: CachingAllocator, pool_id: PoolId) -> int:
    return len(allocator.snapshot(pool_id))


@pytest.fixture
def provider() -> ScriptedProvider:
    return ScriptedProvider()


@pytest.fixture
def allocator(provider: ScriptedProvider) -> CachingAllocator:
    return CachingAllocator(provider)


def test_ids_are_unique_and_increase_also_across_threads() -> None:
    made: list[list[PoolId]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda ids=ids: ids.extend(new_pool_id() for _ in range(100)))
        for ids in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in made)
    assert len({pool_id for ids in made for pool_id in ids}) == 400
    assert DEFAULT_POOL_ID == (0, 0)


def test_pool_with_its_own_provider(allocator: CachingAllocator) -> None:
    own = ScriptedProvider(addresses=[1 << 40, 2 << 40])
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id, provider=own)
    assert allocator.pools.use_count(pool_id) == 1
    allocator.pools.begin(pool_id, _everything)
    assert allocator.pools.use_count(pool_id) == 2
    blocks = [allocator.allocate(1_000_000) for _ in range(2)]
    assert (own.allocation_count, _count_segments(allocator, pool_id)) == (1, 1)
    blocks.append(allocator.allocate(1_000_000))
    assert (own.allocation_count, _count_segments(allocator, pool_id)) == (2, 2)
    allocator.pools.end(pool_id)
    allocator.pools.release(pool_id)
    assert allocator.pools.use_count(pool_id) == 1
    allocator.allocate(1_000_000)
    assert own.allocation_count == 2
    figures = allocator.statistics.to_dict()
    key = f"reserved_bytes_by_private_pools.{pool_id.number}_0.small_pool.current"
    assert figures[key] == 4 * MIB
    assert figures["reserved_bytes.all.current"] == 6 * MIB
    allocator.pools.release(pool_id)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert own.reserved_bytes == 0


def test_the_provider_lives_until_the_last_block_is_gone(allocator: CachingAllocator) -> None:
    own = ScriptedProvider()
    alive = weakref.ref(own)
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id, provider=own)
    del own
    allocator.pools.begin(pool_id, _everything)
    block = allocator.allocate(512)
    allocator.pools.end(pool_id)
    allocator.pools.release(pool_id)
    allocator.pools.release(pool_id)
    allocator.empty_cache()
    assert alive() is not None
    allocator.free(block)
    allocator.empty_cache()
    del block
    assert alive() is None


def test_a_block_may_outlive_its_pool(
    allocator: CachingAllocator, provider: ScriptedProvider
) -> None:
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, _everything)
    block = allocator.allocate(512)
    allocator.pools.end(pool_id)
    allocator.pools.release(pool_id)
    allocator.empty_cache(pool_id)
    assert provider.reserved_bytes == 2 * MIB
    allocator.free(block)
    assert provider.reserved_bytes == 2 * MIB
    allocator.empty_cache(pool_id)
    assert provider.reserved_bytes == 0
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pools.use_count(pool_id)


def test_emptying_inside_the_context_changes_nothing(
    allocator: CachingAllocator, provider: ScriptedProvider
) -> None:
    allocator.free(allocator.allocate(30 * MIB))
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, _everything)
    allocator.free(allocator.allocate(512))
    allocator.empty_cache()
    allocator.empty_cache(pool_id)
    assert provider.free_count == 0
    allocator.pools.end(pool_id)
    allocator.empty_cache()
    assert provider.reserved_bytes == 2 * MIB


def test_no_split_gives_each_block_a_segment(allocator: CachingAllocator) -> None:
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id, no_split=True)
    allocator.pools.begin(pool_id, _everything)
    blocks = [allocator.allocate(nbytes) for nbytes in (MIB, MIB, 512, 3 * MIB)]
    assert _count_segments(allocator, pool_id) == 4
    assert [block.nbytes for block in blocks] == [2 * MIB, 2 * MIB, 2 * MIB, 20 * MIB]


def test_nested_contexts_restore_the_outer_pool(allocator: CachingAllocator) -> None:
    ids = [new_pool_id() for _ in range(3)]

    def nest(depth: int) -> None:
        if depth == 3:
            return
        allocator.pools.begin(ids[depth], _everything)
        allocator.allocate(20 * MIB)
        nest(depth + 1)
        if depth < 2:
            allocator.allocate(20 * MIB)
        allocator.pools.end(ids[depth])

    nest(0)
    assert [_count_segments(allocator, pool_id) for pool_id in ids] == [2, 2, 1]


def test_other_threads_allocate_from_the_default_pool(allocator: CachingAllocator) -> None:
    me = threading.get_ident()
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, lambda stream: threading.get_ident() == me)
    mine = allocator.allocate(512)
    others: list[PoolId] = []
    thread = threading.Thread(
        target=lambda: others.append(allocator.allocate(512).size_class.pool_id)
    )
    thread.start()
    thread.join()
    assert mine.size_class.pool_id == pool_id
    assert others == [DEFAULT_POOL_ID]


def test_a_side_stream_that_joined_the_capture_is_sent_to_the_pool_too(
    allocator: CachingAllocator,
) -> None:
    pool_id = new_pool_id()
    captured = {3}
    allocator.pools.begin(pool_id, lambda stream: stream in captured)
    captured.add(4)
    blocks = [allocator.allocate(512, stream) for stream in (3, 4, 5)]
    assert _count_segments(allocator, pool_id) == 2
    assert blocks[2].size_class.pool_id == DEFAULT_POOL_ID


def _make_limited(use_on_oom: bool) -> tuple[CachingAllocator, PoolId]:
    allocator = CachingAllocator(ScriptedProvider(80 * MIB))
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id, use_on_oom=use_on_oom)
    allocator.pools.begin(pool_id, _everything)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.pools.end(pool_id)
    allocator.pools.release(pool_id)
    allocator.allocate(40 * MIB)
    return allocator, pool_id


def test_a_pool_lends_when_memory_runs_out_if_it_is_made_so() -> None:
    allocator, pool_id = _make_limited(use_on_oom=True)
    block = allocator.allocate(30 * MIB)
    assert block.size_class.pool_id == pool_id
    assert allocator.pools.use_count(pool_id) == 1
    allocator.free(block)
    assert allocator.statistics.num_ooms == 0
    assert allocator.pool_bytes(pool_id) == (40 * MIB, 0)


def test_other_pools_do_not_lend() -> None:
    allocator, _ = _make_limited(use_on_oom=False)
    with pytest.raises(OutOfMemoryError, match=r"tried to allocate 30.00 MiB") as caught:
        allocator.allocate(30 * MIB)
    assert "40.00 MiB free in private pools of graphs" in caught.value.where


def test_a_pool_that_is_gone_does_not_lend_but_gives_its_memory_back() -> None:
    allocator, pool_id = _make_limited(use_on_oom=True)
    allocator.pools.release(pool_id)
    block = allocator.allocate(30 * MIB)
    assert block.size_class.pool_id == DEFAULT_POOL_ID
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pools.use_count(pool_id)


def test_pools_without_users_are_reclaimed_under_pressure() -> None:
    provider = ScriptedProvider(100 * MIB)
    allocator = CachingAllocator(provider)
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, _everything)
    kept, freed = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.pools.end(pool_id)
    allocator.free(freed)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(50 * MIB)
    allocator.pools.release(pool_id)
    allocator.allocate(50 * MIB)
    assert allocator.pool_bytes(pool_id) == (40 * MIB, 40 * MIB)
    allocator.free(kept)


@pytest.mark.parametrize(
    "action", ["begin twice", "end", "release", "release twice", "reuse", "change"]
)
def test_wrong_calls_are_refused(allocator: CachingAllocator, action: str) -> None:
    pool_id = new_pool_id()
    messages = {
        "begin twice": "requests go to the pool .* already",
        "end": "no requests go to the pool",
        "release": "there is no pool",
        "release twice": "cannot use the pool .* again",
        "reuse": "cannot use the pool .* again",
        "change": "cannot change the pool",
    }
    if action == "begin twice":
        allocator.pools.begin(pool_id, _everything)
    if action in ("release twice", "reuse", "change"):
        allocator.pools.create_or_increment(pool_id)
    if action in ("release twice", "reuse"):
        allocator.pools.release(pool_id)
    calls = {
        "begin twice": lambda: allocator.pools.begin(pool_id, _everything),
        "end": lambda: allocator.pools.end(pool_id),
        "release": lambda: allocator.pools.release(pool_id),
        "release twice": lambda: allocator.pools.release(pool_id),
        "reuse": lambda: allocator.pools.begin(pool_id, _everything),
        "change": lambda: allocator.pools.create_or_increment(pool_id, no_split=True),
    }
    with pytest.raises(TracegraphError, match=messages[action]) as caught:
        calls[action]()
    assert f"private pool {pool_id}" in caught.value.where
    if action == "begin twice":
        assert allocator.pools.use_count(pool_id) == 1


def test_the_default_pool_is_no_private_pool(allocator: CachingAllocator) -> None:
    with pytest.raises(TracegraphError, match="as a private pool"):
        allocator.pools.create_or_increment(DEFAULT_POOL_ID)
    with pytest.raises(TracegraphError, match="as a private pool"):
        allocator.pools.begin(DEFAULT_POOL_ID, _everything)


def test_a_capture_defers_blocks_that_other_streams_use(provider: ScriptedProvider) -> None:
    allocator = CachingAllocator(provider)
    pool_id = new_pool_id()
    block = allocator.allocate(512, stream=1)
    address = block.address
    allocator.record_stream(block, 2)
    allocator.pools.begin_capture(pool_id)
    allocator.free(block)
    assert allocator.allocate(512, stream=1).address != address
    allocator.pools.end_capture(pool_id)
    assert allocator.allocate(512, stream=1).address == address


def test_bytes_of_an_unknown_pool_are_refused(allocator: CachingAllocator) -> None:
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pool_bytes(PoolId(10**9))


def test_capacity_is_large_by_default(provider: ScriptedProvider) -> None:
    assert provider.available_bytes() == provider.total_bytes() == 64 * GIB
