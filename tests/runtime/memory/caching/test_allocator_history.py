"""What the caching allocator reports: segments, blocks and the trace of what happened."""

from __future__ import annotations

import pytest

from tests.fakes.scripted_provider import FIRST_ADDRESS, ScriptedEvents, ScriptedProvider
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.sizes import GIB, MIB


def test_segments_and_blocks_are_described_with_the_keys_of_torch() -> None:
    allocator = CachingAllocator(ScriptedProvider(), device=2)
    first, second = allocator.allocate(1000), allocator.allocate(600)
    allocator.free(first)
    (segment,) = allocator.snapshot()
    assert {key: value for key, value in segment.items() if key != "blocks"} == {
        "device": 2,
        "address": FIRST_ADDRESS,
        "total_size": 2 * MIB,
        "allocated_size": 1024,
        "active_size": 1024,
        "requested_size": 600,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
    }
    assert [
        (block["address"], block["size"], block["requested_size"], block["state"])
        for block in segment["blocks"]
    ] == [
        (FIRST_ADDRESS, 1024, 1000, "inactive"),
        (FIRST_ADDRESS + 1024, 1024, 600, "active_allocated"),
        (FIRST_ADDRESS + 2048, 2 * MIB - 2048, 0, "inactive"),
    ]
    assert second.address == FIRST_ADDRESS + 1024


def test_a_block_that_a_stream_reads_is_pending() -> None:
    allocator = CachingAllocator(ScriptedProvider(), events=ScriptedEvents(busy={1}))
    block = allocator.allocate(512)
    allocator.record_stream(block, 1)
    allocator.free(block)
    (segment,) = allocator.snapshot()
    assert segment["blocks"][0]["state"] == "active_pending_free"
    assert (segment["allocated_size"], segment["active_size"]) == (0, 512)


def test_segments_come_in_the_order_of_their_addresses_and_by_pool() -> None:
    addresses = [9 << 30, 1 << 30, 5 << 30]
    allocator = CachingAllocator(ScriptedProvider(addresses=addresses))
    allocator.allocate(512)
    allocator.allocate(3 * MIB)
    pool_id = new_pool_id()
    allocator.pools.create_or_increment(pool_id)
    allocator.allocate_exact(4096, pool_id)
    assert [segment["address"] for segment in allocator.snapshot()] == sorted(addresses)
    (segment,) = allocator.snapshot(pool_id)
    assert segment["segment_pool_id"] == tuple(pool_id)
    assert segment["total_size"] == 4096


def test_the_trace_tells_all_steps_in_order() -> None:
    allocator = CachingAllocator(ScriptedProvider(GIB))
    allocator.history.record(context=None)
    block = allocator.allocate(1000)
    allocator.free(block)
    allocator.empty_cache()
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(2 * GIB)
    entries = allocator.history.read_entries()
    assert [(entry["action"], entry["size"]) for entry in entries] == [
        ("segment_alloc", 2 * MIB),
        ("alloc", 1000),
        ("free_requested", 1000),
        ("free_completed", 1000),
        ("segment_free", 2 * MIB),
        ("oom", 2 * GIB),
    ]
    assert {entry["addr"] for entry in entries[:-1]} == {FIRST_ADDRESS}
    assert entries[-1]["device_free"] == GIB


def test_a_snapshot_leaves_an_entry() -> None:
    allocator = CachingAllocator(ScriptedProvider())
    allocator.history.record(context=None)
    allocator.allocate(1000)
    allocator.snapshot()
    entry = allocator.history.read_entries()[-1]
    assert (entry["action"], entry["addr"], entry["size"]) == ("snapshot", 0, 1024)


def test_blocks_and_segments_keep_the_stack_that_asked_for_them() -> None:
    allocator = CachingAllocator(ScriptedProvider())
    allocator.history.record(context="state")
    block = allocator.allocate(1000)
    name = test_blocks_and_segments_keep_the_stack_that_asked_for_them.__name__
    (segment,) = allocator.snapshot()
    assert segment["frames"][0]["name"] == name
    assert segment["blocks"][0]["frames"][0]["name"] == name
    assert segment["blocks"][1]["frames"] == []
    allocator.free(block)
    (segment,) = allocator.snapshot()
    assert segment["blocks"][0]["frames"] == []
    assert segment["frames"][0]["name"] == name


def test_without_a_stack_of_its_own_a_free_shows_that_of_the_allocation() -> None:
    allocator = CachingAllocator(ScriptedProvider())
    allocator.history.record(context="alloc")
    block = allocator.allocate(1000)
    frames = allocator.history.read_entries()[-1]["frames"]
    allocator.free(block)
    assert allocator.history.read_entries()[-1]["frames"] == frames != []
