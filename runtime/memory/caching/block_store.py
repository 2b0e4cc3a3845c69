"""BlockStore: all blocks of one device, and the four things that happen to them.

A block is taken out of a free list or reserved from the provider, allocated, put back, and its
segment at last released. The allocator decides which of these happens when. Not locked: every
method is called under the allocator's lock.
"""

from __future__ import annotations

import sys
import threading

from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block, Pool, Reserved, SizeClass
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import Frames, History
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId
from tracegraph.runtime.memory.providers.provider import Provider, VirtualProvider
from tracegraph.runtime.memory.providers.segment import Segment
from tracegraph.runtime.memory.sizes import MIN_BLOCK_BYTES, SMALL_BYTES
from tracegraph.runtime.memory.statistics import Statistics


class BlockStore:
    """The blocks of one device.

    Args:
        provider: where segments come from, unless a pool has its own provider.
        config: the settings.
        device: its index.

    Attributes:
        history: gets an entry for everything that happens, if it is recorded.
        lock: the allocator's.
        statistics: kept up to date by the methods below.
        default: the pool of all requests that go to no private pool.
        private: the private pools.
        active: blocks that are not free, by address.
        segments: all segments, with what each was reserved for.
        reserved_bytes: bytes held from providers.
        memory_fraction: the share of the device that may be reserved, from 0 to 1.
        allowed_bytes: the same in bytes; None for no limit.
        has_expandable: there was an expandable segment.
    """

    def __init__(self, provider: Provider, config: AllocatorConfig, device: int) -> None:
        self.provider = provider
        self.history = History()
        self.device = device
        self.lock = threading.RLock()
        self.statistics = Statistics()
        self.default = Pool(DEFAULT_POOL_ID, self.statistics)
        self.private: dict[PoolId, Pool] = {}
        self.active: dict[int, Block] = {}
        self.segments: dict[Segment, Reserved] = {}
        self.reserved_bytes = 0
        self.has_expandable = False
        self.set_config(config)
        self.set_memory_fraction(config.per_process_memory_fraction)

    def set_config(self, config: AllocatorConfig) -> None:
        """Replaces the settings; blocks that exist stay as they are.

        Raises:
            ConfigError: segments are to be expandable, and the provider has none that are.
        """
        if config.expandable_segments and not isinstance(self.provider, VirtualProvider):
            raise _make_expandable_error(self.provider.name)
        self.config = config
        limit = config.max_split_bytes
        self._max_split_bytes = sys.maxsize if limit is None else limit
        self._counts_age = config.garbage_collection_threshold > 0
        self.statistics.max_split_size = -1 if limit is None else limit

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved to a share of the device.

        Raises:
            ConfigError: it is no number from 0 to 1.
        """
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise _make_fraction_error(fraction, self.device)
        total_bytes = self.provider.total_bytes() if fraction < 1 else 0
        self.allowed_bytes = int(fraction * total_bytes) if fraction < 1 else None
        self.memory_fraction = float(fraction)

    def take_free(self, size_class: SizeClass, nbytes: int, stream: int) -> Block | None:
        """Takes the best fitting free block out of its list; None if there is none.

        Args:
            size_class: where to look.
            nbytes: rounded size.
            stream: blocks of other streams are not considered.
        """
        if self._counts_age and self.allowed_bytes is not None:
            size_class.search_count += 1
        below_bytes = self._max_split_bytes
        if nbytes >= below_bytes:
            below_bytes = nbytes + self.config.max_non_split_rounding_bytes
        if self.has_expandable:
            uses_expandable = self.config.expandable_segments
            return size_class.take_with_expandable(
                nbytes, stream, below_bytes, uses_expandable=uses_expandable
            )
        return size_class.free.take(nbytes, stream, below_bytes)

    def exceeds_limit(self, nbytes: int) -> bool:
        """Says whether another segment of ``nbytes`` bytes would pass the allowed share."""
        return self.allowed_bytes is not None and self.reserved_bytes + nbytes > self.allowed_bytes

    def reserve(
        self, size_class: SizeClass, nbytes: int, stream: int, frames: Frames | None
    ) -> Block | None:
        """Obtains a new segment and returns it as one block, which is in no list.

        Args:
            size_class: that the block will return to.
            nbytes: size of the segment.
            stream: of the block.
            frames: call stack of the request, if one was recorded.

        Returns:
            None if the provider has too little memory, or the allowed share would be passed.
        """
        if self.exceeds_limit(nbytes):
            return None
        reserved = Reserved(size_class, stream, frames)
        segment = self._ask_provider(size_class.provider or self.provider, nbytes, stream)
        if segment is None:
            return None
        # Before anything else: see Note [Interrupts].
        self.segments[segment] = reserved
        self.statistics.num_device_alloc += 1
        block = Block(segment, segment.address, nbytes, stream, size_class)
        self._count_segment(block, 1)
        if self.history.is_enabled:
            self._note("segment_alloc", block, nbytes, frames)
        return block

    def mark_allocated(
        self,
        block: Block,
        nbytes: int,
        requested_bytes: int,
        frames: Frames | None,
        *,
        splits: bool,
    ) -> Block:
        """Returns ``block``, or its first ``nbytes`` bytes, as allocated.

        Args:
            block: free and in no list.
            nbytes: rounded size that is wanted.
            requested_bytes: size that the user asked for.
            frames: call stack of the request, if one was recorded.
            splits: the rest of the block becomes a free block of its own.
        """
        statistics, total = block.size_class.statistics, self.statistics.all
        if block.expandable is None and (block.previous is not None or block.next is not None):
            lost_bytes = nbytes if splits else block.nbytes
            statistics.change_inactive_split(0 if splits else -1, -lost_bytes)
            total.change_inactive_split(0 if splits else -1, -lost_bytes)
        elif block.expandable is None and splits:
            statistics.change_inactive_split(1, block.nbytes - nbytes)
            total.change_inactive_split(1, block.nbytes - nbytes)
        if splits:
            block = split(block, nbytes)
        statistics.count_block(block.nbytes, requested_bytes)
        total.count_block(block.nbytes, requested_bytes)
        if block.nbytes >= self._max_split_bytes:
            self.statistics.oversize_allocations.increase(1)
        if self.history.is_enabled:
            self._note("alloc", block, requested_bytes, frames)
        block.requested_bytes = requested_bytes
        block.frames = frames
        # In use from here on, and returned, without a call in between: Note [Interrupts].
        block.is_allocated = True
        self.active[block.address] = block
        return block

    def has_worthy_rest(self, block: Block, nbytes: int) -> bool:
        """Says whether the rest of ``block`` behind its first ``nbytes`` bytes is kept apart."""
        size_class = block.size_class
        rest_bytes = block.nbytes - nbytes
        if rest_bytes < MIN_BLOCK_BYTES or size_class.no_split:
            return False
        if size_class.is_small or self.uses_expandable(size_class):
            return True
        return nbytes < self._max_split_bytes and rest_bytes > SMALL_BYTES

    def uses_expandable(self, size_class: SizeClass) -> bool:
        """Says whether new memory of a size class comes from expandable segments."""
        is_usual = size_class.provider is None and not size_class.is_exact
        return is_usual and self.config.expandable_segments

    def is_oversize(self, nbytes: int) -> bool:
        """Says whether a block of ``nbytes`` bytes is never split."""
        return nbytes >= self._max_split_bytes

    def mark_freed(self, block: Block, frames: Frames | None) -> None:
        """Marks a block as freed by its user; streams may still read it."""
        block.is_allocated = False
        block.size_class.statistics.count_freed(block.nbytes)
        self.statistics.all.count_freed(block.nbytes)
        if block.nbytes >= self._max_split_bytes:
            self.statistics.oversize_allocations.decrease(1)
        if self.history.is_enabled:
            self._note("free_requested", block, block.requested_bytes, frames or block.frames)

    def put_back(self, block: Block, frames: Frames | None = None) -> None:
        """Puts a block that no stream reads into its free list, merged with free neighbours.

        Args:
            block: freed, without stream uses and events.
            frames: call stack of the free, if one was recorded.
        """
        if self.history.is_enabled:
            self._note("free_completed", block, block.requested_bytes, frames or block.frames)
        size_class = block.size_class
        nbytes = block.nbytes
        del self.active[block.address]
        lost_blocks = lost_bytes = 0
        neighbour = block.previous
        if neighbour is not None and can_merge(block, neighbour):
            lost_blocks, lost_bytes = 1, neighbour.nbytes
            merge(block, neighbour)
        neighbour = block.next
        if neighbour is not None and can_merge(block, neighbour):
            lost_blocks, lost_bytes = lost_blocks + 1, lost_bytes + neighbour.nbytes
            merge(block, neighbour)
        block.frames = None
        size_class.add(block)
        statistics, total = size_class.statistics, self.statistics.all
        if block.expandable is None and (lost_blocks or block.next or block.previous):
            is_split = block.next is not None or block.previous is not None
            blocks = is_split - lost_blocks
            change_bytes = is_split * block.nbytes - lost_bytes
            statistics.change_inactive_split(blocks, change_bytes)
            total.change_inactive_split(blocks, change_bytes)
        statistics.count_inactive(nbytes, block.requested_bytes)
        total.count_inactive(nbytes, block.requested_bytes)

    def release(self, block: Block, frames: Frames | None = None) -> None:
        """Returns the segment of a free block, which is all of it, to the provider."""
        if self.history.is_enabled:
            frames = frames or self.segments[block.segment].frames
            self._note("segment_free", block, block.nbytes, frames)
        # Forgotten first: if the provider fails, the segment must not be used again.
        block.size_class.free.remove(block)
        self._count_segment(block, -1)
        free, segment = (block.size_class.provider or self.provider).free, block.segment
        # Without another call in between: Note [Interrupts].
        del self.segments[segment]
        self.statistics.num_device_free += 1
        free(segment)

    def count_mapped(self, size_class: SizeClass, nbytes: int) -> None:
        """Counts memory that was mapped, or unmapped if negative."""
        self.reserved_bytes += nbytes
        self.statistics.count_reserved(nbytes, size_class.pool_id, is_small=size_class.is_small)
        if nbytes > 0:
            self.statistics.num_device_alloc += 1
        else:
            self.statistics.num_device_free += 1

    def close(self) -> None:
        """Ends all references of blocks to one another, so that each is freed with its last user.

        Free blocks and their size class refer to each other, and so do the pieces of a segment:
        without this, the memory of an allocator that is gone waits for the garbage collector.
        """
        for pool in (self.default, *self.private.values()):
            for size_class in pool.size_classes:
                for block in (*size_class.free, *size_class.unmapped):
                    block.previous = block.next = None
                size_class.free.clear()
                size_class.unmapped.clear()
        for block in self.active.values():
            block.previous = block.next = None

    def _ask_provider(self, provider: Provider, nbytes: int, stream: int) -> Segment | None:
        unlocks = self.config.release_lock_on_cudamalloc
        try:
            if unlocks:
                self.lock.release()
            return provider.allocate(nbytes, stream)
        except OutOfMemoryError:
            # The allocator raises its own error after it has tried everything else.
            return None
        finally:
            if unlocks:
                self.lock.acquire()

    def _count_segment(self, block: Block, number: int) -> None:
        size_class, nbytes = block.size_class, number * block.nbytes
        is_small = size_class.is_small
        self.reserved_bytes += nbytes
        size_class.segment_count += number
        self.statistics.count_segment(number, is_small=is_small)
        self.statistics.count_reserved(nbytes, size_class.pool_id, is_small=is_small)
        if not self.is_oversize(block.nbytes):
            return
        if number > 0:
            self.statistics.oversize_segments.increase(1)
        else:
            self.statistics.oversize_segments.decrease(1)

    def _note(self, action: str, block: Block, nbytes: int, frames: Frames | None) -> None:
        pool_id = block.size_class.pool_id
        self.history.note(action, block.address, nbytes, block.stream, pool_id, frames)


def split(block: Block, nbytes: int) -> Block:
    """Cuts the first ``nbytes`` bytes off a block that is in no list; the rest goes into its list.

    Returns:
        The first part, a new block.
    """
    first = Block(block.segment, block.address, nbytes, block.stream, block.size_class)
    first.expandable = block.expandable
    first.previous = previous = block.previous
    if previous is not None:
        previous.next = first
    first.next, block.previous = block, first
    block.address += nbytes
    block.nbytes -= nbytes
    block.size_class.add(block)
    return first


def can_merge(block: Block, neighbour: Block) -> bool:
    """Says whether a block that becomes free absorbs its neighbour."""
    return (
        not neighbour.is_allocated
        and not neighbour.event_count
        and not neighbour.stream_uses
        and neighbour.is_mapped == block.is_mapped
    )


def merge(block: Block, neighbour: Block) -> None:
    """Lets ``block``, which is in no list, absorb a free neighbour, which leaves its list."""
    size_class = block.size_class
    (size_class.free if neighbour.is_mapped else size_class.unmapped).remove(neighbour)
    if block.previous is neighbour:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.nbytes += neighbour.nbytes


def _make_fraction_error(fraction: object, device: int) -> ConfigError:
    """Returns the error of a share of the device that is none."""
    return ConfigError(
        f"the memory fraction is {fraction!r}",
        where=f"memory fraction of device {device}",
        why="it is the share of the device that this process may reserve, a number from 0 to 1",
        fix="pass a number from 0.0 to 1.0",
        anchor="memory-fraction",
    )


def _make_expandable_error(provider: str) -> ConfigError:
    """Returns the error of a provider that has no expandable segments."""
    return ConfigError(
        "`expandable_segments:True` is not possible here",
        where=f"{provider} provider",
        why="such a provider must reserve addresses apart from the memory behind them",
        fix="set it in TRACEGRAPH_ALLOC_CONF before the first use of the device, or leave it out",
        anchor="config",
    )
