"""Repair of an allocator's records after an interrupt, from those that no interrupt can break.

Note [Interrupts]. A `KeyboardInterrupt`, or what another handler of a signal raises, may come at
any call inside of the allocator: one list has lost a block, and the other has not got it yet. Four
records change in one step of the interpreter, each at the right end of all that belongs to it:

*   `BlockStore.segments` gets a segment before anything else, and loses it right before the
    provider does;
*   `ExpandableSegment.is_mapped` follows the provider in the same step;
*   `BlockStore.active` gets a block as the last step of its allocation;
*   `Block.is_allocated` is cleared as the first step of a free.

The rest follows from these: free lists, links, what waits for streams, statistics. After an
interrupt the allocator notes that it must be repaired, where finalisers note their blocks; each
call looks there first. So calls without an interrupt pay nothing. A free that has begun is
completed; an allocation that has not returned is undone. What an interrupt leaves in the middle of
the provider's own call is lost to both.

Rejected: an order of steps in which each is whole by itself (to split and to merge change six links
and lists and ten figures); a mark that each call sets and clears (2 % of an allocation);
signals held back meanwhile (only the main thread could, and at twice the price of an allocation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tracegraph.runtime.memory.caching.block import Block, Reserved
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.providers.segment import Segment
from tracegraph.runtime.memory.statistics import Statistics


def repair(store: BlockStore, uses: StreamUses) -> None:
    """Makes anew all that follows from segments, mapped pages and blocks in use.

    It may be interrupted and begun again.

    Args:
        store: all blocks of an allocator, under its lock.
        uses: those that other streams still read.
    """
    uses.settle([block for block in store.active.values() if not block.is_allocated])
    for address, block in tuple(store.active.items()):
        if not block.is_active:
            del store.active[address]
    for pool in (store.default, *store.private.values()):
        for size_class in pool.size_classes:
            size_class.free.clear()
            size_class.unmapped.clear()
            size_class.segment_count = 0
    in_use: dict[Segment, list[Block]] = {segment: [] for segment in store.segments}
    for block in store.active.values():
        in_use[block.segment].append(block)
    free: list[Block] = []
    for segment, reserved in store.segments.items():
        reserved.size_class.segment_count += 1
        free += _link(segment, reserved, in_use[segment])
    for block in free:
        listed = block.size_class.free if block.is_mapped else block.size_class.unmapped
        block.search_count = block.size_class.search_count
        listed.add(block)
    _recount(store, free)


def _link(segment: Segment, reserved: Reserved, in_use: Iterable[Block]) -> list[Block]:
    """Makes the chain of the blocks of a segment; returns the free ones, which are new."""
    free: list[Block] = []
    chain: list[Block] = []
    address = segment.address
    for block in (*sorted(in_use, key=lambda block: block.address), None):
        end = block.address if block is not None else segment.address + segment.nbytes
        for start, nbytes, is_mapped in _list_gaps(reserved, address, end):
            gap = Block(segment, start, nbytes, reserved.stream, reserved.size_class)
            gap.expandable, gap.is_mapped = reserved.expandable, is_mapped
            free.append(gap)
            chain.append(gap)
        if block is not None:
            chain.append(block)
            address = block.address + block.nbytes
    for before, block, after in zip((None, *chain), chain, (*chain[1:], None), strict=False):
        block.previous, block.next = before, after
    return free


def _list_gaps(reserved: Reserved, address: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Returns address, bytes and whether there is memory, of what lies free between two blocks."""
    expandable = reserved.expandable
    if expandable is None:
        if address < end:
            yield address, end - address, True
        return
    while address < end:
        start, is_mapped = address, expandable.is_mapped(address)
        while address < end and expandable.is_mapped(address) == is_mapped:
            address = min(expandable.find_page_end(address), end)
        yield start, address - start, is_mapped


def _recount(store: BlockStore, free: Iterable[Block]) -> None:
    """Sets all quantities to what there is; what was allocated so far stays as it was counted."""
    counted = Statistics()
    for pool_id in store.private:
        counted.add_pool(pool_id)
    store.reserved_bytes = 0
    for segment, reserved in store.segments.items():
        size_class, expandable = reserved.size_class, reserved.expandable
        is_small = size_class.is_small
        nbytes = segment.nbytes if expandable is None else expandable.mapped_bytes
        store.reserved_bytes += nbytes
        counted.count_reserved(nbytes, size_class.pool_id, is_small=is_small)
        if expandable is None:
            counted.count_segment(1, is_small=is_small)
            counted.oversize_segments.increase(store.is_oversize(nbytes))
    for block in store.active.values():
        for each in (counted.choose(is_small=block.size_class.is_small), counted.all):
            each.count_block(block.nbytes, block.requested_bytes)
            if not block.is_allocated:
                each.count_freed(block.nbytes)
        is_oversize = block.is_allocated and store.is_oversize(block.nbytes)
        counted.oversize_allocations.increase(is_oversize)
    for block in free:
        if block.expandable is None and block.is_split:
            for each in (counted.choose(is_small=block.size_class.is_small), counted.all):
                each.change_inactive_split(1, block.nbytes)
    store.statistics.settle(counted)
