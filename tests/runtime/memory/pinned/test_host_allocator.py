"""The caching host allocator: sizes, reuse under copies, captures, options, statistics.

Longer than 400 lines: PyTorch's tests, the options and the threads all use the fakes below.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tracegraph.runtime.errors import CaptureError, InternalError, OutOfMemoryError
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pinned import event_poller
from tracegraph.runtime.memory.pinned.host_allocator import (
    CachingHostAllocator,
    find_host_block,
)
from tracegraph.runtime.memory.pinned.host_block import HostBlock
from tracegraph.runtime.memory.pinned.host_pages import (
    ALIGNMENT,
    PlainPages,
    reserve_pages,
    touch_pages,
)
from tracegraph.runtime.memory.pinned.host_statistics import DurationStat
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.providers.segment import Segment

KIB = 1 << 10
CAPTURED, OTHER = 7, 8


class FakePages:
    """Returns addresses without memory, and counts."""

    name = "fake"

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.live: dict[Segment, str] = {}
        self.calls: list[tuple[str, int]] = []
        self._addresses = itertools.count(1 << 32, 1 << 24)

    def allocate(self, nbytes: int) -> Segment:
        used_bytes = sum(segment.nbytes for segment in self.live)
        if used_bytes + nbytes > self.limit_bytes:
            raise OutOfMemoryError("full", where="here", why="because", fix="no", anchor="pinned")
        segment = Segment(next(self._addresses), nbytes, None)
        self.live[segment] = "locked"
        self.calls.append(("allocate", nbytes))
        return segment

    def free(self, segment: Segment) -> None:
        assert self.live.pop(segment) == "locked"
        self.calls.append(("free", segment.nbytes))

    def register(self, segment: Segment) -> None:
        self.live[segment] = "registered"
        self.calls.append(("register", segment.nbytes))

    def unregister(self, segment: Segment) -> None:
        assert self.live.pop(segment) == "registered"
        self.calls.append(("unregister", segment.nbytes))


class FakeEvents:
    """Events that are over when the test says so, or when they are waited for."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.done: set[int] = set()
        self.is_asked = False
        self._numbers = itertools.count()

    def record(self, stream: int) -> int:
        event = next(self._numbers)
        self.live[event] = stream
        return event

    def is_done(self, event: int) -> bool:
        assert event in self.live
        self.is_asked = True
        return event in self.done

    def synchronize(self, event: int) -> None:
        assert event in self.live
        self.done.add(event)

    def release(self, event: int) -> None:
        del self.live[event]

    def finish(self, stream: int | None = None) -> None:
        """Lets the work of a stream, or of all, be over."""
        self.done |= {event for event, s in list(self.live.items()) if stream in (None, s)}


@pytest.fixture
def pages() -> FakePages:
    return FakePages()


@pytest.fixture
def events() -> FakeEvents:
    return FakeEvents()


@pytest.fixture
def allocator(pages: FakePages, events: FakeEvents) -> CachingHostAllocator:
    return CachingHostAllocator(pages, events=events)


def make(pages: FakePages, text: str, events: Any = None) -> CachingHostAllocator:
    return CachingHostAllocator(pages, config=parse_alloc_conf(text), events=events)


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


# Capture: each of PyTorch's tests of pinned memory under capture.


def begin(allocator: CachingHostAllocator, pool_id: Any = None) -> Any:
    pool_id = pool_id or new_pool_id()
    allocator.begin_allocate_to_pool(pool_id, lambda stream: stream == CAPTURED)
    return pool_id


def test_pin_memory_no_use(allocator: CachingHostAllocator) -> None:
    """A live pinned buffer is not reused in a capture."""
    begin(allocator)
    block = allocator.allocate(8, CAPTURED)
    assert allocator.allocate(8, CAPTURED) is not block


def test_pin_memory_no_use2(allocator: CachingHostAllocator) -> None:
    """Freed, and never used by a copy: may be reused in the same capture."""
    begin(allocator)
    block = allocator.allocate(8, CAPTURED)
    allocator.free(block)
    assert allocator.allocate(8, OTHER) is not block
    assert allocator.allocate(8, CAPTURED) is block


def test_pin_memory_use(allocator: CachingHostAllocator, events: FakeEvents) -> None:
    """Used by a captured copy: never recycled in that capture."""
    pool_id = begin(allocator)
    block = allocator.allocate(8, CAPTURED)
    allocator.record_event(block, CAPTURED)
    allocator.free(block)
    assert not events.live
    assert allocator.allocate(8, CAPTURED) is not block
    allocator.end_allocate_to_pool(pool_id)
    assert allocator.allocate(8, CAPTURED) is not block
    allocator.empty_cache()
    assert allocator.reserved_bytes == 8 * 3


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("is_freed", [False, True])
def test_two_graphs(allocator: CachingHostAllocator, is_used: bool, is_freed: bool) -> None:
    """The second graph of a pool reuses a buffer that is freed and that no copy has used."""
    pool_id = begin(allocator)
    block = allocator.allocate(8, CAPTURED)
    if is_used:
        allocator.record_event(block, CAPTURED)
    if is_freed:
        allocator.free(block)
    allocator.end_allocate_to_pool(pool_id)
    begin(allocator, pool_id)
    is_reused = allocator.allocate(8, CAPTURED) is block
    assert is_reused == (is_freed and not is_used)


def test_unpinned_memory_use(allocator: CachingHostAllocator) -> None:
    """A copy from ordinary memory in a capture is an error; from pinned memory it is none."""
    block = allocator.allocate(8)
    assert allocator.find_source(0x1234, CAPTURED) is None
    pool_id = begin(allocator)
    with pytest.raises(CaptureError) as raised:
        allocator.find_source(0x1234, CAPTURED)
    assert raised.value.anchor == "pinned"
    assert "stream 0x7" in raised.value.where
    assert "pin_memory" in raised.value.fix
    assert allocator.find_source(0x1234, OTHER) is None
    assert allocator.find_source(block.address, CAPTURED) is block
    assert allocator.find_source(block.address, OTHER) is None
    allocator.end_allocate_to_pool(pool_id)
    assert allocator.find_source(0x1234, CAPTURED) is None


def test_a_buffer_from_before_the_capture_is_kept_as_well(
    allocator: CachingHostAllocator,
) -> None:
    block = allocator.allocate(8)
    pool_id = begin(allocator)
    allocator.record_event(block, CAPTURED)
    allocator.end_allocate_to_pool(pool_id)
    allocator.free(block)
    assert allocator.allocate(8) is not block
    allocator.release_pool(pool_id)
    assert allocator.allocate(8) is block


def test_a_released_pool_gives_its_blocks_to_everybody(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    pool_id = begin(allocator)
    live, idle, used, pending = (allocator.allocate(8, CAPTURED) for _ in range(4))
    allocator.record_event(used, CAPTURED)
    allocator.record_event(pending, OTHER)
    for block in (idle, used, pending):
        allocator.free(block)
    allocator.end_allocate_to_pool(pool_id)
    new = allocator.allocate(8)
    assert new not in (live, idle, used, pending)
    allocator.release_pool(pool_id)
    assert {allocator.allocate(8), allocator.allocate(8)} == {idle, used}
    events.finish()
    assert allocator.allocate(8) is pending
    allocator.free(live)
    assert allocator.allocate(8) is live


def test_a_pool_lives_while_one_of_its_graphs_does(allocator: CachingHostAllocator) -> None:
    pool_id = begin(allocator)
    block = allocator.allocate(8, CAPTURED)
    allocator.free(block)
    allocator.end_allocate_to_pool(pool_id)
    begin(allocator, pool_id)
    allocator.end_allocate_to_pool(pool_id)
    allocator.release_pool(pool_id)
    assert allocator.allocate(8) is not block
    allocator.release_pool(pool_id)
    assert allocator.allocate(8) is block
    with pytest.raises(InternalError, match="there is no pool"):
        allocator.release_pool(pool_id)


def test_a_buffer_of_two_pools_waits_for_both(allocator: CachingHostAllocator) -> None:
    block = allocator.allocate(8)
    pools = []
    for _ in range(2):
        pools.append(begin(allocator))
        allocator.record_event(block, CAPTURED)
        allocator.end_allocate_to_pool(pools[-1])
    allocator.free(block)
    allocator.release_pool(pools[0])
    assert allocator.allocate(8) is not block
    allocator.release_pool(pools[1])
    assert allocator.allocate(8) is block


def test_a_second_capture_of_a_pool_at_once_is_refused(allocator: CachingHostAllocator) -> None:
    pool_id = begin(allocator)
    with pytest.raises(InternalError, match="is captured to already"):
        begin(allocator, pool_id)
    with pytest.raises(InternalError, match="there is no pool"):
        allocator.end_allocate_to_pool(new_pool_id())


def test_events_are_not_asked_during_a_capture(
    allocator: CachingHostAllocator, events: FakeEvents
) -> None:
    block = allocator.allocate(8)
    allocator.record_event(block, OTHER)
    allocator.free(block)
    events.finish()
    pool_id = begin(allocator)
    assert allocator.allocate(8, OTHER) is not block
    assert not events.is_asked
    allocator.end_allocate_to_pool(pool_id)
    assert allocator.allocate(8, OTHER) is block


# Options.


def test_memory_is_registered(pages: FakePages) -> None:
    allocator = make(pages, "pinned_use_cuda_host_register:True,pinned_num_register_threads:4")
    block = allocator.allocate(100_000)
    assert pages.calls == [("register", 1 << 17)]
    ctypes.memset(block.address, 1, block.nbytes)
    allocator.free(block)
    # What was registered is unregistered, whatever the settings are by then.
    allocator.configure(AllocatorConfig())
    allocator.empty_cache()
    assert pages.calls[1:] == [("unregister", 1 << 17)]
    allocator.allocate(8)
    assert pages.calls[2:] == [("allocate", 8)]


@pytest.mark.parametrize("thread_count", [1, 2, 8, 128])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 1 << 20])
def test_every_page_is_touched(
    monkeypatch: pytest.MonkeyPatch, thread_count: int, nbytes: int
) -> None:
    segment, ranges = reserve_pages(nbytes), []
    monkeypatch.setattr(ctypes, "memset", lambda *arguments: ranges.append(arguments))
    touch_pages(segment, thread_count)
    position = segment.address
    for address, value, length in sorted(ranges):
        assert (address, value) == (position, 0)
        position += length
    assert position == segment.address + nbytes
    assert len(ranges) <= thread_count


def test_pages_that_the_system_refuses() -> None:
    with pytest.raises(OutOfMemoryError, match="cannot reserve") as raised:
        reserve_pages(1 << 62)
    assert raised.value.anchor == "pinned"


def test_a_reserve_is_served_from_first(pages: FakePages) -> None:
    allocator = make(pages, "pinned_reserve_segment_size_mb:1")
    small = [allocator.allocate(1000) for _ in range(2)]
    large = allocator.allocate(1 << 20)
    assert pages.calls == [("allocate", 1 << 20)] * 2
    assert small[1].address - small[0].address == 1024
    assert small[0].address % ALIGNMENT == 0
    assert allocator.find_block(large.address) is large
    for block in (*small, large):
        allocator.free(block)
    allocator.empty_cache()
    assert pages.calls[2:] == [("free", 1 << 20)]
    assert allocator.allocate(1000) in small


def test_pieces_of_a_reserve_do_not_overlap(pages: FakePages) -> None:
    allocator = make(pages, "pinned_reserve_segment_size_mb:1")
    ends = 0
    for block in [allocator.allocate(size) for size in (1, 3, 600, 5000, 2)]:
        assert block.address >= ends
        ends = block.address + block.nbytes


@pytest.mark.parametrize(("nbytes", "size"), [(1 << 20, 1 << 20), (3 << 19, 3 << 19), (5, 8)])
def test_above_the_threshold_sizes_are_exact(pages: FakePages, nbytes: int, size: int) -> None:
    allocator = make(pages, "pinned_max_round_threshold_mb:1")
    assert allocator.allocate(nbytes).nbytes == size


def test_above_the_cached_size_memory_goes_back(pages: FakePages, events: FakeEvents) -> None:
    allocator = make(pages, "pinned_max_cached_size_mb:1", events)
    large, small = allocator.allocate(1 << 21), allocator.allocate(1 << 20)
    allocator.record_event(large, 1)
    for block in (large, small):
        allocator.free(block)
    assert len(pages.live) == 2
    events.finish()
    allocator.poll()
    assert [segment.nbytes for segment in pages.live] == [1 << 20]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < deadline, "nothing happened within 240 s"
        time.sleep(1e-3)


def test_a_thread_polls_the_events(pages: FakePages, events: FakeEvents) -> None:
    allocator = make(pages, "pinned_use_background_threads:True", events)
    block = allocator.allocate(8)
    allocator.record_event(block, 1)
    allocator.free(block)
    events.finish()
    wait_until(lambda: not allocator.statistics.active_requests.current)
    poller = allocator._poller
    assert poller is not None
    assert poller.is_running
    allocator.configure(AllocatorConfig())
    assert not poller.is_running


def test_without_the_option_there_is_no_thread(allocator: CachingHostAllocator) -> None:
    allocator.allocate(8)
    assert allocator._poller is None


def test_the_thread_ends_with_the_allocator(pages: FakePages) -> None:
    allocator = make(pages, "pinned_use_background_threads:True")
    allocator.allocate(8)
    poller = allocator._poller
    assert poller is not None
    del allocator
    gc.collect()
    wait_until(lambda: not poller.is_running)
    wait_until(lambda: not pages.live)


def test_the_thread_does_not_keep_its_object_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_poller, "PERIOD_S", 0)

    class Counter:
        count = 0

        def poll(self) -> None:
            self.count += 1

    counters = [Counter()]
    poller = event_poller.EventPoller(counters[0])
    wait_until(lambda: counters[0].count > 10)
    counters.clear()
    wait_until(lambda: not poller.is_running)


# Everything at once.


@dataclasses.dataclass
class Written:
    """A block with the pattern that it must still have."""

    block: HostBlock
    pattern: int

    def check(self) -> None:
        content = ctypes.string_at(self.block.address, self.block.nbytes)
        assert content == bytes([self.pattern]) * self.block.nbytes


@pytest.mark.parametrize("text", ["", "pinned_use_background_threads:True"])
def test_threads_never_share_a_block(text: str) -> None:
    events = FakeEvents()
    allocator = CachingHostAllocator(PlainPages(), config=parse_alloc_conf(text), events=events)

    def work(pattern: int) -> None:
        for turn in range(150):
            written = [Written(allocator.allocate(100 << k), pattern) for k in range(4)]
            for each in written:
                ctypes.memset(each.block.address, pattern, each.block.nbytes)
            allocator.record_event(written[turn % 4].block, pattern)
            for each in written:
                each.check()
                (allocator.free if turn % 2 else allocator.free_later)(each.block)
            if turn % 8 == 0:
                events.finish(pattern)

    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(1, 5)))
    events.finish()
    allocator.configure(AllocatorConfig())
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.statistics.active_bytes.current == 0
    assert not events.live
