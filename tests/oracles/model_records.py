"""What the model of the allocator keeps: segments cut into pieces, and figures that are sums."""

from __future__ import annotations

import dataclasses

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
    """What one call of the provider returned. ``pool`` is None for the default pools."""

    address: int
    nbytes: int
    stream: int
    pool: PoolId | None
    kind: str
    pieces: list[Piece] = dataclasses.field(default_factory=list)

    @property
    def kind_of_pool(self) -> str:
        """Under which its figures are counted; an arena is counted as large."""
        return "small_pool" if self.kind == "small" else "large_pool"

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
        self.figures.update({name: [0, 0, 0, 0] for name in _name_reserved(pool)})

    def drop_pool(self, pool: PoolId) -> None:
        self.pools.remove(pool)
        for name in _name_reserved(pool):
            del self.figures[name]

    def observe(self, segments: list[ModelSegment]) -> None:
        """Sums everything anew and notes by how much each figure has changed."""
        kinds: dict[str, list[ModelSegment]] = {"small_pool": [], "large_pool": []}
        for segment in segments:
            kinds[segment.kind_of_pool].append(segment)
        sums = map(_sum_up_all, kinds.values())
        for (all_stat, small_stat, large_stat), small, large in zip(self._rows, *sums, strict=True):
            _note(all_stat, small + large)
            _note(small_stat, small)
            _note(large_stat, large)
        for pool in self.pools:
            mine = [segment for segment in segments if segment.pool == pool]
            small = sum(one.nbytes for one in mine if one.kind == "small")
            large = sum(one.nbytes for one in mine if one.kind != "small")
            for name, figure in zip(
                _name_reserved(pool), (small + large, small, large), strict=True
            ):
                _note(self.figures[name], figure)
        if self.max_split_bytes is not None:
            sizes = [one.nbytes for each in segments for one in each.pieces if one.state == "live"]
            large_blocks = sum(nbytes >= self.max_split_bytes for nbytes in sizes)
            large_segments = sum(each.nbytes >= self.max_split_bytes for each in segments)
            _note(self.figures["oversize_allocations"], large_blocks)
            _note(self.figures["oversize_segments"], large_segments)


def _note(stat: list[int], figure: int) -> None:
    change = figure - stat[0]
    if change:
        stat[0] = figure
        stat[1] = max(stat[1], figure)
        stat[2 if change > 0 else 3] += abs(change)


def _name_reserved(pool: PoolId) -> list[str]:
    name = f"reserved_bytes_by_private_pools.{pool.number}_{pool.second}"
    return [f"{name}.{kind}" for kind in POOLS]


def _sum_up_all(segments: list[ModelSegment]) -> list[int]:
    columns = zip(*map(_sum_up, segments), strict=True)
    return [sum(column) for column in columns] or [0] * len(METRICS)


def _sum_up(segment: ModelSegment) -> tuple[int, ...]:
    live = live_bytes = active = active_bytes = split = split_bytes = requested = 0
    for piece in segment.pieces:
        if piece.state != "free":
            active, active_bytes = active + 1, active_bytes + piece.nbytes
            requested += piece.requested
            if piece.state == "live":
                live, live_bytes = live + 1, live_bytes + piece.nbytes
        elif len(segment.pieces) > 1:
            split, split_bytes = split + 1, split_bytes + piece.nbytes
    reserved = (1, segment.nbytes)
    return (live, live_bytes, *reserved, active, active_bytes, split, split_bytes, requested)
