"""Blocks, the size classes that they come from, and the pools that have these."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tracegraph.runtime.memory.caching.expandable import ExpandableSegment
from tracegraph.runtime.memory.caching.free_list import FreeList
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import Provider
from tracegraph.runtime.memory.providers.segment import Segment
from tracegraph.runtime.memory.statistics import BlockStatistics, Statistics


class Block:
    """A piece of a segment. Holding it keeps the memory alive. Compares by identity.

    A block is *allocated* while its user holds it, *active* until no stream reads it any more, and
    free otherwise. Only an allocator changes it. The pieces of a segment are linked in the order of
    their addresses, without gaps.

    Attributes:
        segment: where it lies.
        address: of its first byte.
        nbytes: its size, at least what was requested.
        requested_bytes: what was requested.
        stream: on which it may be used at once.
        size_class: that it returns to.
        previous: the piece before it in its segment, or None.
        next: the piece after it in its segment, or None.
        is_allocated: its user holds it.
        is_mapped: memory is mapped at its addresses.
        stream_uses: other streams that read it; None for no such stream.
        event_count: events that must be done before it is free.
        search_count: that of its size class when it became free; its age counts from there.
        frames: call stack of its allocation, if one was recorded.
        expandable: the expandable segment that it is a piece of, or None.
    """

    __slots__ = (
        "address",
        "event_count",
        "expandable",
        "frames",
        "is_allocated",
        "is_mapped",
        "nbytes",
        "next",
        "previous",
        "requested_bytes",
        "search_count",
        "segment",
        "size_class",
        "stream",
        "stream_uses",
    )

    def __init__(
        self, segment: Segment, address: int, nbytes: int, stream: int, size_class: SizeClass
    ) -> None:
        self.segment = segment
        self.address = address
        self.nbytes = nbytes
        self.requested_bytes = 0
        self.stream = stream
        self.size_class = size_class
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_allocated = False
        self.is_mapped = True
        self.stream_uses: set[int] | None = None
        self.event_count = 0
        self.search_count = 0
        self.frames: Frames | None = None
        self.expandable: ExpandableSegment | None = None

    def __repr__(self) -> str:
        state = "allocated" if self.is_allocated else "active" if self.is_active else "free"
        return f"Block({self.address:#x}, {self.nbytes:,} bytes, stream {self.stream}, {state})"

    @property
    def offset(self) -> int:
        """Bytes from the start of its segment."""
        return self.address - self.segment.address

    @property
    def is_split(self) -> bool:
        """It is one of several pieces of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_active(self) -> bool:
        """Its user holds it, or a stream may still read it."""
        return self.is_allocated or self.event_count > 0 or bool(self.stream_uses)

    @property
    def reach_bytes(self) -> int:
        """Its size, with the unmapped addresses after it that could be mapped."""
        room = self.next
        return self.nbytes if room is None or room.is_mapped else self.nbytes + room.nbytes

    @property
    def age(self) -> int:
        """How often its size class was searched since it became free."""
        return self.size_class.search_count - self.search_count


class Reserved(NamedTuple):
    """What a segment was reserved for; all of its blocks have this in common.

    Attributes:
        size_class: of its blocks.
        stream: of its blocks.
        frames: call stack of the request, if one was recorded.
        expandable: the range of addresses, if it grows.
    """

    size_class: SizeClass
    stream: int
    frames: Frames | None = None
    expandable: ExpandableSegment | None = None


class SizeClass:
    """The free blocks of one size class of a pool, and what all blocks of the class share.

    It does not refer to its pool: a block that its user keeps must not keep the other classes.

    Args:
        pool_id: of the pool.
        kind: ``small`` serves requests up to 1 MiB, ``large`` larger ones, ``exact`` arenas, each
            alone in a segment.
        statistics: of all blocks of that kind.
        provider: where its segments come from; None for the allocator's own.
        no_split: each block has a segment of its own.

    Attributes:
        free: its free blocks.
        unmapped: addresses of expandable segments without memory.
        segment_count: segments that it holds.
        search_count: how often it was searched while garbage collection was on.
    """

    __slots__ = (
        "free",
        "is_exact",
        "is_small",
        "no_split",
        "pool_id",
        "provider",
        "search_count",
        "segment_count",
        "statistics",
        "unmapped",
    )

    def __init__(
        self,
        pool_id: PoolId,
        kind: Literal["small", "large", "exact"],
        statistics: BlockStatistics,
        provider: Provider | None,
        no_split: bool,
    ) -> None:
        self.pool_id = pool_id
        self.is_small, self.is_exact = kind == "small", kind == "exact"
        self.statistics = statistics
        self.provider = provider
        self.no_split = no_split
        self.free: FreeList[Block] = FreeList()
        self.unmapped: FreeList[Block] = FreeList()
        self.segment_count = 0
        self.search_count = 0

    def add(self, block: Block) -> None:
        """Puts a free block into the list; its age begins."""
        block.search_count = self.search_count
        self.free.add(block)

    def take_with_expandable(
        self, nbytes: int, stream: int, below_bytes: int, *, uses_expandable: bool
    ) -> Block | None:
        """Takes the best fitting free block out of its list, where some segments are expandable.

        Args:
            nbytes: rounded size.
            stream: blocks of other streams are not considered.
            below_bytes: the block is smaller than this.
            uses_expandable: blocks of expandable segments are served. A block counts with the
                unmapped addresses after it, so that these are kept for large requests.
        """
        fitting = self.free.list_from(nbytes, stream)
        if not uses_expandable and fitting and fitting[0].expandable is not None:
            fitting = [block for block in fitting if block.expandable is None]
        if not fitting:
            return None
        best = fitting[0]
        for block in fitting[1:]:
            if best.expandable is None or block.reach_bytes >= best.reach_bytes:
                break
            best = block
        if best.nbytes >= below_bytes:
            return None
        self.free.remove(best)
        return best


class Pool:
    """A set of segments. The default one serves every request that goes to no private one.

    Args:
        pool_id: names it.
        statistics: of the allocator.
        provider: where its segments come from; None for the allocator's own.
        no_split: each block has a segment of its own.
        use_on_oom: it serves the default pool before that runs out of memory.

    Attributes:
        use_count: graphs and users that need it; at 0 its free segments may be released.
        small: the size class of blocks up to 1 MiB.
        large: that of larger blocks.
        exact: that of arenas.
    """

    def __init__(
        self,
        pool_id: PoolId,
        statistics: Statistics,
        *,
        provider: Provider | None = None,
        no_split: bool = False,
        use_on_oom: bool = False,
    ) -> None:
        self.pool_id = pool_id
        self.use_on_oom = use_on_oom
        self.use_count = 1
        small, large = statistics.small_pool, statistics.large_pool
        self.small = SizeClass(pool_id, "small", small, provider, no_split)
        self.large = SizeClass(pool_id, "large", large, provider, no_split)
        self.exact = SizeClass(pool_id, "exact", large, provider, no_split)

    def __repr__(self) -> str:
        return (
            f"Pool({self.pool_id}, use_count={self.use_count}, segments={self.segment_count}, "
            f"free={self.free_bytes:,} bytes)"
        )

    @property
    def size_classes(self) -> tuple[SizeClass, SizeClass, SizeClass]:
        """Small, large, exact."""
        return self.small, self.large, self.exact

    @property
    def segment_count(self) -> int:
        """Segments that it holds."""
        return sum(each.segment_count for each in self.size_classes)

    @property
    def free_bytes(self) -> int:
        """Bytes of its free blocks."""
        return sum(each.free.nbytes for each in self.size_classes)

    def close(self) -> None:
        """Drops the provider; blocks that were freed may still refer to the size classes."""
        for each in self.size_classes:
            each.provider = None
