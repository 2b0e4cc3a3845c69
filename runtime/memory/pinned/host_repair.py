"""Repair of a host allocator's records after an interrupt: Note [Interrupts] in the caching room.

Here the records that no interrupt can break are the map of all blocks, whether a user holds a
block, the events at it, and the pools that graphs copy from.
"""

from __future__ import annotations

from collections.abc import Collection

from tracegraph.runtime.memory.pinned.host_block import HostBlock, HostPools, PendingBlocks
from tracegraph.runtime.memory.pinned.host_statistics import HostStatistics


def repair(
    pools: HostPools,
    pending: PendingBlocks,
    statistics: HostStatistics,
    surplus: Collection[HostBlock],
) -> None:
    """Makes anew what follows from blocks and events: free lists, queues, statistics.

    Args:
        pools: all blocks, under the allocator's lock.
        pending: freed blocks that copies still read.
        statistics: of the allocator.
        surplus: blocks whose memory is about to be freed.
    """
    pools.repair(surplus)
    blocks = list(pools.map.blocks.values())
    pending.repair(blocks)
    for block in blocks:
        if not block.is_allocated and not block.event_count and not block.captured_by:
            block.pool.put(block)
    in_use = [each for each in blocks if each.is_allocated or each.event_count or each.captured_by]
    statistics.allocations.settle(len(blocks))
    statistics.allocated_bytes.settle(sum(block.nbytes for block in blocks))
    statistics.active_requests.settle(len(in_use))
    statistics.active_bytes.settle(sum(block.nbytes for block in in_use))
