"""Expandable segments when memory, addresses or the driver fail, and on other providers."""

from __future__ import annotations

import pytest

from tests.fakes.memory_driver import MemoryDriver
from tests.fakes.virtual_bytes_provider import VirtualBytesProvider
from tests.runtime.memory.caching.test_expandable import EXPANDABLE, MIB, PAGE, make, read
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.caching.expandable import ExpandableSegment
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider


def test_full_memory_takes_pages_from_other_ranges() -> None:
    allocator, provider = make(4 * PAGE)
    blocks = [allocator.allocate(PAGE, stream) for stream in (1, 2, 3)]
    kept = allocator.allocate(512)
    with pytest.raises(OutOfMemoryError, match="out of memory: tried to allocate"):
        allocator.allocate(2 * PAGE)
    for block in blocks:
        allocator.free(block)
    block = allocator.allocate(3 * PAGE)
    assert sum(provider.mapped.values()) == 3 * PAGE + 2 * MIB
    assert len(provider.ranges) == 2
    assert read(allocator, "num_alloc_retries") == [2]
    allocator.free(block)
    allocator.free(kept)


def test_pages_mapped_for_a_request_that_fails_are_not_lost() -> None:
    allocator, provider = make()
    # The third page fails, and again when all cached memory was released.
    provider.failing_calls = {3, 6}
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(4 * PAGE)
    assert (provider.mapped, provider.ranges) == ({}, {})
    assert read(allocator, "reserved_bytes", "num_device_alloc") == [0, 0]
    assert allocator.allocate(4 * PAGE).offset == 0


def test_no_addresses_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, provider = make()

    def refuse(nbytes: int) -> int:
        raise OutOfMemoryError(str(nbytes), where="", why="", fix="", anchor="out-of-memory")

    with monkeypatch.context() as patch:
        patch.setattr(provider, "reserve", refuse)
        with pytest.raises(OutOfMemoryError, match="out of memory: tried to allocate"):
            allocator.allocate(512)
    assert allocator.allocate(512).offset == 0


def test_other_failures_of_a_map_leave_the_segment_usable() -> None:
    class Failing(VirtualBytesProvider):
        fails_at = 2

        def map(self, address: int, nbytes: int) -> None:
            if len(self.mapped) + 1 == self.fails_at:
                raise RuntimeError("planted")
            super().map(address, nbytes)

    provider = Failing(1 << 30)
    segment = ExpandableSegment(provider, 8 * PAGE, PAGE)
    with pytest.raises(RuntimeError, match="planted"):
        segment.map(segment.segment.address, 3 * PAGE)
    assert provider.mapped == {}
    provider.fails_at = 0
    assert segment.map(segment.segment.address, 3 * PAGE) == 3 * PAGE
    segment.close()
    segment.close()
    assert (provider.mapped, provider.ranges) == ({}, {})


def test_a_provider_whose_segments_cannot_grow_is_refused() -> None:
    with pytest.raises(ConfigError, match="`expandable_segments:True` is not possible here"):
        CachingAllocator(HostProvider(), config=EXPANDABLE)
    allocator = CachingAllocator(HostProvider())
    with pytest.raises(ConfigError, match="host provider"):
        allocator.configure(EXPANDABLE)
    assert not allocator.config.expandable_segments
    # Without a cache there is nothing to expand.
    direct = DirectAllocator(HostProvider(), config=EXPANDABLE)
    assert direct.allocate(100).nbytes == 100


def test_on_memory_of_the_host() -> None:
    # The whole machine: a range is larger than all of its memory.
    provider = HostVirtualProvider()
    allocator = CachingAllocator(provider, config=EXPANDABLE)
    blocks = [allocator.allocate(nbytes) for nbytes in (512, 5 * MIB, 25 * MIB)]
    assert provider.reserved_bytes == 42 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_over_the_driver_every_failing_call_leaves_a_working_allocator() -> None:
    def run(allocator: CachingAllocator) -> None:
        blocks = [allocator.allocate(nbytes) for nbytes in (512, 5 * MIB, 45 * MIB)]
        for block in blocks:
            allocator.free(block)
        allocator.empty_cache()

    driver = MemoryDriver(memory_bytes=1 << 30)
    provider = CudaVirtualProvider(driver, driver.retain_primary_context(0), 0)
    allocator = CachingAllocator(provider, config=EXPANDABLE)
    run(allocator)
    clean = driver.live_handles()
    assert sorted(clean.values()) == ["context"]
    start = len(driver.calls)
    run(allocator)
    names = [call.name for call in driver.calls[start:]]
    assert names.count("map_memory") == names.count("allow_access") == 4
    for name in sorted({"map_memory", "create_memory", "allow_access", "reserve_addresses"}):
        driver.fail_on, driver.error = name, "CUDA_ERROR_OUT_OF_MEMORY"
        # The second try succeeds: only one call fails.
        run(allocator)
        assert driver.fail_on is None
    run(allocator)
    assert driver.live_handles() == clean
