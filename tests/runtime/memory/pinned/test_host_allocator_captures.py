"""Pinned memory under capture: each of PyTorch's tests of it, and the pools of its graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.pinned_pages import CAPTURED, OTHER, FakeEvents
from tracegraph.runtime.errors import CaptureError, InternalError
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pool_id import new_pool_id


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
