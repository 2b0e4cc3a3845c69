"""What the model of the allocator keeps: segments cut into pieces, and figures that are sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.pool_id import PoolId

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
OVERSIZE = ("oversize_allocations", "oversize_segments")


@dataclasses.dataclass(eq=False)
class Piece:
    """A part of a segment: free, live, or freed and still in use by a stream."""

    address: int
    nbytes: int
    segment: ModelSegment
    requested: int = 0
    state: str = "free"
    uses: set[int] = dataclasses.field(default_factory=set)
    uses_in_captures: set[int] = dataclasses.field(default_factory=set)
    events: int = 0
    free_since: int = 0
    marker: tuple[CaptureOrder, frozenset[int]] | None = None

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclasses.dataclass(eq=False)
class ModelSegment:
    """What one call of the provider returned. ``pool`` is None for the default pools.

    Figures of those whose kind is not "small", also of an arena, are counted as large.
    """

    address: int
    nbytes: int
    stream: int
    pool: PoolId | None
    kind: str
    pieces: list[Piece] = dataclasses.field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """All of it may be released."""
        return len(self.pieces) == 1 and self.pieces[0].state == "free"


@dataclasses.dataclass
class ModelPool:
    use_count: int = 1
    can_split: bool = True
    is_for_oom: bool = False


@dataclasses.dataclass(frozen=True)
class PieceState:
    """A live piece as a checkpoint keeps it."""

    address: int
    nbytes: int
    requested: int
    segment: ModelSegment


class ModelStatistics:
    """All figures, each a list of four: current, peak, what came, what went.

    Args:
        max_split_bytes: blocks of this size and more are counted apart; None for no such size.
    """

    def __init__(self, max_split_bytes: int | None) -> None:
        self.max_split_bytes = max_split_bytes
        names = [f"{metric}.{pool}" for metric in METRICS for pool in POOLS]
        self.figures = {name: [0, 0, 0, 0] for name in (*names, *OVERSIZE)}
        self.pools: list[PoolId] = []
        self._rows = [[self.figures[f"{one}.{pool}"] for pool in POOLS] for one in METRICS]

    def add_pool(self, pool: PoolId) -> None:
        """Begins to count the reserved bytes of a private pool."""
        self.pools.append(pool)
        self.figures.update({name: [0, 0, 0, 0] for name in name_reserved(pool)})

    def drop_pool(self, pool: PoolId) -> None:
        self.pools.remove(pool)
        for name in name_reserved(pool):
            del self.figures[name]

    def observe(self, segments: list[ModelSegment]) -> None:
        """Sums everything anew and notes by how much each figure has changed."""
        small = self.sum_up([one for one in segments if one.kind == "small"])
        large = self.sum_up([one for one in segments if one.kind != "small"])
        for stats, of_small, of_large in zip(self._rows, small, large, strict=True):
            for stat, figure in zip(stats, (of_small + of_large, of_small, of_large), strict=True):
                _note(stat, figure)
        if self.pools:
            self._observe_pools(segments)
        if self.max_split_bytes is not None:
            self._observe_oversize(segments, self.max_split_bytes)

    def sum_up(self, segments: list[ModelSegment]) -> tuple[int, ...]:
        """Returns the sums over segments of one kind, in the order of `METRICS`."""
        pieces = [piece for segment in segments for piece in segment.pieces]
        live, live_bytes, active, active_bytes, requested = count_used(pieces)
        cut = (segment.pieces for segment in segments if len(segment.pieces) > 1)
        split = [piece.nbytes for each in cut for piece in each if piece.state == "free"]
        reserved = sum(segment.nbytes for segment in segments)
        counted = (live, live_bytes, len(segments), reserved)
        return (*counted, active, active_bytes, len(split), sum(split), requested)

    def count_reserved(self, segment: ModelSegment) -> int:
        """Returns the bytes of a segment that are there."""
        return segment.nbytes

    def is_whole(self, segment: ModelSegment) -> bool:
        """Says whether a segment counts as one."""
        return True

    def _observe_pools(self, segments: list[ModelSegment]) -> None:
        sums = {pool: [0, 0] for pool in self.pools}
        for segment in segments:
            if segment.pool is not None and segment.pool in sums:
                sums[segment.pool][segment.kind != "small"] += self.count_reserved(segment)
        for pool, (small, large) in sums.items():
            figures = (small + large, small, large)
            for name, figure in zip(name_reserved(pool), figures, strict=True):
                _note(self.figures[name], figure)

    def _observe_oversize(self, segments: list[ModelSegment], least: int) -> None:
        blocks = whole = 0
        for segment in segments:
            whole += segment.nbytes >= least and self.is_whole(segment)
            for piece in segment.pieces:
                blocks += piece.nbytes >= least and piece.state == "live"
        _note(self.figures["oversize_allocations"], blocks)
        _note(self.figures["oversize_segments"], whole)


def count_used(pieces: Iterable[Piece]) -> tuple[int, int, int, int, int]:
    """Returns live blocks and their bytes, active ones and theirs, and what was requested."""
    live = live_bytes = active = active_bytes = requested = 0
    for piece in pieces:
        if piece.state == "free":
            continue
        active += 1
        active_bytes += piece.nbytes
        requested += piece.requested
        if piece.state == "live":
            live += 1
            live_bytes += piece.nbytes
    return live, live_bytes, active, active_bytes, requested


def _note(stat: list[int], figure: int) -> None:
    change = figure - stat[0]
    if change:
        stat[0] = figure
        stat[1] = max(stat[1], figure)
        stat[2 if change > 0 else 3] += abs(change)


@functools.cache
def name_reserved(pool: PoolId) -> list[str]:
    """Returns the names of a private pool's figures, in the order of `POOLS`."""
    name = f"reserved_bytes_by_private_pools.{pool.number}_{pool.second}"
    return [f"{name}.{kind}" for kind in POOLS]
