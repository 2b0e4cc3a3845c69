"""Statistics: PyTorch's keys, and the arithmetic behind them."""

from __future__ import annotations

import random

from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.statistics import FIELDS, METRICS, POOLS, Stat, Statistics

SCALARS = {
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
}


def test_the_keys_are_those_of_torch() -> None:
    names = {f"{metric}.{pool}" for metric in METRICS for pool in POOLS}
    names |= {"oversize_allocations", "oversize_segments"}
    wanted = {f"{name}.{field}" for name in names for field in FIELDS}
    figures = Statistics().to_dict()
    assert set(figures) == wanted | SCALARS
    assert len(figures) == 9 * 3 * 4 + 2 * 4 + 7
    assert list(figures) == sorted(figures)
    assert figures["max_split_size"] == -1
    assert all(value == 0 for key, value in figures.items() if key != "max_split_size")


def test_private_pools_have_keys_of_their_own() -> None:
    statistics = Statistics()
    statistics.add_pool(PoolId(7))
    statistics.count_reserved(4096, PoolId(7), is_small=True)
    statistics.count_reserved(512, PoolId(8), is_small=True)
    figures = statistics.to_dict()
    assert figures["reserved_bytes_by_private_pools.7_0.all.current"] == 4096
    assert figures["reserved_bytes_by_private_pools.7_0.small_pool.peak"] == 4096
    assert figures["reserved_bytes_by_private_pools.7_0.large_pool.current"] == 0
    assert figures["reserved_bytes.all.current"] == 4608
    statistics.drop_pool(PoolId(7))
    assert not any("private" in key for key in statistics.to_dict())


def test_a_stat_counts_like_a_slow_one() -> None:
    random_source = random.Random(1)
    stat = Stat()
    current = peak = allocated = freed = 0
    for _ in range(1000):
        amount = random_source.randint(0, 50)
        if random_source.random() < 0.5:
            stat.increase(amount)
            current, allocated = current + amount, allocated + amount
            peak = max(peak, current)
        else:
            amount = min(amount, current)
            stat.decrease(amount)
            current, freed = current - amount, freed + amount
        if random_source.random() < 0.02:
            stat.reset_peak()
            peak = current
        if random_source.random() < 0.02:
            stat.reset_accumulated()
            allocated = freed = 0
        assert stat.to_dict() == {
            "current": current,
            "peak": peak,
            "allocated": allocated,
            "freed": freed,
        }


def test_counting_a_block_equals_single_increases() -> None:
    statistics = Statistics()
    fast, slow = statistics.small_pool, statistics.large_pool
    for nbytes, requested in ((512, 100), (1024, 1000)):
        fast.count_block(nbytes, requested)
        slow.allocation.increase(1)
        slow.active.increase(1)
        slow.allocated_bytes.increase(nbytes)
        slow.active_bytes.increase(nbytes)
        slow.requested_bytes.increase(requested)
    fast.count_freed(512)
    slow.allocation.decrease(1)
    slow.allocated_bytes.decrease(512)
    fast.count_inactive(512, 100)
    slow.active.decrease(1)
    slow.active_bytes.decrease(512)
    slow.requested_bytes.decrease(100)
    for blocks, nbytes in ((1, 2048), (0, -512), (0, 512), (-1, -2048)):
        fast.change_inactive_split(blocks, nbytes)
        for stat, amount in ((slow.inactive_split, blocks), (slow.inactive_split_bytes, nbytes)):
            if amount > 0:
                stat.increase(amount)
            else:
                stat.decrease(-amount)
    assert [stat.to_dict() for stat in fast.stats] == [stat.to_dict() for stat in slow.stats]


def test_resets() -> None:
    statistics = Statistics()
    statistics.all.count_block(512, 1)
    statistics.all.count_block(512, 1)
    statistics.all.count_freed(512)
    statistics.num_ooms = 3
    statistics.reset_peak()
    assert statistics.to_dict()["allocation.all.peak"] == 1
    assert statistics.to_dict()["allocation.all.allocated"] == 2
    statistics.reset_accumulated()
    figures = statistics.to_dict()
    assert figures["allocation.all.allocated"] == figures["allocation.all.freed"] == 0
    assert figures["allocation.all.current"] == 1
    assert figures["num_ooms"] == 0
    statistics.all.count_freed(512)
    assert statistics.to_dict()["allocation.all.freed"] == 1
    assert repr(statistics.all.allocation) == "current=0, peak=1, allocated=0, freed=1"
