"""Errors of the caching allocator."""

from __future__ import annotations

from tracegraph.runtime.errors import ConfigError, OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.sizes import ABSURD_BYTES, format_size


def refuse_size(nbytes: int, device: int) -> TracegraphError:
    """Returns the error of a request whose size is negative, or beyond any device."""
    if nbytes < 0:
        return TracegraphError(
            f"cannot allocate {nbytes:,} bytes",
            where=f"caching allocator of device {device}",
            why="a block has zero bytes or more",
            fix="pass a size of zero or more",
            anchor="pool",
        )
    return OutOfMemoryError(
        f"cannot allocate {nbytes:,} bytes: tried to allocate more than 1 EiB",
        where=f"caching allocator of device {device}",
        why=f"a request of {format_size(ABSURD_BYTES)} or more comes from a wrong computation",
        fix="look where this size is computed; an overflow or a wrong shape is likely",
        anchor="out-of-memory",
    )


def refuse_request(
    store: BlockStore, segment_bytes: int, pool: Pool, device: int
) -> OutOfMemoryError:
    """Returns the error of a request that nothing could satisfy.

    Args:
        store: all blocks.
        segment_bytes: size of the segment that was wanted.
        pool: of the request.
        device: its index.
    """
    statistics = store.statistics.all
    allocated_bytes = statistics.allocated_bytes.current
    private_bytes = sum(pool.free_bytes for pool in store.private.values())
    cached_bytes = statistics.reserved_bytes.current - allocated_bytes - private_bytes
    provider = pool.provider or store.provider
    total, free = provider.total_bytes(), provider.available_bytes()
    allowed = store.allowed_bytes
    parts = [
        f"device {device} ({provider.name}) has {format_size(total)}, of which "
        f"{format_size(free)} is free",
        f"{format_size(allowed)} allowed ({allowed / total:.2%})" if allowed is not None else "",
        f"{format_size(allocated_bytes)} allocated",
        f"{format_size(private_bytes)} free in private pools of graphs" if private_bytes else "",
        f"{format_size(cached_bytes)} reserved but unallocated",
    ]
    hint = "free arrays, use a smaller batch, or drop graphs that are not replayed any more"
    if cached_bytes > segment_bytes and not store.config.expandable_segments:
        hint += "; TRACEGRAPH_ALLOC_CONF=expandable_segments:True avoids fragmentation"
    return OutOfMemoryError(
        f"out of memory: tried to allocate {format_size(segment_bytes)}",
        where="; ".join(part for part in parts if part),
        why=_explain(store, segment_bytes, free),
        fix=hint,
        anchor="out-of-memory",
    )


def _explain(store: BlockStore, segment_bytes: int, free_bytes: int) -> str:
    if store.exceeds_limit(segment_bytes):
        return "the share of the device that this process may reserve is used up"
    if segment_bytes <= free_bytes:
        return "the provider has that much, but not in one piece"
    return "no cached block fits, and the device has no segment of that size left"


def refuse_free(block: Block, device: int) -> TracegraphError:
    """Returns the error of a block that is not in anybody's hands."""
    return TracegraphError(
        f"cannot free the block at {block.address:#x}: it is not in use in this allocator",
        where=f"caching allocator of device {device}, {block!r}",
        why="it was freed before or belongs to another allocator; its bytes may be in use",
        fix="free each block once, in the allocator that allocated it",
        anchor="pool",
    )


def refuse_stream(block: Block, stream: int, device: int) -> TracegraphError:
    """Returns the error of a stream that is named for a block which is not in use."""
    return TracegraphError(
        f"cannot record stream {stream} on the block at {block.address:#x}: it is not in use",
        where=f"caching allocator of device {device}, {block!r}",
        why="after it was freed, its bytes may be in use by somebody else",
        fix="record the stream before the block is freed",
        anchor="pool",
    )


def refuse_address(address: int, device: int) -> TracegraphError:
    """Returns the error of an address at which no block begins."""
    return TracegraphError(
        f"no block of this allocator is in use at {address:#x}",
        where=f"caching allocator of device {device}",
        why="it was freed before, or was not allocated here, or points into the middle of a block",
        fix="pass the address that the allocation returned, once",
        anchor="pool",
    )


def refuse_pool(what: str, pool_id: PoolId, *, why: str, fix: str) -> TracegraphError:
    """Returns the error of a pool that is not in the state that a call needs."""
    return TracegraphError(what, where=f"private pool {pool_id}", why=why, fix=fix, anchor="pool")


def refuse_fraction(fraction: object, device: int) -> ConfigError:
    """Returns the error of a share of the device that is none."""
    return ConfigError(
        f"the memory fraction is {fraction!r}",
        where=f"memory fraction of device {device}",
        why="it is the share of the device that this process may reserve, a number from 0 to 1",
        fix="pass a number from 0.0 to 1.0",
        anchor="memory-fraction",
    )
