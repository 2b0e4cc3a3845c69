"""The state of a private pool, saved and restored: which blocks were live, and where.

Graphs that were captured one after the other into one pool find at replay the blocks that were live
when they were captured. To capture another graph after one of them, the pool must first look as it
did then: what its replay produced must count as live, and what came later as free.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Iterable

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.segment import Segment


@dataclasses.dataclass(frozen=True)
class BlockState:
    """A live block of a checkpoint.

    Attributes:
        address: of its first byte.
        nbytes: its size.
        requested_bytes: what was requested.
        segment: where it lies; weak, since a checkpoint keeps no memory alive.
    """

    address: int
    nbytes: int
    requested_bytes: int
    segment: weakref.ref[Segment] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class PoolCheckpoint:
    """The live blocks of a private pool at one time; all between them was free.

    Attributes:
        pool_id: of the pool.
        blocks: in the order of their addresses.
    """

    pool_id: PoolId
    blocks: tuple[BlockState, ...]


@dataclasses.dataclass(frozen=True)
class RestoredPool:
    """What restoring a checkpoint has changed.

    Attributes:
        freed_addresses: of the blocks that were live before, in order.
        blocks: those that are live now, in the order of their addresses.
    """

    freed_addresses: tuple[int, ...]
    blocks: tuple[Block, ...]


def take_checkpoint(store: BlockStore, pool: Pool) -> PoolCheckpoint:
    """Returns which blocks of ``pool`` are live. Blocks that wait for events count as free."""
    states = (
        BlockState(block.address, block.nbytes, block.requested_bytes, weakref.ref(block.segment))
        for block in _list_live(store, pool)
    )
    return PoolCheckpoint(pool.pool_id, tuple(states))


def restore_checkpoint(
    store: BlockStore,
    uses: StreamUses,
    pool: Pool,
    checkpoint: PoolCheckpoint,
    stale: Iterable[Block] = (),
) -> RestoredPool:
    """Makes exactly the blocks of ``checkpoint`` live, at their old places.

    All blocks of the pool are freed first. One that is live before and after stays the same object,
    so its owner need not be notified. Other streams' uses of the pool are waited for on the host.

    Args:
        store: all blocks of the allocator.
        uses: what other streams still use.
        pool: of which the checkpoint was taken.
        checkpoint: what `take_checkpoint` returned.
        stale: live blocks whose owners lose them: what becomes live at such a place is a new block.

    Raises:
        TracegraphError: a segment of the checkpoint is no longer in the pool, a stale block is not
            live in it, or other streams use blocks of the pool while a capture is under way.
            Nothing has changed then.
    """
    lost = set(stale)
    live = _list_live(store, pool)
    _check_segments(store, pool, checkpoint)
    _check_uses(store, uses, pool)
    _check_stale(pool, lost.difference(live))
    # Blocks that become free may merge, which changes their addresses.
    freed_addresses = tuple(block.address for block in live)
    kept = {block.address: block for block in live if block not in lost}
    _free_all(store, uses, pool, live)
    created = _cut_all(store, pool, checkpoint)
    blocks = tuple(_replace(store, block, kept.get(block.address)) for block in created)
    for block in lost:
        _detach(block)
    return RestoredPool(freed_addresses, blocks)


def _free_all(store: BlockStore, uses: StreamUses, pool: Pool, live: list[Block]) -> None:
    for block in live:
        store.mark_freed(block, None)
        if block.stream_uses:
            uses.defer(block)
        else:
            store.put_back(block)
    if any(block.size_class.pool_id == pool.pool_id for block in uses.blocks):
        uses.synchronize_all(pool)


def _detach(block: Block) -> None:
    """Replaces a free block by another object, because an owner may still hold it."""
    free = block.size_class.free
    if block in free:
        free.remove(block)
        free.add(_move(block, _make_blank(block)))


def _list_live(store: BlockStore, pool: Pool) -> list[Block]:
    live = (block for block in _list_active(store, pool) if block.is_allocated)
    return sorted(live, key=_get_address)


def _list_active(store: BlockStore, pool: Pool) -> list[Block]:
    active = store.active.values()
    return [block for block in active if block.size_class.pool_id == pool.pool_id]


def _get_address(block: Block) -> int:
    return block.address


def _check_segments(store: BlockStore, pool: Pool, checkpoint: PoolCheckpoint) -> None:
    extents = _list_extents(store, pool)
    starts = [start for start, _ in extents]
    lost = []
    for state in checkpoint.blocks:
        index = bisect.bisect_right(starts, state.address) - 1
        is_covered = index >= 0 and state.address + state.nbytes <= extents[index][1]
        # The address alone is not enough: another segment may have come there since.
        if not is_covered or state.segment() not in store.segments:
            lost.append(state)
    if lost or checkpoint.pool_id != pool.pool_id:
        places = ", ".join(f"{state.address:#x}" for state in lost)
        raise TracegraphError(
            f"cannot restore the checkpoint of pool {checkpoint.pool_id}",
            where=f"pool {pool.pool_id}" + (f", blocks at {places}" if lost else ""),
            why="their segments have been released" if lost else "it is of another pool",
            fix="keep the pool in use for as long as its checkpoints are needed",
            anchor="pool",
        )


def _list_extents(store: BlockStore, pool: Pool) -> list[tuple[int, int]]:
    """Returns first and last address of what the pool has memory for, joined where they touch."""
    blocks = sorted((*_list_active(store, pool), *_list_free(pool)), key=_get_address)
    extents: list[tuple[int, int]] = []
    for block in blocks:
        start = block.address
        if extents and extents[-1][1] == start:
            start, _ = extents.pop()
        extents.append((start, block.address + block.nbytes))
    return extents


def _list_free(pool: Pool) -> list[Block]:
    return sorted((block for each in pool.size_classes for block in each.free), key=_get_address)


def _check_uses(store: BlockStore, uses: StreamUses, pool: Pool) -> None:
    used = _list_active(store, pool)
    if uses.is_capturing and any(block.stream_uses or block.event_count for block in used):
        raise TracegraphError(
            f"cannot restore a checkpoint of pool {pool.pool_id} now",
            where="a capture is under way, and blocks of the pool were used on several streams",
            why="during a capture no event tells whether these uses are over",
            fix="restore the checkpoint before the capture begins",
            anchor="pool",
        )


def _check_stale(pool: Pool, unknown: set[Block]) -> None:
    if unknown:
        places = ", ".join(sorted(f"{block.address:#x}" for block in unknown))
        raise TracegraphError(
            f"cannot restore a checkpoint of pool {pool.pool_id}: stale blocks are not live",
            where=f"argument `stale`, blocks at {places}",
            why="only what is live in the pool can be taken from its owner",
            fix="pass blocks of this pool that are not freed yet",
            anchor="pool",
        )


def _cut_all(store: BlockStore, pool: Pool, checkpoint: PoolCheckpoint) -> list[Block]:
    free = _list_free(pool)
    addresses = [block.address for block in free]
    inside: dict[int, list[BlockState]] = {}
    for state in checkpoint.blocks:
        index = bisect.bisect_right(addresses, state.address) - 1
        inside.setdefault(index, []).append(state)
    return [block for index, states in inside.items() for block in _cut(store, free[index], states)]


def _cut(store: BlockStore, whole: Block, states: list[BlockState]) -> list[Block]:
    """Cuts a free block into live ones and the free ones between and behind them."""
    free = whole.size_class.free
    end_address = whole.address + whole.nbytes
    free.remove(whole)
    # The object itself may be one that its owner keeps.
    rest: Block | None = _move(whole, _make_blank(whole))
    free.add(rest)
    live, gaps = [], []
    for nbytes, state in _list_pieces(whole.address, end_address, states):
        assert rest is not None
        free.remove(rest)
        requested_bytes = state.requested_bytes if state else nbytes
        splits = rest.nbytes > nbytes
        piece = store.mark_allocated(rest, nbytes, requested_bytes, None, splits=splits)
        rest = piece.next
        (live if state else gaps).append(piece)
    for piece in gaps:
        store.mark_freed(piece, None)
        store.put_back(piece)
    return live


def _list_pieces(
    address: int, end_address: int, states: list[BlockState]
) -> list[tuple[int, BlockState | None]]:
    pieces: list[tuple[int, BlockState | None]] = []
    for state in states:
        if state.address > address:
            pieces.append((state.address - address, None))
        pieces.append((state.nbytes, state))
        address = state.address + state.nbytes
    if end_address > address:
        pieces.append((end_address - address, None))
    return pieces


def _make_blank(block: Block) -> Block:
    return Block(block.segment, block.address, block.nbytes, block.stream, block.size_class)


def _replace(store: BlockStore, block: Block, kept: Block | None) -> Block:
    """Puts the block that an owner has kept in the place of ``block``."""
    if kept is None:
        return block
    store.active[block.address] = _move(block, kept)
    return kept


def _move(block: Block, place: Block) -> Block:
    """Copies all fields of ``block`` to ``place``, and links its neighbours to it."""
    for name in Block.__slots__:
        setattr(place, name, getattr(block, name))
    if place.previous is not None:
        place.previous.next = place
    if place.next is not None:
        place.next.previous = place
    return place
