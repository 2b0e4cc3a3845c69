"""The caching host allocator: sizes, reuse under copies, what goes back, statistics."""

from __future__ import annotations

import gc

import pytest

from tests.fakes.pinned_pages import FakeEvents, FakePages, make
from tracegraph.runtime.errors import InternalError, OutOfMemoryError
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator, find_host_block
from tracegraph.runtime.memory.pinned.host_statistics import DurationStat
from tracegraph.runtime.memory.providers.segment import Segment

KIB = 1 << 10


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (40 * KIB, 64 * KIB), (64 * KIB, 64 * KIB), (65537, 1 << 17)],
)
def test_sizes_are_powers_of_two(allocator: CachingHostAllocator, nbytes: int, size: int) -> None:
    block = allocator.allocate(nbytes)
    assert (block.nbytes, block.requested_bytes, block.is_allocated) == (size, nbytes, True)


def test_less_than_nothing_is_refused(allocator: CachingHostAllocator) -> None:
    with pytest.raises(InternalError, match="cannot pin -1 bytes"):
        allocator.allocate(-1)


def test_a_freed_block_serves_its_size_only(
    allocator: CachingHostAllocator, pages: FakePages
) -> None:
    block = allocator.allocate(1000)
    allocator.free(block)
    assert allocator.allocate(400) is not block
    assert allocator.allocate(513) is block
    assert pages.calls == [("allocate", 1024), ("allocate", 512)]


def test_what_was_freed_last_serves_first(allocator: CachingHostAllocator) -> None:
    first, second = allocator.allocate(8), allocator.allocate(8)
    allocator.free(first)
    allocator.free(second)
    assert [allocator.allocate(8), allocator.allocate(8)] == [second, first]


def test_freed_twice_or_by_another_is_refused(
    allocator: CachingHostAllocator, pages: FakePages
) -> None:
    block = allocator.allocate(8)
    with pytest.raises(InternalError, match="it is not in use"):
        CachingHostAllocator(pages).free(block)
    allocator.free(block)
    with pytest.raises(InternalError, match="freed before or belongs to another"):
        allocator.free(block)


def test_not_reused_while_a_copy_reads_it(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    block = allocator.allocate(8)
    allocator.record_event(block, 1)
    allocator.free(block)
    assert allocator.allocate(8) is not block
    events.finish()
    assert allocator.allocate(8) is block
    assert not events.live


def test_every_stream_must_be_over(allocator: CachingHostAllocator, events: FakeEvents) -> None:
    block = allocator.allocate(8)
    for stream in (1, 2):
        allocator.record_event(block, stream)
    allocator.free(block)
    for stream in (1, 2):
        assert allocator.allocate(8) is not block
        events.finish(stream)
    assert allocator.allocate(8) is block


def test_a_slow_stream_holds_up_its_own_blocks_only(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    blocks = [allocator.allocate(8) for _ in range(2)]
    for stream, block in enumerate(blocks):
        allocator.record_event(block, stream)
        allocator.free(block)
    events.finish(1)
    assert allocator.allocate(8) is blocks[1]


def test_a_later_copy_on_a_stream_replaces_the_event_of_the_earlier(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    block = allocator.allocate(8)
    allocator.record_event(block, 1)
    events.finish()
    allocator.record_event(block, 1)
    assert len(events.live) == 1
    allocator.free(block)
    assert allocator.allocate(8) is not block


def test_synchronize_waits_for_the_copies_of_one_block(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    first, second = allocator.allocate(8), allocator.allocate(8)
    allocator.record_event(first, 1)
    allocator.record_event(second, 1)
    allocator.synchronize(second)
    assert events.done == {1}


def test_free_later_runs_at_the_next_call(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    block, address = allocator.allocate(8), 0
    address = block.address
    allocator.free_later(block)
    assert block.is_allocated
    assert allocator.find_block(address) is None
    assert allocator.allocate(8) is block


def test_free_later_inside_the_allocator(pages: FakePages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finaliser may run in this thread while the lock is held, and while a segment is made."""
    allocator = CachingHostAllocator(pages)
    blocks = [allocator.allocate(8) for _ in range(3)]
    count_request, allocate = allocator.statistics.count_request, pages.allocate

    def collect_in_lock(nbytes: int) -> None:
        assert allocator._lock.locked()
        allocator.free_later(blocks.pop())
        count_request(nbytes)

    def collect_outside(nbytes: int) -> Segment:
        allocator.free_later(blocks.pop())
        return allocate(nbytes)

    monkeypatch.setattr(allocator.statistics, "count_request", collect_in_lock)
    monkeypatch.setattr(pages, "allocate", collect_outside)
    new = allocator.allocate(8)
    monkeypatch.undo()
    assert len(blocks) == 1
    assert len({new, allocator.allocate(8), allocator.allocate(8), blocks[0]}) == 4
    assert allocator.statistics.active_requests.current == 4
    assert allocator.statistics.allocations.current == 4


def test_find_block(allocator: CachingHostAllocator) -> None:
    blocks = [allocator.allocate(1 << 10) for _ in range(3)]
    for block in blocks:
        assert allocator.find_block(block.address) is block
        assert allocator.find_block(block.address + 1023) is block
        assert allocator.find_block(block.address + 1024) is None
        assert find_host_block(block.address) == (allocator, block)
    assert allocator.find_block(0) is None
    allocator.free(blocks[1])
    assert allocator.find_block(blocks[1].address) is None
    assert find_host_block(blocks[1].address) is None


def test_empty_cache_leaves_what_is_in_use(
    allocator: CachingHostAllocator, pages: FakePages, events: FakeEvents
) -> None:
    used, idle, pending = (allocator.allocate(size) for size in (8, 16, 32))
    allocator.record_event(pending, 1)
    allocator.free(idle)
    allocator.free(pending)
    allocator.empty_cache()
    assert {segment.nbytes for segment in pages.live} == {8, 32}
    assert allocator.find_block(used.address) is used
    events.finish()
    allocator.empty_cache()
    assert {segment.nbytes for segment in pages.live} == {8}
    assert allocator.reserved_bytes == 8


def test_memory_is_freed_with_the_last_holder_of_the_allocator(
    pages: FakePages, events: FakeEvents
) -> None:
    allocator = make(pages, "pinned_reserve_segment_size_mb:1", events)
    inside, used, idle = (allocator.allocate(size) for size in (8, 1 << 21, 1 << 22))
    for block in (inside, used, idle):
        allocator.record_event(block, 1)
    allocator.free(inside)
    allocator.free(idle)
    count = len(events.live)
    del allocator
    gc.collect()
    assert not pages.live
    # All three copies were waited for first.
    assert not events.live
    assert len(events.done) == count == 3


def test_host_memory_stats(allocator: CachingHostAllocator, events: FakeEvents) -> None:
    """As in PyTorch sizes are rounded to powers of two; emptying the cache leaves blocks in use."""
    first = [allocator.allocate(10 * KIB * 4) for _ in range(2)]
    second = allocator.allocate(20 * KIB * 4)
    figures = allocator.statistics.to_dict()
    # 10 and 20 KiB of four bytes each become 16 and 32.
    reserved_bytes = (2 * 16 + 32) * KIB * 4
    for metric in ("allocated_bytes", "active_bytes"):
        assert figures[f"{metric}.current"] == reserved_bytes
    assert figures["allocations.current"] == figures["active_requests.current"] == 3
    assert (figures["num_host_alloc"], figures["num_host_free"]) == (3, 0)
    assert figures["host_alloc_time.count"] == 3
    allocator.record_event(first[0], 1)
    allocator.free(first[0])
    allocator.free(second)
    figures = allocator.statistics.to_dict()
    # A block that a copy is reading is still active.
    assert figures["active_bytes.current"] == 2 * 16 * KIB * 4
    assert figures["active_bytes.freed"] == 32 * KIB * 4
    assert figures["active_bytes.peak"] == figures["allocated_bytes.current"] == reserved_bytes
    events.finish()
    allocator.empty_cache()
    figures = allocator.statistics.to_dict()
    assert figures["allocated_bytes.current"] == figures["active_bytes.current"] == 64 * KIB
    assert figures["num_host_free"] == figures["host_free_time.count"] == 2


def test_statistics_can_be_reset(allocator: CachingHostAllocator) -> None:
    allocator.free(allocator.allocate(8))
    statistics = allocator.statistics
    statistics.reset_peak()
    assert (statistics.active_bytes.peak, statistics.allocated_bytes.peak) == (0, 8)
    statistics.reset_accumulated()
    figures = statistics.to_dict()
    assert figures["allocated_bytes.current"] == 8
    assert sum(value for key, value in figures.items() if "current" not in key) == 8 + 1
    assert figures["allocations.peak"] == 1


def test_keys_of_the_statistics(allocator: CachingHostAllocator) -> None:
    metrics = ("active_bytes", "active_requests", "allocated_bytes", "allocations")
    times = ("host_alloc_time", "host_free_time")
    keys = {f"{m}.{f}" for m in metrics for f in ("allocated", "current", "freed", "peak")}
    keys |= {f"{t}.{f}" for t in times for f in ("avg", "count", "max", "min", "total")}
    keys |= {"num_host_alloc", "num_host_free"}
    assert list(allocator.statistics.to_dict()) == sorted(keys)


def test_durations() -> None:
    stat = DurationStat()
    assert set(stat.to_dict().values()) == {0}
    for duration in (7, 2, 4):
        stat.add(duration)
    assert stat.to_dict() == {"total": 13, "max": 7, "min": 2, "count": 3, "avg": 4}


def test_without_memory_pending_copies_are_waited_for(pages: FakePages, events: FakeEvents) -> None:
    pages.limit_bytes = 1 << 10
    allocator = CachingHostAllocator(pages, events=events)
    block = allocator.allocate(1 << 10)
    allocator.record_event(block, 1)
    allocator.free(block)
    assert allocator.allocate(1 << 10) is block


def test_without_memory_the_cache_is_emptied(pages: FakePages) -> None:
    pages.limit_bytes = 1 << 10
    allocator = CachingHostAllocator(pages)
    allocator.free(allocator.allocate(1 << 9))
    assert allocator.allocate(1 << 10).nbytes == 1 << 10
    with pytest.raises(OutOfMemoryError, match="full"):
        allocator.allocate(1)
