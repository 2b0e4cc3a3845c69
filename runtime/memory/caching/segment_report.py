"""The segments of an allocator and their blocks, in the keys of a snapshot file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.history import format_frames
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId


def describe_segments(store: BlockStore, pool_id: PoolId | None = None) -> list[dict[str, Any]]:
    """Returns all segments in the order of their addresses, each with all of its blocks.

    The history, where one is recorded, gets an entry for it.

    Args:
        store: all blocks.
        pool_id: only the segments of this private pool; None or (0, 0) for those of all pools.
    """
    wanted = None if pool_id is None or tuple(pool_id) == DEFAULT_POOL_ID else tuple(pool_id)
    heads = [
        block
        for block in list_blocks(store)
        if (wanted is None or block.size_class.pool_id == wanted) and _is_head(block)
    ]
    heads.sort(key=lambda block: block.address)
    segments = [_describe_segment(store, head) for head in heads]
    if store.history.is_enabled:
        active_bytes = sum(segment["active_size"] for segment in segments)
        store.history.note("snapshot", 0, active_bytes, 0, pool_id or DEFAULT_POOL_ID)
    return segments


def list_blocks(store: BlockStore) -> Iterator[Block]:
    """Returns all mapped blocks, free ones first."""
    for pool in (store.default, *store.private.values()):
        for size_class in pool.size_classes:
            yield from size_class.free
    yield from store.active.values()


def _is_head(block: Block) -> bool:
    # Of an expandable segment, each run of mapped blocks counts as a segment.
    return block.previous is None or not block.previous.is_mapped


def _describe_segment(store: BlockStore, head: Block) -> dict[str, Any]:
    blocks: list[Block] = []
    block: Block | None = head
    while block is not None and block.is_mapped:
        blocks.append(block)
        block = block.next
    return {
        "device": store.device,
        "address": head.address,
        "total_size": sum(block.nbytes for block in blocks),
        "allocated_size": sum(block.nbytes for block in blocks if block.is_allocated),
        "active_size": sum(block.nbytes for block in blocks if block.is_active),
        "requested_size": sum(block.requested_bytes for block in blocks if block.is_active),
        "stream": head.stream,
        "segment_type": "small" if head.size_class.is_small else "large",
        "segment_pool_id": tuple(head.size_class.pool_id),
        "is_expandable": head.expandable is not None,
        "frames": format_frames(store.segments[head.segment].frames),
        "blocks": [_describe_block(block) for block in blocks],
    }


def _describe_block(block: Block) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.nbytes,
        "requested_size": block.requested_bytes,
        "state": _name_state(block),
        "frames": format_frames(block.frames),
    }


def _name_state(block: Block) -> str:
    if block.is_allocated:
        return "active_allocated"
    return "active_pending_free" if block.is_active else "inactive"
