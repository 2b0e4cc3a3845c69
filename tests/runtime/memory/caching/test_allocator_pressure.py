"""The caching allocator when memory is short: order of reclaim, limits, collection, errors."""

from __future__ import annotations

import pytest

from tests.fakes.scripted_provider import GIB, ScriptedEvents, ScriptedProvider
from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.sizes import MIB

COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_oom_rejections")


def _make(
    capacity_bytes: int, conf: str = "", events: ScriptedEvents | None = None
) -> tuple[CachingAllocator, ScriptedProvider]:
    provider = ScriptedProvider(capacity_bytes)
    config = parse_alloc_conf(conf)
    return CachingAllocator(provider, config=config, events=events), provider


def _count(allocator: CachingAllocator) -> tuple[int, ...]:
    figures = allocator.statistics.to_dict()
    return tuple(figures[name] for name in COUNTERS)


def test_out_of_memory_says_how_much_was_wanted_and_what_there_is() -> None:
    allocator, _ = _make(8 * GIB)
    kept = allocator.allocate(2 * GIB)
    part = allocator.allocate(2 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(800_000_000 * GIB)
    error = caught.value
    assert error.what == "out of memory: tried to allocate 800000000.00 GiB"
    assert error.where == (
        "device 0 (scripted) has 8.00 GiB, of which 5.98 GiB is free; 2.00 GiB allocated; "
        "18.00 MiB reserved but unallocated"
    )
    assert error.anchor == "out-of-memory"
    assert _count(allocator) == (1, 1, 1, 0)
    allocator.free(part)
    allocator.free(kept)
    assert allocator.allocate(3 * GIB).nbytes == 3 * GIB


def test_out_of_memory_then_retry() -> None:
    allocator, provider = _make(1 * GIB)
    half = allocator.allocate(GIB // 2 + 2 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(GIB // 2)
    allocator.free(half)
    assert allocator.allocate(GIB // 2).nbytes >= GIB // 2
    assert provider.allocation_count == 1


def test_cached_memory_goes_back_before_memory_runs_out() -> None:
    allocator, provider = _make(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB, stream=1)
    assert [action for action, _, _ in provider.log] == ["allocate", "free", "allocate"]
    assert _count(allocator) == (1, 0, 1, 0)


def test_deferred_blocks_are_reclaimed_under_pressure() -> None:
    events = ScriptedEvents(busy={1})
    allocator, provider = _make(1 * GIB, events=events)
    for _ in range(100):
        block = allocator.allocate(160 * MIB)
        allocator.record_stream(block, 1)
        allocator.free(block)
    assert _count(allocator)[1] == 0
    assert events.synchronize_count > 0
    assert provider.reserved_bytes <= GIB


def test_during_a_capture_nothing_is_synchronised_or_given_back() -> None:
    events = ScriptedEvents(busy={1})
    allocator, provider = _make(100 * MIB, events=events)
    allocator.free(allocator.allocate(60 * MIB))
    pool_id = new_pool_id()
    allocator.pools.begin(pool_id, lambda stream: stream == 3)
    allocator.pools.begin_capture(pool_id)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(80 * MIB, stream=3)
    allocator.empty_cache()
    assert provider.free_count == 0
    assert _count(allocator) == (0, 1, 0, 0)
    allocator.pools.end_capture(pool_id)
    allocator.pools.end(pool_id)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


@pytest.mark.parametrize(("share", "fits"), [(0.499, True), (0.5, False)])
def test_at_half_the_device_just_less_than_half_fits(share: float, fits: bool) -> None:
    allocator, provider = _make(64 * GIB)
    allocator.set_memory_fraction(0.5)
    assert allocator.memory_fraction == 0.5
    allocator.allocate(512)
    wanted_bytes = int(share * 64 * GIB)
    if fits:
        allocator.allocate(wanted_bytes)
    else:
        with pytest.raises(OutOfMemoryError, match="tried to allocate 32") as caught:
            allocator.allocate(wanted_bytes)
        assert "32.00 GiB allowed (50.00%)" in caught.value.where
        assert "the share of the device" in caught.value.why
        # The provider is not even asked.
        assert provider.allocation_count == 1
    allocator.allocate(512)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "1", None])
def test_a_fraction_is_a_number_from_0_to_1(fraction: object) -> None:
    allocator, _ = _make(GIB)
    with pytest.raises(ConfigError, match="the memory fraction is") as caught:
        allocator.set_memory_fraction(fraction)  # pyright: ignore[reportArgumentType]
    assert caught.value.anchor == "memory-fraction"
    assert allocator.memory_fraction == 1.0


def test_the_fraction_comes_from_the_settings_too() -> None:
    allocator, _ = _make(GIB, "per_process_memory_fraction:0.25")
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(300 * MIB)
    allocator.configure(parse_alloc_conf(""))
    allocator.allocate(300 * MIB)
    allocator.set_memory_fraction(0.5)
    allocator.configure(parse_alloc_conf("max_split_size_mb:64"))
    assert allocator.memory_fraction == 0.5


def test_a_request_beyond_the_share_is_rejected_at_once_if_asked_for() -> None:
    conf = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    allocator, provider = _make(GIB, conf)
    allocator.free(allocator.allocate(300 * MIB))
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(400 * MIB)
    assert _count(allocator) == (0, 1, 0, 1)
    assert provider.free_count == 0


def test_oversize_segments_go_first_and_only_as_many_as_needed() -> None:
    allocator, provider = _make(300 * MIB, "max_split_size_mb:32")
    sizes = (40, 50, 60, 70)
    blocks = [allocator.allocate(size * MIB) for size in sizes]
    small = allocator.allocate(20 * MIB)
    for block in (*blocks, small):
        allocator.free(block)
    allocator.allocate(100 * MIB)
    freed = [nbytes // MIB for action, _, nbytes in provider.log if action == "free"]
    assert freed == [70, 60]
    assert _count(allocator) == (0, 0, 0, 0)


def test_one_oversize_segment_that_is_large_enough_is_enough() -> None:
    allocator, provider = _make(300 * MIB, "max_split_size_mb:32,max_non_split_rounding_mb:20")
    blocks = [allocator.allocate(size * MIB) for size in (80, 90, 120)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    freed = [nbytes // MIB for action, _, nbytes in provider.log if action == "free"]
    assert freed == [80]


def test_garbage_collection_takes_the_older_half() -> None:
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.99"
    allocator, provider = _make(1000 * MIB, conf)
    old, young = allocator.allocate(200 * MIB), allocator.allocate(180 * MIB)
    allocator.free(old)
    for _ in range(4):
        allocator.free(allocator.allocate(100 * MIB, stream=1))
    allocator.free(young)
    assert provider.free_count == 0
    allocator.allocate(150 * MIB, stream=2)
    allocator.allocate(150 * MIB, stream=2)
    freed = [nbytes // MIB for action, _, nbytes in provider.log if action == "free"]
    assert freed == [200]
    assert _count(allocator) == (0, 0, 0, 0)


def test_garbage_collection_goes_on_until_the_target_is_met() -> None:
    conf = "garbage_collection_threshold:0.1,per_process_memory_fraction:0.99"
    allocator, provider = _make(1000 * MIB, conf)
    blocks = [allocator.allocate(50 * MIB, stream) for stream in range(6)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(60 * MIB, stream=9)
    assert provider.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("conf", ["garbage_collection_threshold:0.1", ""])
def test_without_fraction_or_threshold_nothing_is_collected(conf: str) -> None:
    allocator, provider = _make(1000 * MIB, conf)
    allocator.free(allocator.allocate(500 * MIB))
    allocator.allocate(60 * MIB, stream=1)
    assert provider.free_count == 0


def test_split_segments_are_not_collected() -> None:
    conf = "garbage_collection_threshold:0.1,per_process_memory_fraction:0.99"
    allocator, provider = _make(1000 * MIB, conf)
    first, second = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    big = allocator.allocate(300 * MIB)
    allocator.free(first)
    allocator.allocate(100 * MIB, stream=1)
    assert provider.free_count == 0
    allocator.free(second)
    allocator.free(big)


def test_observers_hear_of_the_failure() -> None:
    allocator, _ = _make(GIB)
    heard: list[tuple[int, ...]] = []
    allocator.add_out_of_memory_observer(lambda *figures: heard.append(figures))
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1 << 40)
    assert heard == [(0, 1 << 40, GIB, GIB)]


def test_callbacks_may_free_memory_before_a_segment_is_reserved() -> None:
    allocator, provider = _make(100 * MIB)
    kept = [allocator.allocate(60 * MIB)]

    def give_up() -> bool:
        for block in kept:
            allocator.free(block)
        freed = bool(kept)
        kept.clear()
        return freed

    allocator.add_free_memory_callback(lambda: False)
    allocator.add_free_memory_callback(give_up)
    allocator.allocate(60 * MIB)
    assert provider.allocation_count == 1
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(60 * MIB)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_provider_that_fails_once_leaves_the_allocator_usable(number: int) -> None:
    provider = ScriptedProvider(fail_at={number})
    allocator = CachingAllocator(provider)
    blocks = [allocator.allocate(30 * MIB, stream) for stream in range(3)]
    assert _count(allocator)[:2] == (1, 0)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0


def test_an_unexpected_error_of_a_provider_changes_nothing() -> None:
    allocator, provider = _make(GIB)
    before = allocator.statistics.to_dict()

    def fail() -> None:
        raise RuntimeError("the cable is out")

    provider.before_allocate = fail
    with pytest.raises(RuntimeError, match="cable"):
        allocator.allocate(512)
    assert allocator.statistics.to_dict() == before
    provider.before_allocate = lambda: None
    assert allocator.allocate(512).nbytes == 512


def test_the_hint_names_expandable_segments_where_memory_is_in_pieces() -> None:
    allocator, _ = _make(100 * MIB)
    blocks = [allocator.allocate(9 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(30 * MIB)
    assert "expandable_segments:True" in caught.value.fix
