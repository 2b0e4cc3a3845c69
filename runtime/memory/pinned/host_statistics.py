"""Statistics of a caching host allocator, under the keys of ``torch.cuda.host_memory_stats``."""

from __future__ import annotations

from tracegraph.runtime.memory.statistics import Stat

METRICS = ("allocations", "allocated_bytes", "active_requests", "active_bytes")


class DurationStat:
    """How long calls of one kind took, in microseconds.

    Example:
        >>> stat = DurationStat()
        >>> stat.add(3)
        >>> stat.add(6)
        >>> stat.to_dict()
        {'total': 9, 'max': 6, 'min': 3, 'count': 2, 'avg': 4}
    """

    def __init__(self) -> None:
        self.total = self.max = self.min = self.count = 0

    def add(self, microseconds: int) -> None:
        """Adds one call."""
        self.min = min(self.min, microseconds) if self.count else microseconds
        self.max = max(self.max, microseconds)
        self.total += microseconds
        self.count += 1

    def to_dict(self) -> dict[str, int]:
        """Returns the figures by name; the average is rounded down."""
        average = self.total // self.count if self.count else 0
        figures = {"total": self.total, "max": self.max, "min": self.min}
        return {**figures, "count": self.count, "avg": average}


class HostStatistics:
    """What one caching host allocator did. Not locked: the allocator's lock guards it.

    `count_request` and `count_end` run whenever an array is staged. So they write the steps of
    `Stat.increase` out.

    Attributes:
        allocations: blocks held, in use or not.
        allocated_bytes: page-locked bytes in them.
        active_requests: blocks in use, and those that copies are still reading.
        active_bytes: page-locked bytes in these.
        num_host_alloc: segments that were page-locked.
        num_host_free: segments that were freed.
        host_alloc_time: of page-locking them.
        host_free_time: of freeing them.

    Example:
        >>> statistics = HostStatistics()
        >>> statistics.count_block(4096)
        >>> statistics.to_dict()["allocated_bytes.current"]
        4096
    """

    def __init__(self) -> None:
        self.allocations, self.allocated_bytes = Stat(), Stat()
        self.active_requests, self.active_bytes = Stat(), Stat()
        self.num_host_alloc = self.num_host_free = 0
        self.host_alloc_time, self.host_free_time = DurationStat(), DurationStat()

    def count_block(self, nbytes: int) -> None:
        """Counts a new block."""
        self.allocations.increase(1)
        self.allocated_bytes.increase(nbytes)

    def count_drop(self, nbytes: int) -> None:
        """Counts a block whose segment is freed."""
        self.allocations.decrease(1)
        self.allocated_bytes.decrease(nbytes)

    def count_request(self, nbytes: int) -> None:
        """Counts a block that is allocated."""
        stat = self.active_requests
        stat.allocated += 1
        stat.current = current = stat.current + 1
        if current > stat.peak:
            stat.peak = current
        stat = self.active_bytes
        stat.allocated += nbytes
        stat.current = current = stat.current + nbytes
        if current > stat.peak:
            stat.peak = current

    def count_end(self, nbytes: int) -> None:
        """Counts a block that is free again and that no copy reads."""
        self.active_requests.current -= 1
        self.active_bytes.current -= nbytes

    def count_host_alloc(self, microseconds: int) -> None:
        """Counts a page-locked segment and the time that it took."""
        self.num_host_alloc += 1
        self.host_alloc_time.add(microseconds)

    def count_host_free(self, microseconds: int) -> None:
        """Counts a segment that was freed and the time that it took."""
        self.num_host_free += 1
        self.host_free_time.add(microseconds)

    def reset_peak(self) -> None:
        """Sets the highest values to the current ones."""
        for metric in METRICS:
            getattr(self, metric).reset_peak()

    def reset_accumulated(self) -> None:
        """Forgets all that came and went, and all times."""
        for metric in METRICS:
            getattr(self, metric).reset_accumulated()
        self.num_host_alloc = self.num_host_free = 0
        self.host_alloc_time, self.host_free_time = DurationStat(), DurationStat()

    def to_dict(self) -> dict[str, int]:
        """Returns all figures under the keys of ``torch.cuda.host_memory_stats``, sorted."""
        figures = {
            "num_host_alloc": self.num_host_alloc,
            "num_host_free": self.num_host_free,
        }
        for name in (*METRICS, "host_alloc_time", "host_free_time"):
            fields = getattr(self, name).to_dict()
            figures.update((f"{name}.{field}", value) for field, value in fields.items())
        return dict(sorted(figures.items()))
