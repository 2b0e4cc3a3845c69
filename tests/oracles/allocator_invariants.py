"""What must hold of an allocator's records between any two calls."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any

from tracegraph.runtime.memory.caching.block import Block, Reserved
from tracegraph.runtime.memory.providers.segment import Segment


def check_allocator(allocator: Any, segments: Collection[Segment]) -> None:
    """Raises AssertionError where the records of an allocator contradict each other.

    Args:
        allocator: a `CachingAllocator` or a `DirectAllocator`; what it has noted is done first.
        segments: those that its provider has given, without expandable ones.
    """
    statistics = allocator.statistics
    store, uses = allocator._store, allocator._uses
    assert not allocator._used.noted
    fixed = {segment for segment, reserved in store.segments.items() if not reserved.expandable}
    assert set(segments) == fixed
    listed = _list_listed(store)
    blocks = {*store.active.values(), *listed}
    assert len(blocks) == len(store.active) + len(listed), "a block is in two lists"
    chains: dict[Segment, list[Block]] = {segment: [] for segment in store.segments}
    for block in sorted(blocks, key=lambda block: block.address):
        chains[block.segment].append(block)
    for segment, chain in chains.items():
        _check_chain(segment, chain, store.segments[segment])
    for address, block in store.active.items():
        assert address == block.address
        assert block.is_active
        assert block.is_allocated or block in uses.blocks, "a block waits for nothing"
    for block in uses.blocks:
        assert store.active[block.address] is block
        assert not block.is_allocated
    if statistics is store.statistics:
        _check_statistics(store, listed)


def _list_listed(store: Any) -> list[Block]:
    found: list[Block] = []
    for pool in (store.default, *store.private.values()):
        for size_class in pool.size_classes:
            for block in size_class.free:
                assert block in size_class.free, "the list is not in order"
                assert block.is_mapped
                assert not block.is_active
                assert block.size_class is size_class
                found.append(block)
            for block in size_class.unmapped:
                assert not block.is_mapped
                assert not block.is_active
                found.append(block)
            assert size_class.segment_count == sum(
                reserved.size_class is size_class for reserved in store.segments.values()
            )
    return found


def _check_chain(segment: Segment, chain: list[Block], reserved: Reserved) -> None:
    address = segment.address
    for before, block in zip((None, *chain), chain, strict=False):
        assert block.previous is before
        assert before is None or before.next is block
        assert block.address == address, "there is a gap"
        assert (block.stream, block.size_class) == (reserved.stream, reserved.size_class)
        assert block.expandable is reserved.expandable
        if before is not None and not before.is_active and not block.is_active:
            assert before.is_mapped != block.is_mapped, "free neighbours are apart"
        address += block.nbytes
        if block.expandable is not None:
            assert block.expandable.is_mapped(block.address) == block.is_mapped
            assert block.expandable.is_mapped(address - 1) == block.is_mapped
    assert chain[-1].next is None
    assert address == segment.address + segment.nbytes


def _check_statistics(store: Any, listed: list[Block]) -> None:
    figures: collections.Counter[str] = collections.Counter()
    active = list(store.active.values())
    live = [block for block in active if block.is_allocated]
    figures["allocation"] = len(live)
    figures["allocated_bytes"] = sum(block.nbytes for block in live)
    figures["active"] = len(active)
    figures["active_bytes"] = sum(block.nbytes for block in active)
    figures["requested_bytes"] = sum(block.requested_bytes for block in active)
    figures["reserved_bytes"] = sum(block.nbytes for block in (*active, *listed) if block.is_mapped)
    parts = [block for block in listed if block.is_split and block.expandable is None]
    figures["inactive_split"] = len(parts)
    figures["inactive_split_bytes"] = sum(block.nbytes for block in parts)
    figures["segment"] = sum(each.expandable is None for each in store.segments.values())
    assert store.reserved_bytes == figures["reserved_bytes"]
    for metric, figure in figures.items():
        total, small, large = (
            getattr(each, metric)
            for each in (
                store.statistics.all,
                store.statistics.small_pool,
                store.statistics.large_pool,
            )
        )
        assert total.current == figure, f"{metric} is {total.current}, not {figure}"
        assert total.current == small.current + large.current, metric
        assert total.freed == small.freed + large.freed >= 0, metric
        assert total.peak >= total.current, metric
    for pool_id, by_kind in store.statistics.private_reserved.items():
        mine = [block for block in (*active, *listed) if block.size_class.pool_id == pool_id]
        nbytes = sum(block.nbytes for block in mine if block.is_mapped)
        assert by_kind["all"].current == nbytes
