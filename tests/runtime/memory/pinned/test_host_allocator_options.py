"""The options of the caching host allocator: registered pages, reserves, rounding, threads."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import gc
import time
from collections.abc import Callable

import pytest

from tests.fakes.pinned_pages import FakeEvents, FakePages, make
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pinned import event_poller
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pinned.host_block import HostBlock
from tracegraph.runtime.memory.pinned.host_pages import (
    ALIGNMENT,
    PlainPages,
    reserve_pages,
    touch_pages,
)


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


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 4096), (5, 4096), (4096, 4096), (5000, 8192), ((1 << 20) + 1, 1052672)]
)
def test_what_is_to_be_exact_takes_whole_pages(pages: FakePages, nbytes: int, size: int) -> None:
    allocator = make(pages, "")
    block = allocator.allocate(nbytes, is_exact=True)
    assert block.nbytes == size
    allocator.free(block)
    assert allocator.allocate(nbytes, is_exact=True) is block


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
