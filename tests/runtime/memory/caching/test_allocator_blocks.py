"""Blocks of the caching allocator: best fit, split, merge, streams, arenas, wrong calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from tests.fakes.scripted_provider import FIRST_ADDRESS, ScriptedEvents, ScriptedProvider
from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.sizes import MIB


def _make(conf: str = "") -> tuple[CachingAllocator, ScriptedProvider]:
    provider = ScriptedProvider()
    return CachingAllocator(provider, config=parse_alloc_conf(conf)), provider


def _read(allocator: CachingAllocator, *names: str) -> tuple[int, ...]:
    figures = allocator.statistics.to_dict()
    return tuple(figures[f"{name}.all.current"] for name in names)


def test_one_byte_is_counted_and_given_back_exactly() -> None:
    allocator, _ = _make()
    before = _read(allocator, "allocated_bytes", "allocation")
    block = allocator.allocate(1)
    assert _read(allocator, "allocated_bytes", "requested_bytes", "allocation") == (512, 1, 1)
    allocator.free(block)
    assert _read(allocator, "allocated_bytes", "allocation") == before


def test_statistics_of_256_floats() -> None:
    allocator, _ = _make()
    block = allocator.allocate(256 * 4)
    assert _read(allocator, "active_bytes") == (1024,)
    allocator.free(block)
    figures = allocator.statistics.to_dict()
    assert figures["active_bytes.all.freed"] == 1024
    assert figures["active_bytes.all.peak"] == 1024
    allocator.statistics.reset_peak()
    assert allocator.statistics.to_dict()["active_bytes.all.peak"] == 0


def test_small_blocks_share_a_segment_in_order() -> None:
    allocator, provider = _make()
    blocks = [allocator.allocate(1000) for _ in range(4)]
    assert [block.address - FIRST_ADDRESS for block in blocks] == [0, 1024, 2048, 3072]
    assert [block.offset for block in blocks] == [0, 1024, 2048, 3072]
    assert provider.allocation_count == 1
    assert _read(allocator, "inactive_split", "inactive_split_bytes") == (1, 2 * MIB - 4096)


def test_the_best_fit_wins_then_the_lowest_address() -> None:
    allocator, _ = _make()
    sizes = [4096, 512, 2048, 512, 2048, 512, 1024, 512]
    blocks = [allocator.allocate(size) for size in sizes]
    addresses = [block.address for block in blocks]
    for index in (0, 2, 4, 6):
        allocator.free(blocks[index])
    assert allocator.allocate(1024).address == addresses[6]
    assert allocator.allocate(1500).address == addresses[2]
    assert allocator.allocate(1500).address == addresses[4]
    assert allocator.allocate(1500).address == addresses[0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_merge_in_every_order(order: tuple[int, ...]) -> None:
    allocator, provider = _make()
    blocks = [allocator.allocate(MIB // 2) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index])
    assert _read(allocator, "inactive_split", "inactive_split_bytes") == (0, 0)
    assert [block["size"] for block in allocator.snapshot()[0]["blocks"]] == [2 * MIB]
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_a_segment_with_a_block_in_use_is_kept() -> None:
    allocator, provider = _make()
    kept, freed = allocator.allocate(512), allocator.allocate(512)
    allocator.free(freed)
    allocator.empty_cache()
    assert provider.reserved_bytes == 2 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


@pytest.mark.parametrize(
    ("nbytes", "rest_is_kept_apart"),
    [(20 * MIB - MIB, False), (20 * MIB - MIB - 512, True), (20 * MIB, False)],
)
def test_a_large_block_is_split_if_more_than_1_mib_remains(
    nbytes: int, rest_is_kept_apart: bool
) -> None:
    allocator, _ = _make()
    allocator.free(allocator.allocate(20 * MIB))
    block = allocator.allocate(nbytes)
    assert block.nbytes == (nbytes if rest_is_kept_apart else 20 * MIB)
    assert block.is_split is rest_is_kept_apart
    assert block.requested_bytes == nbytes


def test_a_small_block_is_split_if_512_bytes_remain() -> None:
    allocator, _ = _make()
    whole = allocator.allocate(MIB)
    second = allocator.allocate(MIB - 512)
    assert not second.next or second.next.nbytes == 512
    assert allocator.allocate(512).address == whole.address + 2 * MIB - 512


def test_blocks_serve_their_own_stream_only() -> None:
    allocator, provider = _make()
    block = allocator.allocate(512, stream=1)
    address = block.address
    allocator.free(block)
    assert allocator.allocate(512, stream=2).address != address
    assert allocator.allocate(512, stream=1).address == address
    assert provider.allocation_count == 2


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    events = ScriptedEvents(busy={2})
    allocator = CachingAllocator(ScriptedProvider(), events=events)
    block = allocator.allocate(512, stream=1)
    address = block.address
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert _read(allocator, "allocation", "active") == (0, 1)
    assert allocator.allocate(512, stream=1).address != address
    events.finish(2)
    assert allocator.allocate(512, stream=1).address == address
    assert not events.outstanding


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_requests() -> None:
    allocator, provider = _make("max_split_size_mb:32")
    allocator.free(allocator.allocate(40 * MIB))
    assert allocator.statistics.to_dict()["oversize_segments.current"] == 1
    assert allocator.allocate(30 * MIB).segment.nbytes == 30 * MIB
    block = allocator.allocate(32 * MIB)
    assert (block.nbytes, provider.allocation_count) == (40 * MIB, 2)
    assert allocator.statistics.to_dict()["oversize_allocations.current"] == 1
    allocator.free(block)
    assert allocator.statistics.to_dict()["oversize_allocations.current"] == 0
    assert allocator.statistics.to_dict()["max_split_size"] == 32 * MIB


@pytest.mark.parametrize(("cached_mib", "is_reused"), [(58, True), (60, False)])
def test_an_oversize_block_may_be_20_mib_too_large_but_not_more(
    cached_mib: int, is_reused: bool
) -> None:
    allocator, provider = _make("max_split_size_mb:32")
    allocator.free(allocator.allocate(cached_mib * MIB))
    allocator.allocate(40 * MIB)
    assert provider.allocation_count == (1 if is_reused else 2)


def test_settings_change_while_running() -> None:
    allocator, _ = _make()
    nbytes = 84 * MIB
    allocator.configure(parse_alloc_conf("roundup_power2_divisions:4"))
    block = allocator.allocate(nbytes)
    assert block.nbytes == 96 * MIB
    assert _read(allocator, "requested_bytes", "allocated_bytes") == (nbytes, 96 * MIB)
    allocator.free(block)
    allocator.configure(parse_alloc_conf("garbage_collection_threshold:0.5"))
    allocator.empty_cache()
    assert allocator.allocate(nbytes).nbytes == nbytes
    assert allocator.config.garbage_collection_threshold == 0.5


def test_an_arena_is_a_whole_segment_that_serves_again() -> None:
    allocator, provider = _make()
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    first = allocator.allocate_exact(3 * MIB + 5, pool_id)
    assert first.nbytes == first.segment.nbytes == 3 * MIB + (32 << 10)
    assert allocator.pool_bytes(pool_id) == (first.nbytes, first.nbytes)
    address = first.address
    allocator.free(first)
    assert allocator.pool_bytes(pool_id) == (first.nbytes, 0)
    second = allocator.allocate_exact(MIB, pool_id)
    assert (second.address, second.nbytes) == (address, 3 * MIB + (32 << 10))
    assert second.requested_bytes == MIB
    assert provider.allocation_count == 1
    assert _read(allocator, "allocation", "segment", "inactive_split") == (1, 1, 0)
    allocator.free(second)
    allocator.pools.release(pool_id)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_an_arena_of_nothing_is_512_bytes() -> None:
    allocator, _ = _make()
    allocator.pools.create_or_increment(PoolId(90))
    assert allocator.allocate_exact(0, PoolId(90)).nbytes == 512


def test_a_block_is_found_by_its_address_while_in_use() -> None:
    allocator, _ = _make()
    allocator.allocate(512)
    block = allocator.allocate(512)
    assert allocator.find_block(block.address) is block
    allocator.free(block)
    with pytest.raises(TracegraphError, match="no block of this allocator is in use at 0x7f"):
        allocator.find_block(block.address)


def _free_twice(allocator: CachingAllocator, block: Block) -> None:
    allocator.free(block)
    allocator.free(block)


def _free_elsewhere(allocator: CachingAllocator, block: Block) -> None:
    CachingAllocator(ScriptedProvider()).free(block)


def _record_after_free(allocator: CachingAllocator, block: Block) -> None:
    allocator.free(block)
    allocator.record_stream(block, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_free_twice, "cannot free the block at 0x7f0000000000: it is not in use"),
        (_free_elsewhere, "cannot free the block at 0x7f0000000000: it is not in use"),
        (_record_after_free, "cannot record stream 5 on the block at 0x7f0000000000"),
        (lambda allocator, block: allocator.find_block(123), "no block of this allocator.*0x7b"),
        (lambda allocator, block: allocator.allocate(-1), "cannot allocate -1 bytes"),
        (
            lambda allocator, block: allocator.allocate_exact(-5, PoolId(1)),
            "cannot allocate -5 ",
        ),
        (lambda allocator, block: allocator.allocate_exact(5, PoolId(999)), "no pool .999, 0."),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(
    call: Callable[[CachingAllocator, Block], object], message: str
) -> None:
    allocator, _ = _make()
    block = allocator.allocate(512)
    with pytest.raises(TracegraphError, match=message) as caught:
        call(allocator, block)
    assert len(str(caught.value).splitlines()) == 4
    assert allocator.allocate(1024).nbytes == 1024


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 62) + 1])
def test_an_absurd_size_has_its_own_message(nbytes: int) -> None:
    allocator, provider = _make()
    with pytest.raises(OutOfMemoryError, match="tried to allocate more than 1 EiB"):
        allocator.allocate(nbytes)
    assert provider.log == []
    assert allocator.statistics.num_ooms == 0


def test_free_later_waits_while_its_thread_is_inside_the_allocator() -> None:
    allocator, _ = _make()
    block = allocator.allocate(512)
    address = block.address
    with allocator.lock:
        allocator.free_later(block)
        assert block.is_allocated
        assert allocator.allocate(512).address == address
    allocator.free_later(allocator.find_block(address))
    assert _read(allocator, "allocation") == (0,)


def test_a_block_that_was_returned_twice_is_refused_once() -> None:
    allocator, _ = _make()
    block = allocator.allocate(512)
    with allocator.lock:
        allocator.free_later(block)
        allocator.free_later(block)
        with pytest.raises(TracegraphError, match="it is not in use"):
            allocator.allocate(512)
    assert allocator.allocate(512).address == FIRST_ADDRESS
    assert _read(allocator, "allocation") == (1,)


class _Holder:
    """Gives its block back when it is collected; a cycle, so that only the collector finds it."""

    def __init__(self, allocator: CachingAllocator, block: Block) -> None:
        self.allocator, self.block, self.me = allocator, block, self

    def __del__(self) -> None:
        self.allocator.free_later(self.block)


def test_a_collection_inside_an_allocation_frees_blocks_safely() -> None:
    allocator, provider = _make()
    collected_at: list[int] = []

    def collect() -> None:
        collected_at.append(provider.allocation_count)
        gc.collect()

    neighbours = [allocator.allocate(512) for _ in range(3)]
    _Holder(allocator, neighbours[1])
    del neighbours[1]
    provider.before_allocate = collect
    large = allocator.allocate(30 * MIB)
    assert collected_at == [1]
    assert _read(allocator, "allocation", "active") == (3, 3)
    for block in (*neighbours, large):
        allocator.free(block)
    provider.before_allocate = lambda: None
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_finalisers_at_any_moment_leave_the_books_straight() -> None:
    allocator, provider = _make()
    threshold = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for turn in range(400):
            _Holder(allocator, allocator.allocate(512 * (1 + turn % 7), turn % 2))
            allocator.free(allocator.allocate(300 * (turn % 11)))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    allocator.empty_cache()
    assert _read(allocator, "allocation", "active", "inactive_split", "segment") == (0, 0, 0, 0)
    assert provider.reserved_bytes == 0


def test_threads_share_an_allocator() -> None:
    allocator, provider = _make()
    failures: list[BaseException] = []

    def work(stream: int) -> None:
        try:
            for turn in range(200):
                blocks = [allocator.allocate(700 * (1 + (turn + n) % 5), stream) for n in range(4)]
                allocator.free(blocks[1])
                allocator.free_later(blocks[0])
                allocator.free(blocks[3])
                allocator.free(blocks[2])
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    figures = allocator.statistics.to_dict()
    assert figures["allocation.all.allocated"] == figures["allocation.all.freed"] == 4 * 200 * 4
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_the_lock_is_free_while_the_provider_works_if_asked_for() -> None:
    allocator, provider = _make("release_lock_on_cudamalloc:True")
    seen: list[int] = []

    def allocate_elsewhere() -> None:
        provider.before_allocate = lambda: None
        thread = threading.Thread(target=lambda: seen.append(allocator.allocate(512).address))
        thread.start()
        thread.join(timeout=240)

    provider.before_allocate = allocate_elsewhere
    block = allocator.allocate(30 * MIB)
    assert len(seen) == 1
    assert _read(allocator, "allocation") == (2,)
    allocator.free(block)


def test_repr_says_how_much_there_is() -> None:
    allocator, _ = _make()
    block = allocator.allocate(1000)
    assert repr(allocator) == (
        "CachingAllocator(device=0, provider=scripted, reserved=2,097,152 bytes, "
        "allocated=1,024 bytes)"
    )
    assert repr(block) == "Block(0x7f0000000000, 1,024 bytes, stream 0, allocated)"
    allocator.free(block)
    assert repr(block) == "Block(0x7f0000000000, 2,097,152 bytes, stream 0, free)"
    assert (
        repr(allocator.pools.choose(0))
        == "Pool((0, 0), use_count=1, segments=1, free=2,097,152 bytes)"
    )
