"""Blocks, pools, streams and failures in every order: no early reuse, no leaks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from tests.fakes.bytes_provider import BytesProvider, ManualEvents
from tests.oracles.allocator_lockstep import Lockstep, Pair
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.segment import Segment

KIB, MIB = 1 << 10, 1 << 20
MAIN, SIDE = 0, 1
CAPTURED = (10, 11, 12, 13)
POOL, OTHER_POOL = PoolId(1), PoolId(2)


def make_allocator(
    capacity_bytes: int = 256 * MIB, text: str = ""
) -> tuple[CachingAllocator, BytesProvider, ManualEvents]:
    provider, events = BytesProvider(capacity_bytes), ManualEvents()
    config = parse_alloc_conf(text)
    return CachingAllocator(provider, config=config, events=events), provider, events


def begin_capture(allocator: CachingAllocator, order: CaptureOrder | None = None) -> None:
    allocator.pools.begin(POOL, CAPTURED.__contains__)
    allocator.pools.begin_capture(POOL, order)


def end_capture(allocator: CachingAllocator) -> None:
    allocator.pools.end_capture(POOL)
    allocator.pools.end(POOL)


# record_stream ------------------------------------------------------------------------------


def test_record_stream() -> None:
    allocator, _, events = make_allocator()
    block = allocator.allocate(10 * MIB, MAIN)
    address = block.address
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    # The side stream is not done, so its bytes are not given to anybody.
    other = allocator.allocate(10 * MIB, MAIN)
    assert other.address != address
    assert allocator.statistics.all.active.current == 2
    events.finish(SIDE)
    assert allocator.allocate(10 * MIB, MAIN).address == address


def test_record_stream_on_shifted_view() -> None:
    # An array that begins inside of a block names the block, and all of it is protected.
    allocator, _, events = make_allocator()
    block = allocator.allocate(4 * KIB, MAIN)
    first, last = block.address, block.address + block.nbytes
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    others = [allocator.allocate(512, MAIN) for _ in range(20)]
    assert not any(first <= one.address < last for one in others)
    events.finish(SIDE)
    assert first <= allocator.allocate(512, MAIN).address < last


def test_caching_allocator_record_stream_oom() -> None:
    allocator, provider, events = make_allocator(capacity_bytes=1024 * MIB)
    for _ in range(100):
        block = allocator.allocate(160 * MIB, MAIN)
        allocator.record_stream(block, SIDE)
        allocator.free(block)
    assert allocator.statistics.num_ooms == 0
    assert allocator.statistics.num_alloc_retries > 0
    allocator.empty_cache()
    assert not provider.segments
    assert not events.live


def test_a_block_in_use_by_a_stream_is_not_merged_into_its_neighbours() -> None:
    allocator, _, events = make_allocator()
    blocks = [allocator.allocate(512, MAIN) for _ in range(3)]
    middle = blocks[1].address
    allocator.record_stream(blocks[1], SIDE)
    for block in blocks:
        allocator.free(block)
    wide = allocator.allocate(3 * 512, MAIN)
    assert not wide.address <= middle < wide.address + wide.nbytes
    allocator.free(wide)
    events.finish(SIDE)
    assert allocator.allocate(2 * MIB // 2, MAIN).address == middle - 512


# Captures -----------------------------------------------------------------------------------


def test_graph_record_stream_before_capture() -> None:
    # An allocation inside of a capture must not ask an event from before it.
    allocator, _, events = make_allocator()
    block = allocator.allocate(512, MAIN)
    address = block.address
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    events.finish(SIDE)
    begin_capture(allocator)
    events.captured_streams = {None}
    inside = allocator.allocate(512, CAPTURED[0])
    assert allocator.allocate(512, MAIN).address != address
    events.captured_streams = set()
    end_capture(allocator)
    assert inside.size_class.pool_id == POOL
    assert allocator.allocate(512, MAIN).address == address


def test_graph_record_stream_inside_capture() -> None:
    # Naming a stream and freeing are allowed inside; the next ordinary allocation reclaims.
    allocator, _, events = make_allocator()
    begin_capture(allocator)
    events.captured_streams = {None}
    block = allocator.allocate(512, CAPTURED[0])
    allocator.record_stream(block, CAPTURED[1])
    allocator.free(block)
    assert allocator.statistics.all.active.current == 1
    assert allocator.allocate(512, CAPTURED[0]).address != block.address
    events.captured_streams = set()
    end_capture(allocator)
    allocator.allocate(512, MAIN)
    assert events.recorded == {}
    assert allocator.statistics.all.active.current == 2


@pytest.mark.parametrize("sides", [CAPTURED[1:2], CAPTURED[1:]], ids=["2 streams", "4 streams"])
def test_graph_capture_reclaim(sides: tuple[int, ...]) -> None:
    allocator, _, events = make_allocator(text="graph_capture_record_stream_reuse:True")
    main = CAPTURED[0]
    order = CaptureOrder(main)
    order.launch(main)
    begin_capture(allocator, order)
    events.captured_streams = {None}
    block = allocator.allocate(8 * MIB, main)
    address = block.address
    for side in sides:
        order.record(("fork", side), main)
        order.wait(("fork", side), side)
        order.launch(side)
        allocator.record_stream(block, side)
    allocator.free(block)
    for side in sides:
        # As long as one stream is not done, the bytes are not free.
        early = allocator.allocate(8 * MIB, main)
        assert early.address != address
        allocator.free(early)
        order.record(("join", side), side)
        order.wait(("join", side), main)
    order.launch(main)
    assert allocator.allocate(8 * MIB, main).address == address
    events.captured_streams = set()
    end_capture(allocator)


def test_without_the_option_a_join_frees_nothing_inside_of_the_capture() -> None:
    allocator, _, _ = make_allocator()
    main, side = CAPTURED[:2]
    order = CaptureOrder(main)
    order.launch(main)
    begin_capture(allocator, order)
    block = allocator.allocate(8 * MIB, main)
    order.record("fork", main)
    order.wait("fork", side)
    order.launch(side)
    allocator.record_stream(block, side)
    allocator.free(block)
    order.record("join", side)
    order.wait("join", main)
    assert allocator.allocate(8 * MIB, main).address != block.address
    end_capture(allocator)


def test_a_capture_that_fails_leaves_the_memory_where_it_was() -> None:
    allocator, provider, events = make_allocator()
    outside = allocator.allocate(512, MAIN)
    for _ in range(3):
        begin_capture(allocator)
        events.captured_streams = {None}
        blocks = [allocator.allocate(nbytes, CAPTURED[0]) for nbytes in (512, 3 * MIB)]
        allocator.record_stream(blocks[0], CAPTURED[1])
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(512 * MIB, CAPTURED[0])
        for block in blocks:
            allocator.free(block)
        events.captured_streams = set()
        end_capture(allocator)
        allocator.pools.release(POOL)
        allocator.empty_cache()
        assert allocator.statistics.all.reserved_bytes.current == 2 * MIB
        assert len(provider.segments) == 1
    allocator.free(outside)


# Who goes first -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["block first", "pool first"])
def test_a_pool_and_its_block_may_go_in_any_order(order: str) -> None:
    lockstep = Lockstep(AllocatorConfig(), 64 * MIB)
    lockstep.begin_pool(POOL, CAPTURED)
    pair = lockstep.allocate(3 * MIB, CAPTURED[0])
    assert pair is not None
    lockstep.end_pool(POOL)
    lockstep.empty_cache()
    first, second = _go(lockstep, pair)[:: 1 if order == "block first" else -1]
    first()
    lockstep.empty_cache()
    # Either way something still holds the segment.
    assert len(lockstep.provider.segments) == 1
    second()
    lockstep.empty_cache()
    assert not lockstep.provider.segments
    assert POOL not in lockstep.model.pools


def _go(lockstep: Lockstep, pair: Pair) -> tuple[Callable[[], None], Callable[[], None]]:
    return lambda: lockstep.free(pair), lambda: lockstep.release_pool(POOL)


def test_a_deleted_pool_does_not_help_where_memory_runs_out() -> None:
    lockstep = Lockstep(AllocatorConfig(), 40 * MIB)
    lockstep.create_pool(POOL, no_split=False, use_on_oom=True)
    lockstep.begin_pool(POOL, CAPTURED)
    pairs = [lockstep.allocate(nbytes, CAPTURED[0]) for nbytes in (5 * MIB, 9 * MIB)]
    assert None not in pairs
    lockstep.end_pool(POOL)
    lockstep.allocate(15 * MIB, CAPTURED[0])
    lockstep.free(lockstep.live[1])
    assert lockstep.allocate(9 * MIB, CAPTURED[0]) is not None
    lockstep.free(lockstep.live[-1])
    for _ in range(2):
        lockstep.release_pool(POOL)
    assert lockstep.allocate(9 * MIB, CAPTURED[0]) is None
    lockstep.close()


def test_a_block_outlives_its_allocator() -> None:
    provider = HostProvider()
    allocator = CachingAllocator(provider)
    block = allocator.allocate(512)
    block.segment.storage[:] = 7
    del allocator
    gc.collect()
    assert block.segment.storage[0] == 7
    assert provider.reserved_bytes == 2 * MIB
    del block
    gc.collect()
    assert provider.reserved_bytes == 0


def test_the_provider_of_a_pool_lives_as_long_as_its_blocks() -> None:
    allocator, own, _ = make_allocator()
    provider = BytesProvider(64 * MIB)
    is_gone = weakref.ref(provider)
    allocator.pools.create_or_increment(POOL, provider=provider)
    del provider
    allocator.pools.begin(POOL, CAPTURED.__contains__)
    block = allocator.allocate(512, CAPTURED[0])
    allocator.pools.end(POOL)
    for _ in range(2):
        allocator.pools.release(POOL)
    allocator.empty_cache()
    gc.collect()
    assert is_gone() is not None
    assert not own.segments
    allocator.free(block)
    allocator.empty_cache()
    del block
    gc.collect()
    assert is_gone() is None


# Finalisers ---------------------------------------------------------------------------------


class Owner:
    """An owner of a block that frees it in its finaliser."""

    def __init__(self, allocator: CachingAllocator, block: Block) -> None:
        weakref.finalize(self, allocator.free_later, block)


def test_a_block_that_a_finaliser_gives_back_inside_of_an_allocation() -> None:
    allocator, provider, _ = make_allocator()
    owners = [Owner(allocator, allocator.allocate(3 * MIB))]
    reserve = provider.allocate

    def drop_and_reserve(nbytes: int, stream: int = 0) -> Segment:
        owners.clear()
        gc.collect()
        assert allocator.statistics.all.allocated_bytes.current in (0, 3 * MIB)
        return reserve(nbytes, stream)

    provider.allocate = drop_and_reserve
    block = allocator.allocate(30 * MIB)
    assert allocator.statistics.all.allocated_bytes.current == 30 * MIB
    allocator.free(block)
    allocator.empty_cache()
    assert not provider.segments


def test_a_provider_may_call_the_allocator_while_a_finaliser_s_block_is_freed() -> None:
    allocator, provider, _ = make_allocator()
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    blocks = [allocator.allocate_exact(3 * MIB, pool_id) for _ in range(2)]
    seen: list[int] = []
    free = provider.free

    def look_and_free(segment: Segment) -> None:
        seen.append(allocator.statistics.all.allocated_bytes.current)
        free(segment)

    provider.free = look_and_free
    with allocator.lock:
        for block in blocks:
            allocator.free_later(block)
        allocator.release_pool_later(pool_id)
    assert allocator.statistics.all.allocated_bytes.current == 0
    assert seen == [0, 0]
    assert not provider.segments


def test_a_finaliser_never_waits_for_another_thread() -> None:
    allocator, _, _ = make_allocator()
    block = allocator.allocate(512)
    thread = threading.Thread(target=allocator.free_later, args=(block,))
    with allocator.lock:
        thread.start()
        thread.join(timeout=240)
        assert not thread.is_alive()
    assert allocator.statistics.all.allocated_bytes.current == 0


def test_many_threads_and_their_finalisers() -> None:
    allocator, provider, _ = make_allocator()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(100):
                block = allocator.allocate(512 * (1 + (step * number) % 9), number % 3)
                if step % 2:
                    allocator.free(block)
                else:
                    Owner(allocator, block)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    assert allocator.statistics.all.allocation.allocated == 400
    allocator.empty_cache()
    assert not provider.segments
