"""Blocks of expandable segments: how a request finds room in them, and how pages are unmapped.

An expandable segment is a chain of blocks over its whole range of addresses. Blocks without memory
are *unmapped*, and kept apart from the free ones. There is one such segment for each stream and
size class, unless its addresses run out.
"""

from __future__ import annotations

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block, Reserved, SizeClass
from tracegraph.runtime.memory.caching.block_store import BlockStore, can_merge, merge, split
from tracegraph.runtime.memory.caching.expandable import ExpandableSegment
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.providers.provider import VirtualProvider
from tracegraph.runtime.memory.sizes import SMALL_SEGMENT_BYTES, round_up


def expand(
    store: BlockStore,
    size_class: SizeClass,
    nbytes: int,
    segment_bytes: int,
    stream: int,
    frames: Frames | None,
) -> Block | None:
    """Maps pages at the lowest addresses until a request fits, and returns a block in no list.

    Args:
        store: all blocks.
        size_class: of the request.
        nbytes: its rounded size.
        segment_bytes: the size of a segment of its own, which is compared with the allowed share.
        stream: of the block.
        frames: call stack of the request, if one was recorded.

    Returns:
        At least ``nbytes`` bytes; None if the provider has too little memory, or the allowed share
        would be passed. Pages that were mapped by then stay.
    """
    if store.exceeds_limit(segment_bytes):
        return None
    block = _find_room(size_class, nbytes, stream)
    if block is None:
        block = _open_segment(store, size_class, nbytes, stream, frames)
    if block is None:
        return None
    if not block.is_mapped and not _map(store, block, nbytes, frames):
        _close_if_empty(store, block)
        return None
    while block.nbytes < nbytes:
        room = block.next
        assert room is not None
        if not _map(store, room, nbytes - block.nbytes, frames):
            return None
        # It has absorbed the free block before it.
        block = room
    size_class.free.remove(block)
    return block


def shrink(store: BlockStore, block: Block, frames: Frames | None) -> None:
    """Unmaps the pages that lie in a free block as a whole; a segment without any is released."""
    expandable, size_class = block.expandable, block.size_class
    assert expandable is not None
    address, nbytes = expandable.find_whole_pages(block.address, block.nbytes)
    if not nbytes:
        return
    expandable.unmap(address, nbytes)
    size_class.free.remove(block)
    if address > block.address:
        before = split(block, address - block.address)
        size_class.free.remove(block)
        size_class.add(before)
    if block.nbytes > nbytes:
        size_class.add(_cut(block, nbytes))
    block.is_mapped = False
    _absorb_neighbours(block)
    size_class.unmapped.add(block)
    store.count_mapped(size_class, -nbytes)
    _note(store, "segment_unmap", block, address, nbytes, frames)
    _close_if_empty(store, block)


def _find_room(size_class: SizeClass, nbytes: int, stream: int) -> Block | None:
    unmapped = size_class.unmapped.list_from(0, stream)
    for block in sorted(unmapped, key=lambda each: each.address):
        before = block.previous
        # A free block right before it saves memory.
        start = before if before is not None and not before.is_active else block
        if _count_room(start, nbytes) >= nbytes:
            return start
    return None


def _count_room(start: Block, nbytes: int) -> int:
    room_bytes = 0
    block: Block | None = start
    while block is not None and not block.is_active and room_bytes < nbytes:
        room_bytes += block.nbytes
        block = block.next
    return room_bytes


def _open_segment(
    store: BlockStore, size_class: SizeClass, nbytes: int, stream: int, frames: Frames | None
) -> Block | None:
    provider = store.provider
    assert isinstance(provider, VirtualProvider)
    page_bytes = SMALL_SEGMENT_BYTES if size_class.is_small else store.config.large_segment_bytes
    page_bytes = round_up(page_bytes, provider.granularity_bytes())
    range_bytes = round_up(store.config.find_address_bytes(provider.total_bytes()), page_bytes)
    if nbytes > range_bytes:
        return None
    try:
        expandable = ExpandableSegment(provider, range_bytes, page_bytes)
    except OutOfMemoryError:
        # The allocator raises its own error after it has tried everything else.
        return None
    segment = expandable.segment
    store.has_expandable = True
    store.segments[segment] = Reserved(size_class, stream, frames, expandable)
    block = Block(segment, segment.address, range_bytes, stream, size_class)
    block.expandable, block.is_mapped = expandable, False
    size_class.unmapped.add(block)
    size_class.segment_count += 1
    return block


def _map(store: BlockStore, block: Block, wanted_bytes: int, frames: Frames | None) -> bool:
    """Maps memory at the start of an unmapped block, which then absorbs free neighbours."""
    expandable, size_class, address = block.expandable, block.size_class, block.address
    assert expandable is not None
    nbytes = expandable.map(address, min(wanted_bytes, block.nbytes))
    if not nbytes:
        return False
    size_class.unmapped.remove(block)
    if nbytes < block.nbytes:
        size_class.unmapped.add(_cut(block, nbytes))
    block.is_mapped = True
    _absorb_neighbours(block)
    size_class.add(block)
    store.count_mapped(size_class, nbytes)
    _note(store, "segment_map", block, address, nbytes, frames)
    return True


def _cut(block: Block, nbytes: int) -> Block:
    """Leaves a block its first bytes; returns the rest, which is in no list."""
    rest_bytes = block.nbytes - nbytes
    rest = Block(block.segment, block.address + nbytes, rest_bytes, block.stream, block.size_class)
    rest.expandable, rest.is_mapped = block.expandable, block.is_mapped
    rest.previous, rest.next = block, block.next
    if rest.next is not None:
        rest.next.previous = rest
    block.next, block.nbytes = rest, nbytes
    return rest


def _absorb_neighbours(block: Block) -> None:
    for neighbour in (block.previous, block.next):
        if neighbour is not None and can_merge(block, neighbour):
            merge(block, neighbour)


def _close_if_empty(store: BlockStore, block: Block) -> None:
    if block.is_mapped or block.previous is not None or block.next is not None:
        return
    expandable = block.expandable
    assert expandable is not None
    block.size_class.unmapped.remove(block)
    block.size_class.segment_count -= 1
    del store.segments[block.segment]
    expandable.close()


def _note(
    store: BlockStore, action: str, block: Block, address: int, nbytes: int, frames: Frames | None
) -> None:
    if store.history.is_enabled:
        pool_id = block.size_class.pool_id
        store.history.note(action, address, nbytes, block.stream, pool_id, frames)
