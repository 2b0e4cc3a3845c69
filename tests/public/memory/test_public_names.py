"""Every function of tg.memory on the host device: values, peaks, devices, fraction, summary."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.memory import (
    caching_allocator_alloc,
    caching_allocator_delete,
    memory_allocated,
    memory_reserved,
    memory_stats,
)
from tracegraph.runtime.memory.caching.block import Block

KIB, MIB = 1 << 10, 1 << 20
X = jnp.arange(1000.0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leaves nothing cached, so that the first small block needs a segment of its own."""
    gc.collect()
    tg.memory.empty_cache()
    tg.memory.reset_peak_memory_stats()
    yield
    gc.collect()
    tg.memory.empty_cache()


def find_arena(captured: tg.GraphedFunction) -> Block:
    """Returns what holds the kept part of the latest graph's arena."""
    assert captured._latest is not None
    return captured._latest.replay.arena.block


def test_every_name_is_there_and_documented() -> None:
    assert sorted(tg.memory.__all__) == tg.memory.__all__
    for name in tg.memory.__all__:
        assert getattr(tg.memory, name).__doc__, name


def test_one_byte_is_allocated_and_given_back() -> None:
    before, reserved = memory_allocated(), memory_reserved()
    address = caching_allocator_alloc(1)
    assert memory_allocated() == before + 512
    assert memory_reserved() == reserved + 2 * MIB
    caching_allocator_delete(address)
    assert (memory_allocated(), memory_reserved()) == (before, reserved + 2 * MIB)
    tg.memory.empty_cache()
    assert memory_reserved() == reserved


@pytest.mark.parametrize("size", [0, 1, np.int32(700), 5 * MIB, True])
def test_memory_can_be_written_and_comes_again(size: Any) -> None:
    address = caching_allocator_alloc(size)
    assert address % 256 == 0
    (block,) = (
        block
        for segment in tg.memory.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == address
    )
    assert (block["state"], block["requested_size"]) == ("active_allocated", int(size))
    caching_allocator_delete(address)
    again = caching_allocator_alloc(size)
    assert again == address
    caching_allocator_delete(np.int64(again))


def test_the_streams_of_the_user_have_their_own_blocks() -> None:
    side = tg.Stream()
    main = caching_allocator_alloc(MIB)
    with tg.stream(side):
        current = caching_allocator_alloc(MIB)
    named = caching_allocator_alloc(MIB, stream=side)
    streams = {
        block["address"]: segment["stream"]
        for segment in tg.memory.memory_snapshot()
        for block in segment["blocks"]
    }
    assert [streams[each] for each in (main, current, named)] == [0, side.number, side.number]
    for address in (main, current, named):
        caching_allocator_delete(address)
    assert caching_allocator_alloc(MIB, stream=side) in (current, named)
    caching_allocator_delete(current if memory_allocated() else named)


def test_deleting_is_for_what_was_allocated_by_hand() -> None:
    captured = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = captured(X * 1)
    arena = find_arena(captured).address
    address = caching_allocator_alloc(8)
    caching_allocator_delete(address)
    for wrong in (arena, address, address + 512, 0):
        with pytest.raises(tg.TracegraphError, match="nothing that caching_allocator_alloc"):
            caching_allocator_delete(wrong)
    np.testing.assert_array_equal(captured(state), X + 2)


def test_statistics_have_the_keys_of_torch() -> None:
    # Others may keep graphs.
    before = memory_stats()
    captured = tg.capture(lambda x: x * 2)
    captured(X)
    stats = memory_stats()
    assert list(stats) == sorted(stats)
    for name, grown in (
        ("allocation.all.current", 1),
        ("allocated_bytes.large_pool.current", captured.pool_bytes),
    ):
        assert stats[name] - before[name] == grown
    number, second = captured.pool()
    key = f"reserved_bytes_by_private_pools.{number}_{second}.all.current"
    assert stats[key] == captured.pool_bytes
    del captured
    gc.collect()
    assert key not in memory_stats()


def test_nested_statistics_are_the_same_figures() -> None:
    address = caching_allocator_alloc(1000)
    nested, flat = tg.memory.memory_stats_as_nested_dict(), memory_stats()
    caching_allocator_delete(address)
    assert nested["allocated_bytes"]["small_pool"]["current"] == 1024
    assert nested["num_ooms"] == flat["num_ooms"]

    def flatten(prefix: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= flatten(f"{prefix}.{key}" if prefix else key, inner)
        return found

    assert flatten("", nested) == flat


def test_peaks_and_their_reset() -> None:
    base = memory_allocated()
    address = caching_allocator_alloc(3 * MIB)
    caching_allocator_delete(address)
    assert tg.memory.max_memory_allocated() == base + 3 * MIB
    assert tg.memory.max_memory_reserved() == memory_reserved()
    tg.memory.empty_cache()
    assert tg.memory.max_memory_reserved() == memory_reserved() + 20 * MIB
    tg.memory.reset_peak_memory_stats()
    assert tg.memory.max_memory_allocated() == base
    assert tg.memory.max_memory_reserved() == memory_reserved()


def test_accumulated_figures_and_their_reset() -> None:
    tg.memory.reset_accumulated_memory_stats()
    caching_allocator_delete(caching_allocator_alloc(1000))
    stats = memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 1024
    assert stats["num_device_alloc"] == 1
    tg.memory.reset_accumulated_memory_stats()
    stats = memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["num_device_alloc"] == 0
    assert stats["allocated_bytes.all.current"] == memory_allocated()


def test_the_summary_is_a_table_of_the_same_figures() -> None:
    address = caching_allocator_alloc(5 * MIB)
    text, short = tg.memory.memory_summary(), tg.memory.memory_summary(abbreviated=True)
    caching_allocator_delete(address)
    assert len(short) < len(text)
    for table in (text, short):
        assert "Allocated memory" in table
        assert re.search(r"Allocated memory +\| +5120 KiB", table), table
    assert "from large pool" in text
    assert "from large pool" not in short


def test_devices_are_named_in_three_ways() -> None:
    address = caching_allocator_alloc(1000, device=0)
    allocated = {memory_allocated(each) for each in (None, 0, jax.devices("cpu")[0])}
    caching_allocator_delete(address)
    assert allocated == {memory_allocated() + 1024}


DEVICE_CALLS: dict[str, Callable[[Any], Any]] = {
    "caching_allocator_alloc": lambda d: caching_allocator_alloc(1, d),
    "get_per_process_memory_fraction": tg.memory.get_per_process_memory_fraction,
    "max_memory_allocated": tg.memory.max_memory_allocated,
    "max_memory_reserved": tg.memory.max_memory_reserved,
    "mem_get_info": tg.memory.mem_get_info,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_reserved,
    "memory_stats": memory_stats,
    "memory_stats_as_nested_dict": tg.memory.memory_stats_as_nested_dict,
    "memory_summary": tg.memory.memory_summary,
    "record_memory_history": lambda d: tg.memory.record_memory_history(None, device=d),
    "reset_accumulated_memory_stats": tg.memory.reset_accumulated_memory_stats,
    "reset_peak_memory_stats": tg.memory.reset_peak_memory_stats,
    "set_per_process_memory_fraction": lambda d: tg.memory.set_per_process_memory_fraction(1.0, d),
    "MemPool": lambda d: tg.memory.MemPool(device=d),
}


@pytest.mark.parametrize("name", DEVICE_CALLS)
@pytest.mark.parametrize("wrong", [-1, 10**6, "cpu", 0.0, True, [0]], ids=repr)
def test_wrong_devices_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(tg.ConfigError) as raised:
        DEVICE_CALLS[name](wrong)
    assert raised.value.what == f"`device` is {wrong!r}"
    assert raised.value.where == "argument `device`"
    known = raised.value.why.removeprefix("this process has the devices ").split(", ")
    assert known == sorted(set(known))


def test_the_fraction_limits_what_is_reserved() -> None:
    assert tg.memory.get_per_process_memory_fraction() == 1.0
    total = tg.memory.mem_get_info()[1]
    # 30 MiB more than now.
    limit = (memory_reserved() + 30 * MIB + 4096) / total
    try:
        tg.memory.set_per_process_memory_fraction(limit)
        assert tg.memory.get_per_process_memory_fraction() == limit
        caching_allocator_delete(caching_allocator_alloc(20 * MIB))
        with pytest.raises(tg.OutOfMemoryError, match=r"tried to allocate 32\.00 MiB") as raised:
            caching_allocator_alloc(32 * MIB)
        assert "share of the device that this process may reserve" in raised.value.why
        tg.memory.empty_cache()
        captured = tg.capture(lambda x: x[None] * jnp.arange(10.0)[:, None])
        with pytest.raises(tg.OutOfMemoryError, match="out of memory"):
            captured(jnp.ones(MIB))
    finally:
        tg.memory.set_per_process_memory_fraction(1.0)
    caching_allocator_delete(caching_allocator_alloc(32 * MIB))
    assert captured(jnp.ones(MIB)).shape == (10, MIB)
    assert memory_stats()["num_ooms"] >= 2


def test_what_the_device_has() -> None:
    free, total = tg.memory.mem_get_info()
    assert 0 < free <= total
    assert tg.memory.mem_get_info(0)[1] == total


def test_emptying_the_cache_leaves_what_is_in_use() -> None:
    base = memory_reserved()
    kept, dropped = caching_allocator_alloc(MIB), caching_allocator_alloc(12 * MIB)
    caching_allocator_delete(dropped)
    assert memory_reserved() == base + 14 * MIB
    tg.memory.empty_cache()
    assert memory_reserved() == base + 2 * MIB
    caching_allocator_delete(kept)


def test_the_backend_has_a_name() -> None:
    assert tg.memory.get_allocator_backend() == "native"


def test_page_locked_memory_has_statistics_of_its_own() -> None:
    tg.memory.empty_host_cache()
    before = tg.memory.host_memory_stats()
    batch = tg.memory.pin_memory({"x": np.zeros(10 * KIB, np.float32)})
    stats = tg.memory.host_memory_stats()
    grown = stats["allocated_bytes.current"] - before["allocated_bytes.current"]
    assert grown == 64 * KIB
    assert tg.memory.is_pinned(batch["x"])
    del batch
    tg.memory.reset_peak_host_memory_stats()
    tg.memory.reset_accumulated_host_memory_stats()
    stats = tg.memory.host_memory_stats()
    assert stats["num_host_alloc"] == 0
    assert stats["active_bytes.peak"] == stats["active_bytes.current"]
    assert memory_allocated() == 0


@pytest.mark.parametrize("name", [None, "pool"])
def test_a_snapshot_of_one_pool_or_of_all(name: str | None) -> None:
    captured = tg.capture(lambda x: x * 2)
    captured(X)
    address = caching_allocator_alloc(100)
    pool_id = captured.pool() if name else None
    segments = tg.memory.memory_snapshot(pool_id)
    caching_allocator_delete(address)
    arena = find_arena(captured)
    (mine,) = (each for each in segments if each["address"] == arena.address)
    assert (mine["total_size"], mine["segment_pool_id"]) == (captured.pool_bytes, captured.pool())
    assert len(segments) == (1 if name else 2)
    assert tg.memory.memory_snapshot(tg.graph_pool_handle()) == []
