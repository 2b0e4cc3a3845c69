"""Statistics of a caching allocator, under the keys of ``torch.cuda.memory_stats``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tracegraph.runtime.memory.pool_id import PoolId

FIELDS = ("current", "peak", "allocated", "freed")
METRICS = (
    "allocation",
    "allocated_bytes",
    "segment",
    "reserved_bytes",
    "active",
    "active_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class Stat:
    """One quantity over time: its value now, its peak, and all that was added and removed.

    ``freed`` is derived, so that a decrease is a single step.

    Example:
        >>> stat = Stat()
        >>> stat.increase(5)
        >>> stat.decrease(2)
        >>> stat.current, stat.peak, stat.allocated, stat.freed
        (3, 5, 5, 2)
    """

    __slots__ = ("_start", "allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self._start = 0

    def __repr__(self) -> str:
        return ", ".join(f"{field}={getattr(self, field):,}" for field in FIELDS)

    @property
    def freed(self) -> int:
        """All that was removed since the last `reset_accumulated`."""
        return self._start + self.allocated - self.current

    def increase(self, amount: int) -> None:
        """Adds to the quantity."""
        self.allocated += amount
        self.current = current = self.current + amount
        if current > self.peak:
            self.peak = current

    def decrease(self, amount: int) -> None:
        """Takes from the quantity."""
        self.current -= amount

    def settle(self, current: int) -> None:
        """Sets the quantity; more than was counted counts as added, less as removed."""
        self.allocated += max(current - self.current, 0)
        self.current = current
        self.peak = max(self.peak, current)

    def reset_peak(self) -> None:
        """Sets the highest value to the current one."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Forgets all that came and went."""
        self.allocated, self._start = 0, self.current

    def settle_sum(self, parts: Iterable[Stat]) -> None:
        """Sets what came and went to the sums of several quantities."""
        self.allocated = sum(part.allocated for part in parts)
        self._start = sum(part._start for part in parts)

    def to_dict(self) -> dict[str, int]:
        """Returns the four fields by name."""
        return {field: getattr(self, field) for field in FIELDS}


class BlockStatistics:
    """The metrics of all blocks, of the small or of the large ones.

    Its methods run at each allocation and each free. So they write the steps of
    `Stat.increase` out: ten calls would take longer than the rest of an allocation.
    """

    __slots__ = METRICS

    allocation: Stat
    allocated_bytes: Stat
    segment: Stat
    reserved_bytes: Stat
    active: Stat
    active_bytes: Stat
    inactive_split: Stat
    inactive_split_bytes: Stat
    requested_bytes: Stat

    def __init__(self) -> None:
        for metric in METRICS:
            setattr(self, metric, Stat())

    @property
    def stats(self) -> tuple[Stat, ...]:
        """All metrics, in the order of ``METRICS``."""
        return tuple(getattr(self, metric) for metric in METRICS)

    def count_block(self, nbytes: int, requested_bytes: int) -> None:
        """Counts a block that is allocated."""
        stat = self.allocation
        stat.allocated += 1
        stat.current = current = stat.current + 1
        if current > stat.peak:
            stat.peak = current
        stat = self.allocated_bytes
        stat.allocated += nbytes
        stat.current = current = stat.current + nbytes
        if current > stat.peak:
            stat.peak = current
        stat = self.active
        stat.allocated += 1
        stat.current = current = stat.current + 1
        if current > stat.peak:
            stat.peak = current
        stat = self.active_bytes
        stat.allocated += nbytes
        stat.current = current = stat.current + nbytes
        if current > stat.peak:
            stat.peak = current
        stat = self.requested_bytes
        stat.allocated += requested_bytes
        stat.current = current = stat.current + requested_bytes
        if current > stat.peak:
            stat.peak = current

    def count_freed(self, nbytes: int) -> None:
        """Counts a block that its user freed; streams may still read it."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= nbytes

    def count_inactive(self, nbytes: int, requested_bytes: int) -> None:
        """Counts a block that no stream reads any more."""
        self.active.current -= 1
        self.active_bytes.current -= nbytes
        self.requested_bytes.current -= requested_bytes

    def change_inactive_split(self, blocks: int, nbytes: int) -> None:
        """Adds to, or takes from, the free blocks that are parts of a segment."""
        stat = self.inactive_split_bytes
        stat.current = current = stat.current + nbytes
        if nbytes > 0:
            stat.allocated += nbytes
            if current > stat.peak:
                stat.peak = current
        if blocks:
            _change(self.inactive_split, blocks)


class Statistics:
    """What one allocator did. Not locked: the allocator's lock guards it.

    Attributes:
        all: metrics of all blocks together.
        small_pool: those of blocks up to 1 MiB.
        large_pool: those of larger blocks, and of arenas.
        private_reserved: reserved bytes by private pool, each for all, small and large blocks.
        max_split_size: blocks of this many bytes are never split; -1 for no limit.

    Example:
        >>> statistics = Statistics()
        >>> statistics.all.count_block(512, 100)
        >>> statistics.to_dict()["allocated_bytes.all.current"]
        512
    """

    def __init__(self) -> None:
        self.all = BlockStatistics()
        self.small_pool = BlockStatistics()
        self.large_pool = BlockStatistics()
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.private_reserved: dict[PoolId, dict[str, Stat]] = {}
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.max_split_size = -1

    def choose(self, *, is_small: bool) -> BlockStatistics:
        """Returns the metrics of the small or of the large blocks."""
        return self.small_pool if is_small else self.large_pool

    def add_pool(self, pool_id: PoolId) -> None:
        """Begins to count the reserved bytes of a private pool."""
        self.private_reserved[pool_id] = {pool: Stat() for pool in POOLS}

    def drop_pool(self, pool_id: PoolId) -> None:
        """Forgets a private pool."""
        del self.private_reserved[pool_id]

    def count_reserved(self, nbytes: int, pool_id: PoolId, *, is_small: bool) -> None:
        """Counts bytes that were reserved from a provider, or released if negative."""
        for stat in self._find_reserved(pool_id, is_small):
            _change(stat, nbytes)

    def count_segment(self, number: int, *, is_small: bool) -> None:
        """Counts ``number`` new segments, or lost ones if negative."""
        _change(self.all.segment, number)
        _change(self.choose(is_small=is_small).segment, number)

    def settle(self, counted: Statistics) -> None:
        """Sets all quantities to those that were counted anew; what came and went stays."""
        for pool_id in self.private_reserved.keys() - counted.private_reserved.keys():
            self.drop_pool(pool_id)
        found = counted._list_stats()
        for name, stat in self._list_stats().items():
            stat.settle(found[name].current)
        for total, *parts in zip(
            self.all.stats, self.small_pool.stats, self.large_pool.stats, strict=True
        ):
            total.settle_sum(parts)

    def reset_peak(self) -> None:
        """Sets the highest values to the current ones."""
        for stat in self._list_stats().values():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """Forgets all that came and went, and the counts of events."""
        for stat in self._list_stats().values():
            stat.reset_accumulated()
        for counter in COUNTERS:
            setattr(self, counter, 0)

    def to_dict(self) -> dict[str, int]:
        """Returns all figures under the keys of ``torch.cuda.memory_stats``, sorted."""
        figures = {counter: getattr(self, counter) for counter in COUNTERS}
        figures["max_split_size"] = self.max_split_size
        for name, stat in self._list_stats().items():
            figures.update((f"{name}.{field}", value) for field, value in stat.to_dict().items())
        return dict(sorted(figures.items()))

    def _find_reserved(self, pool_id: PoolId, is_small: bool) -> list[Stat]:
        private = self.private_reserved.get(pool_id)
        kind = "small_pool" if is_small else "large_pool"
        stats = [self.all.reserved_bytes, self.choose(is_small=is_small).reserved_bytes]
        return stats if private is None else [*stats, private["all"], private[kind]]

    def _list_stats(self) -> Mapping[str, Stat]:
        stats = {
            "oversize_allocations": self.oversize_allocations,
            "oversize_segments": self.oversize_segments,
        }
        for pool, metrics in zip(POOLS, (self.all, self.small_pool, self.large_pool), strict=True):
            named = zip(METRICS, metrics.stats, strict=True)
            stats.update({f"{metric}.{pool}": stat for metric, stat in named})
        for pool_id, by_kind in self.private_reserved.items():
            name = f"reserved_bytes_by_private_pools.{pool_id.number}_{pool_id.second}"
            stats.update({f"{name}.{pool}": stat for pool, stat in by_kind.items()})
        return stats


def _change(stat: Stat, amount: int) -> None:
    if amount > 0:
        stat.increase(amount)
    elif amount < 0:
        stat.decrease(-amount)
