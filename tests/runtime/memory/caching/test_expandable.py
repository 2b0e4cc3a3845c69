"""Expandable segments: where requests find memory, and what is unmapped."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.fakes.memory_driver import MemoryDriver
from tests.fakes.virtual_bytes_provider import VirtualBytesProvider
from tests.runtime.memory.caching.test_allocator_graph_memory import Capture
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import new_pool_id

MIB = 1 << 20
PAGE = 20 * MIB
EXPANDABLE = parse_alloc_conf("expandable_segments:True")


def make(
    capacity_bytes: int = 1 << 30, config: AllocatorConfig = EXPANDABLE
) -> tuple[CachingAllocator, VirtualBytesProvider]:
    provider = VirtualBytesProvider(capacity_bytes)
    return CachingAllocator(provider, config=config), provider


def read(allocator: CachingAllocator, *names: str) -> list[int]:
    figures = allocator.statistics.to_dict()
    return [figures[name if "num" in name else f"{name}.all.current"] for name in names]


def offsets(blocks: list[Block]) -> list[int]:
    return [block.offset for block in blocks]


@pytest.mark.parametrize(
    ("nbytes", "during_bytes", "after_bytes"),
    [
        (512, 2 * MIB, 2 * MIB),
        (MIB, 4 * MIB, 2 * MIB),
        (MIB + 512, 20 * MIB, 20 * MIB),
        # Less than a page cannot be unmapped: the output lies on a border of two.
        (10 * MIB - 512, 40 * MIB, 40 * MIB),
        (10 * MIB + 512, 40 * MIB, 20 * MIB),
    ],
    ids=["512", "1MiB", "1MiB+512", "10MiB-512", "10MiB+512"],
)
def test_memory_life_cycle_of_a_graph_expandable(
    nbytes: int, during_bytes: int, after_bytes: int
) -> None:
    allocator, provider = make()
    given = allocator.allocate(nbytes)
    kind = "small_pool" if nbytes <= MIB else "large_pool"
    names = ("segment", "reserved_bytes", "active", "active_bytes")

    def measure() -> list[int]:
        figures = allocator.statistics.to_dict()
        return [figures[f"{name}.{kind}.current"] for name in names]

    def subtract(before: list[int]) -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(measure(), before, strict=True))

    before = measure()
    extra = (2, 1024) if nbytes <= MIB else (0, 0)
    capture = Capture(allocator, nbytes)
    active = (1 + extra[0], nbytes + extra[1])
    assert subtract(before) == (0, during_bytes, *active)
    allocator.empty_cache()
    assert subtract(before) == (0, during_bytes, *active)
    capture.delete()
    allocator.empty_cache()
    assert subtract(before) == (0, after_bytes, 1, nbytes)
    allocator.free(capture.output)
    allocator.empty_cache()
    assert subtract(before) == (0, 0, 0, 0)
    allocator.free(given)
    allocator.empty_cache()
    assert (provider.mapped, provider.ranges, provider.segments) == ({}, {}, {})


def test_one_range_per_stream_and_kind_takes_nine_eighths_of_the_device() -> None:
    allocator, provider = make(16 * PAGE)
    blocks = [
        allocator.allocate(nbytes, stream)
        for stream in (0, 1)
        for nbytes in (512, 2 * MIB, 512, 2 * MIB)
    ]
    assert sorted(provider.ranges.values()) == [18 * PAGE] * 4
    assert len({block.segment for block in blocks}) == 4
    assert offsets(blocks) == [0, 0, 512, 2 * MIB] * 2
    assert read(allocator, "segment", "reserved_bytes", "num_device_alloc") == [0, 44 * MIB, 4]
    assert all(call.nbytes in (2 * MIB, PAGE) for call in provider.calls if call.name == "map")


def test_the_reserve_option_limits_the_range() -> None:
    config = parse_alloc_conf("expandable_segments:True,expandable_segments_reserve:0.5")
    allocator, provider = make(16 * PAGE, config)
    block = allocator.allocate(8 * PAGE)
    assert list(provider.ranges.values()) == [8 * PAGE]
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(8 * PAGE + 512)
    # Where a range is full, another one begins.
    other = allocator.allocate(2 * MIB)
    assert other.segment is not block.segment
    assert list(provider.ranges.values()) == [8 * PAGE, 8 * PAGE]


def test_a_request_grows_the_free_block_before_the_end() -> None:
    allocator, provider = make()
    first = allocator.allocate(15 * MIB)
    large = allocator.allocate(30 * MIB)
    # 5 MiB of the first page served it too.
    assert offsets([first, large]) == [0, 15 * MIB]
    assert sum(provider.mapped.values()) == 3 * PAGE
    allocator.free(first)
    allocator.free(large)
    whole = allocator.allocate(59 * MIB)
    assert (whole.offset, sum(provider.mapped.values())) == (0, 3 * PAGE)


def test_gaps_are_filled_lowest_address_first() -> None:
    allocator, provider = make()
    blocks = [allocator.allocate(PAGE) for _ in range(5)]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    allocator.empty_cache()
    assert sum(provider.mapped.values()) == 3 * PAGE
    assert read(allocator, "num_device_free") == [2]
    again = [allocator.allocate(PAGE) for _ in range(3)]
    assert offsets(again) == [PAGE, 3 * PAGE, 5 * PAGE]


def test_a_gap_that_is_too_small_is_passed_over() -> None:
    allocator, _ = make()
    blocks = [allocator.allocate(PAGE) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.allocate(2 * PAGE).offset == 3 * PAGE


def test_only_whole_pages_are_unmapped() -> None:
    allocator, provider = make()
    first = allocator.allocate(5 * MIB)
    middle = allocator.allocate(50 * MIB)
    last = allocator.allocate(5 * MIB)
    allocator.free(middle)
    allocator.empty_cache()
    start = first.segment.address
    assert sorted(address - start for address in provider.mapped) == [0, 2 * PAGE]
    segments = allocator.snapshot()
    assert [(each["address"] - start, each["total_size"]) for each in segments] == [
        (0, PAGE),
        (2 * PAGE, PAGE),
    ]
    assert [[block["size"] for block in each["blocks"]] for each in segments] == [
        [5 * MIB, 15 * MIB],
        [15 * MIB, 5 * MIB],
    ]
    assert all(each["is_expandable"] for each in segments)
    assert read(allocator, "reserved_bytes", "inactive_split", "inactive_split_bytes") == [
        2 * PAGE,
        0,
        0,
    ]
    # What was left and what is mapped anew merge.
    whole = allocator.allocate(50 * MIB)
    assert (whole.offset, allocator.find_block(last.address)) == (5 * MIB, last)
    assert len(allocator.snapshot()) == 1


def test_room_for_growth_is_kept_for_large_requests() -> None:
    allocator, _ = make()
    first, kept = allocator.allocate(8 * MIB), allocator.allocate(5 * MIB)
    allocator.free(first)
    # The last 7 MiB of the page fit better, but could grow.
    block = allocator.allocate(6 * MIB)
    assert (block.offset, kept.offset) == (0, 8 * MIB)


def test_pages_that_another_stream_reads_stay() -> None:
    provider = VirtualBytesProvider(1 << 30)
    events = PendingEvents()
    allocator = CachingAllocator(provider, config=EXPANDABLE, events=events)
    block = allocator.allocate(PAGE)
    allocator.record_stream(block, 7)
    allocator.free(block)
    other = allocator.allocate(PAGE)
    assert other.offset == PAGE
    events.is_over = True
    assert allocator.allocate(PAGE).offset == 0


class PendingEvents:
    is_over = False

    def record(self, stream: int) -> int:
        return stream

    def is_done(self, event: int) -> bool:
        return self.is_over

    def synchronize(self, event: int) -> None:
        self.is_over = True

    def release(self, event: int) -> None:
        assert self.is_over


def test_the_allowed_share_holds_for_pages_too() -> None:
    config = parse_alloc_conf("expandable_segments:True,per_process_memory_fraction:0.5")
    allocator, provider = make(4 * PAGE, config)
    allocator.allocate(PAGE)
    allocator.allocate(PAGE)
    with pytest.raises(OutOfMemoryError, match="allowed"):
        allocator.allocate(2 * MIB)
    assert sum(provider.mapped.values()) == 2 * PAGE


def test_switched_off_expandable_blocks_rest_until_it_is_on_again() -> None:
    allocator, provider = make()
    block = allocator.allocate(5 * MIB)
    allocator.free(block)
    allocator.configure(AllocatorConfig())
    usual = allocator.allocate(5 * MIB)
    assert usual.segment.address in provider.segments
    allocator.configure(EXPANDABLE)
    # The rest of the usual segment is smaller, and serves first.
    blocks = [allocator.allocate(nbytes) for nbytes in (5 * MIB, 12 * MIB)]
    assert [each.segment for each in blocks] == [usual.segment, block.segment]


def test_arenas_and_pools_with_a_provider_do_not_grow() -> None:
    allocator, provider = make()
    own = VirtualBytesProvider(1 << 30)
    pool_id, other_id = new_pool_id(), new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    arena = allocator.allocate_exact(3 * MIB, pool_id)
    assert (arena.nbytes, list(provider.segments)) == (3 * MIB, [arena.address])
    allocator.pools.create_or_increment(other_id, provider=own)
    allocator.pools.begin(other_id, lambda stream: stream == 1)
    block = allocator.allocate(512, stream=1)
    assert list(own.segments) == [block.address]
    assert (provider.ranges, own.ranges) == ({}, {})


def test_a_private_pool_has_ranges_of_its_own_and_loses_them_last() -> None:
    allocator, provider = make()
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, lambda stream: stream == 1)
    inside, outside = allocator.allocate(PAGE, stream=1), allocator.allocate(PAGE, stream=2)
    allocator.pools.end(pool_id)
    assert inside.segment is not outside.segment
    assert allocator.pool_bytes(pool_id) == (PAGE, PAGE)
    allocator.free(inside)
    allocator.empty_cache()
    assert len(provider.ranges) == 2
    allocator.pools.release(pool_id)
    allocator.empty_cache()
    assert list(provider.ranges) == [outside.segment.address]
    assert not any("private" in key for key in allocator.statistics.to_dict())


def test_history_names_maps_and_unmaps() -> None:
    allocator, _ = make()
    allocator.history.record()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.empty_cache()
    entries = [(one["action"], one["size"]) for one in allocator.history.read_entries()]
    assert entries == [
        ("segment_map", 2 * PAGE),
        ("alloc", 30 * MIB),
        ("free_requested", 30 * MIB),
        ("free_completed", 30 * MIB),
        ("segment_unmap", 2 * PAGE),
    ]


def test_a_block_keeps_its_memory_when_the_allocator_is_gone() -> None:
    allocator, provider = make()
    kept = [allocator.allocate(30 * MIB), allocator.allocate(512)]
    del allocator
    gc.collect()
    assert sum(provider.mapped.values()) == 42 * MIB
    kept.clear()
    gc.collect()
    assert (provider.mapped, provider.ranges) == ({}, {})


def test_no_unmap_goes_under_work_of_the_gpu() -> None:
    driver = MemoryDriver(is_deferred=True, checks_context=False)
    provider = CudaVirtualProvider(driver, driver.retain_primary_context(0), 0)
    allocator = CachingAllocator(provider, config=EXPANDABLE)
    block: Any = allocator.allocate(5 * MIB)
    driver.fill_async(block.address, 7, 1, 64, 0x5555)
    allocator.free(block)
    # MemoryDriver refuses an unmap under work; the provider waits first.
    allocator.empty_cache()
    assert driver.query_stream(0x5555)
