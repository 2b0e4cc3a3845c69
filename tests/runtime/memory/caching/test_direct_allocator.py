"""DirectAllocator: an allocator without a cache."""

from __future__ import annotations

import collections
import pathlib

import pytest

from tests.fakes.memory_driver import MemoryDriver
from tests.fakes.pluggable_library import MEMORY, PluggableLibrary
from tracegraph.runtime.cuda.memory.driver_providers import CudaAsyncProvider
from tracegraph.runtime.errors import (
    ConfigError,
    OutOfMemoryError,
    TracegraphError,
)
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, new_pool_id
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.statistics import Statistics

MIB = 1 << 20


class ManualEvents:
    """Events that are over when the test says so."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.recorded: list[int] = []
        self.released: list[int] = []

    def record(self, stream: int) -> int:
        self.recorded.append(stream)
        return len(self.recorded) - 1

    def is_done(self, event: int) -> bool:
        return event in self.done

    def synchronize(self, event: int) -> None:
        self.done.add(event)

    def release(self, event: int) -> None:
        self.released.append(event)


@pytest.fixture
def provider() -> HostProvider:
    return HostProvider(limit_bytes=64 * MIB)


def test_each_block_is_a_segment_of_the_size_that_was_asked_for(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    blocks = [allocator.allocate(nbytes) for nbytes in (0, 1, 1000, 3 * MIB)]
    assert [block.nbytes for block in blocks] == [1, 1, 1000, 3 * MIB]
    assert [block.segment.nbytes for block in blocks] == [1, 1, 1000, 3 * MIB]
    assert provider.reserved_bytes == 3 * MIB + 1002
    assert allocator.find_block(blocks[2].address) is blocks[2]
    assert [each["total_size"] for each in allocator.snapshot()] == [
        block.nbytes for block in sorted(blocks, key=lambda block: block.address)
    ]
    for block in blocks:
        allocator.free(block)
    assert (provider.reserved_bytes, allocator.snapshot()) == (0, [])


def test_no_statistics_are_kept_unless_asked_for(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    block = allocator.allocate(1000)
    assert allocator.statistics.to_dict() == Statistics().to_dict()
    allocator.free(block)
    counting = DirectAllocator(provider, counts=True)
    block = counting.allocate(1000)
    figures = counting.statistics.to_dict()
    assert figures["allocated_bytes.all.current"] == figures["reserved_bytes.all.current"] == 1000
    counting.free(block)
    figures = counting.statistics.to_dict()
    assert figures["allocated_bytes.all.current"] == figures["reserved_bytes.all.current"] == 0
    assert figures["num_device_alloc"] == figures["num_device_free"] == 1


def test_blocks_are_freed_once(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    block = allocator.allocate(100)
    allocator.free(block)
    for refused in (block, DirectAllocator(provider).allocate(8)):
        with pytest.raises(TracegraphError, match="free"):
            allocator.free(refused)
    with pytest.raises(TracegraphError):
        allocator.record_stream(block, 1)
    with pytest.raises(TracegraphError):
        allocator.allocate(-1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1 << 61)


def test_finalisers_return_blocks_while_no_call_is_inside(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    with allocator.lock:
        allocator.free_later(allocator.allocate(1000))
        assert provider.reserved_bytes == 1000
    allocator.free(allocator.allocate(8))
    assert provider.reserved_bytes == 0
    allocator.free_later(allocator.allocate(1000))
    assert provider.reserved_bytes == 0


def test_a_block_that_another_stream_uses_waits_for_it(provider: HostProvider) -> None:
    events = ManualEvents()
    allocator = DirectAllocator(provider, events=events)
    block = allocator.allocate(1000)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert (events.recorded, provider.reserved_bytes) == ([7], 1000)
    kept = allocator.allocate(8)
    assert provider.reserved_bytes == 1008
    events.done.add(0)
    allocator.empty_cache()
    assert (provider.reserved_bytes, events.released) == (8, [0])
    allocator.free(kept)


def test_full_memory_waits_for_other_streams_first(provider: HostProvider) -> None:
    events = ManualEvents()
    allocator = DirectAllocator(provider, events=events)
    block = allocator.allocate(40 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    large = allocator.allocate(40 * MIB)
    assert provider.reserved_bytes == 40 * MIB
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        allocator.allocate(40 * MIB)
    allocator.free(large)


def test_arenas_of_a_private_pool(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    arena = allocator.allocate_exact(MIB + 1, pool_id)
    assert arena.nbytes == MIB + 1
    assert allocator.pool_bytes(pool_id) == (MIB + 1, MIB + 1)
    assert allocator.pools.use_count(pool_id) == 1
    allocator.pools.release(pool_id)
    allocator.free(arena)
    assert provider.reserved_bytes == 0
    # A pool without users is deleted with its last segment.
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pool_bytes(pool_id)


def test_requests_go_to_the_pool_of_a_context(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, lambda stream: stream == 1)
    inside, outside = allocator.allocate(100, stream=1), allocator.allocate(100)
    allocator.pools.end(pool_id)
    assert (inside.size_class.pool_id, outside.size_class.pool_id) == (pool_id, DEFAULT_POOL_ID)
    assert [tuple(each["segment_pool_id"]) for each in allocator.snapshot(pool_id)] == [pool_id]
    allocator.pools.release(pool_id)
    allocator.free(inside)
    other = new_pool_id()
    allocator.pools.create_or_increment(other)
    allocator.pools.release(other)
    allocator.empty_cache()
    with pytest.raises(TracegraphError, match="there is no pool"):
        allocator.pools.use_count(other)


def test_the_memory_fraction_holds(provider: HostProvider) -> None:
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    allocator = DirectAllocator(provider, config=config)
    assert allocator.memory_fraction == 0.5
    block = allocator.allocate(31 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(2 * MIB)
    allocator.free(block)
    allocator.set_memory_fraction(1.0)
    allocator.free(allocator.allocate(40 * MIB))
    with pytest.raises(ConfigError):
        allocator.set_memory_fraction(1.5)


def test_history_tells_of_segments_too(provider: HostProvider) -> None:
    allocator = DirectAllocator(provider)
    allocator.history.record()
    allocator.free(allocator.allocate(100))
    actions = [entry["action"] for entry in allocator.history.read_entries()]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed"] + [
        "segment_free"
    ]


def test_over_the_pool_of_the_driver() -> None:
    driver = MemoryDriver()
    context = driver.retain_primary_context(0)
    provider = CudaAsyncProvider(driver, context, 0, {0: 0x5555, 1: 0x6666}.__getitem__)
    allocator = DirectAllocator(provider, counts=True, trim=provider.trim)
    blocks = [allocator.allocate(100, stream=stream) for stream in (0, 1)]
    for block in blocks:
        allocator.free(block)
    counts = collections.Counter(call.name for call in driver.calls)
    assert (counts["allocate_async"], counts["free_async"], counts["trim_memory_pool"]) == (2, 2, 0)
    allocator.empty_cache()
    assert driver.count_calls("trim_memory_pool") == 1
    assert repr(allocator) == "DirectAllocator(device=0, provider=cuda_async)"


def test_over_a_library_of_the_user(tmp_path: pathlib.Path) -> None:
    library = PluggableLibrary(tmp_path)
    library.limit(4096)
    provider = library.open().make_provider(0, lambda stream: stream, lambda: MEMORY)
    allocator = DirectAllocator(provider, counts=True)
    block = allocator.allocate(3000, stream=9)
    assert (library.read("live_bytes"), library.read_last()) == (3000, (0, 9))
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        allocator.allocate(3000)
    allocator.free(block)
    assert (library.read("live_count"), library.read("wrong_frees")) == (0, 0)
