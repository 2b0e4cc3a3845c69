"""The state of a private pool, taken and brought back. Names follow PyTorch's tests of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.fakes.bytes_provider import BytesProvider, ManualEvents
from tests.fakes.virtual_bytes_provider import VirtualBytesProvider
from tests.oracles import error_lines
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import PoolId

MIB = 1 << 20
POOL, OTHER_POOL = PoolId(1), PoolId(2)
STREAM, SIDE = 5, 6


class Setup:
    """An allocator whose requests on STREAM go to POOL."""

    def __init__(self) -> None:
        self.provider = BytesProvider(256 * MIB)
        self.events = ManualEvents()
        self.allocator = CachingAllocator(self.provider, events=self.events)
        self.allocator.pools.begin(POOL, lambda stream: stream == STREAM)

    def allocate(self, *sizes: int) -> list[Block]:
        return [self.allocator.allocate(nbytes, STREAM) for nbytes in sizes]

    def free(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)

    def count_live(self) -> int:
        return sum(one["state"] == "active_allocated" for one in self.list_blocks())

    def list_blocks(self) -> list[dict]:
        return [block for one in self.allocator.snapshot(POOL) for block in one["blocks"]]

    def read_state(self) -> list[dict]:
        """Returns all that must be restored: segments and blocks without their call stacks."""
        segments = [dict(one) for one in self.allocator.snapshot(POOL)]
        for segment in segments:
            segment.pop("frames", None)
            keys = ("address", "size", "requested_size", "state")
            blocks = [{key: one[key] for key in keys} for one in segment["blocks"]]
            segment["blocks"] = [one | _hide_free_request(one) for one in blocks]
        return segments

    def check_round_trip(self) -> None:
        before = self.read_state()
        current = self.read_current()
        self.allocator.set_checkpoint(POOL, self.allocator.get_checkpoint(POOL))
        assert self.read_state() == before
        assert self.read_current() == current

    def read_current(self) -> dict[str, int]:
        figures = self.allocator.statistics.to_dict()
        return {key: one for key, one in figures.items() if key.endswith(".current")}


def _hide_free_request(block: dict) -> dict:
    return {"requested_size": 0} if block["state"] == "inactive" else {}


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    # In the end no block is live, and nothing is left of the pool.
    for block in [setup.allocator.find_block(one["address"]) for one in _list_live(setup)]:
        setup.free(block)
    setup.allocator.pools.end(POOL)
    setup.allocator.pools.release(POOL)
    setup.allocator.empty_cache()
    assert not setup.provider.segments
    assert not setup.events.live


def _list_live(setup: Setup) -> list[dict]:
    return [one for one in setup.list_blocks() if one["state"] == "active_allocated"]


def test_simple(setup: Setup) -> None:
    setup.allocate(8 * MIB, 1 * MIB)
    setup.check_round_trip()


@pytest.mark.parametrize("survivors", [(6,), (4,), (0,), (10,), ()])
def test_allocated_in_middle_of_segment(setup: Setup, survivors: tuple[int, ...]) -> None:
    blocks = setup.allocate(*[512] * 11)
    setup.free(*(one for index, one in enumerate(blocks) if index not in survivors))
    setup.check_round_trip()
    assert setup.count_live() == len(survivors)


@pytest.mark.parametrize("survivors", [(1, 3, 5), (0, 10), (2, 7)])
def test_multiple_middle_allocations(setup: Setup, survivors: tuple[int, ...]) -> None:
    blocks = setup.allocate(*[512] * 11)
    setup.free(*(one for index, one in enumerate(blocks) if index not in survivors))
    setup.check_round_trip()


@pytest.mark.parametrize("survivors", [(4, 5), (0, 1, 2), (8, 9, 10)])
def test_middle_allocations_contiguous(setup: Setup, survivors: tuple[int, ...]) -> None:
    blocks = setup.allocate(*[512] * 11)
    setup.free(*(one for index, one in enumerate(blocks) if index not in survivors))
    setup.check_round_trip()


def test_additional_free_following_checkpoint(setup: Setup) -> None:
    kept = setup.allocate(512, 2 * MIB)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    before = setup.read_state()
    later = setup.allocate(512, 512, 3 * MIB)
    restored = setup.allocator.set_checkpoint(POOL, checkpoint, stale=later)
    assert setup.read_state() == before
    assert restored.blocks == tuple(sorted(kept, key=lambda one: one.address))
    # What the later graph made owns nothing any more, so its end frees nothing.
    for block in later:
        setup.allocator.free_later(block)
    assert setup.read_state() == before
    # Not even if the same place is in use again.
    again = setup.allocate(512, 512)
    assert {one.address for one in again} & set(restored.freed_addresses)
    assert setup.count_live() == 4


def test_a_stale_block_may_be_dropped_before_and_after_its_place_is_used_again(
    setup: Setup,
) -> None:
    checkpoint = setup.allocator.get_checkpoint(POOL)
    stale = setup.allocate(20 * MIB)
    setup.allocator.set_checkpoint(POOL, checkpoint, stale=stale)
    again = setup.allocate(20 * MIB)
    assert again[0] is not stale[0]
    setup.free(*stale)
    assert setup.count_live() == 1
    # Once: a second time it is a mistake like any other.
    with pytest.raises(TracegraphError, match="not in use"):
        setup.free(*stale)


def test_tensor_dies_after_checkpoint(setup: Setup) -> None:
    blocks = setup.allocate(512, 2 * MIB)
    addresses = [one.address for one in blocks]
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.free(*blocks)
    assert setup.count_live() == 0
    restored = setup.allocator.set_checkpoint(POOL, checkpoint)
    assert restored.freed_addresses == ()
    assert [one.address for one in restored.blocks] == sorted(addresses)
    for left, address in zip((1, 0), addresses, strict=True):
        setup.free(setup.allocator.find_block(address))
        assert setup.count_live() == left


def test_assigning_back_deleter_fns_to_tensor(setup: Setup) -> None:
    outputs = setup.allocate(512, 512, 512)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.free(*outputs)
    restored = setup.allocator.set_checkpoint(POOL, checkpoint)
    assert setup.count_live() == 3
    handed_over, last = restored.blocks[:2], restored.blocks[2].address
    for left, block in zip((2, 1), handed_over, strict=True):
        setup.free(block)
        assert setup.count_live() == left
    # The third had an owner once. It let go long ago; now only its address frees it.
    setup.free(setup.allocator.find_block(last))
    assert setup.count_live() == 0


def test_resnet(setup: Setup) -> None:
    # The shape of it: many sizes, half of them freed in between, small and large.
    blocks = setup.allocate(*(700 * number**3 for number in range(1, 24)))
    setup.free(*blocks[::2])
    setup.check_round_trip()


def test_check_pool_live_allocations(setup: Setup) -> None:
    blocks = setup.allocate(512, 512, 2 * MIB)

    def read_live() -> set[int]:
        return {one["address"] for one in _list_live(setup)}

    assert read_live() == {one.address for one in blocks}
    setup.free(blocks[1])
    assert read_live() == {blocks[0].address, blocks[2].address}
    setup.free(blocks[0], blocks[2])
    assert read_live() == set()


def test_allocate_in_thread_to_pool() -> None:
    provider = BytesProvider(256 * MIB)
    allocator = CachingAllocator(provider)
    inside = threading.get_ident()
    allocator.pools.begin(POOL, lambda stream: threading.get_ident() == inside)
    mine = [allocator.allocate(nbytes) for nbytes in (512, 12 * MIB, 18 * MIB, 30 * MIB)]
    theirs: list[Block] = []
    thread = threading.Thread(target=lambda: theirs.append(allocator.allocate(30 * MIB)))
    thread.start()
    thread.join()
    assert len(allocator.snapshot(POOL)) == 4
    assert theirs[0].size_class is not mine[0].size_class
    allocator.pools.end(POOL)
    for block in mine:
        allocator.free(block)
    allocator.pools.release(POOL)
    allocator.empty_cache()
    assert allocator.snapshot(POOL) == []


# Beyond PyTorch's ---------------------------------------------------------------------------


def test_a_block_that_stays_live_is_the_same_object(setup: Setup) -> None:
    blocks = setup.allocate(512, 512, 512, 2 * MIB, 15 * MIB)
    setup.free(blocks[1])
    checkpoint = setup.allocator.get_checkpoint(POOL)
    later = setup.allocate(512, 3 * MIB)
    restored = setup.allocator.set_checkpoint(POOL, checkpoint)
    kept = [blocks[0], *blocks[2:]]
    assert all(one is two for one, two in zip(restored.blocks, kept, strict=True))
    assert [one.requested_bytes for one in kept] == [512, 512, 2 * MIB, 15 * MIB]
    setup.free(*kept)
    assert setup.count_live() == 0
    with pytest.raises(TracegraphError, match="not in use"):
        setup.free(later[0])


def test_a_stale_block_gets_no_place_even_where_one_becomes_live(setup: Setup) -> None:
    old = setup.allocate(512)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    restored = setup.allocator.set_checkpoint(POOL, checkpoint, stale=old)
    assert restored.blocks[0] is not old[0]
    assert restored.blocks[0].address == restored.freed_addresses[0]
    setup.free(*old)
    assert setup.count_live() == 1


def test_segments_of_later_stay_and_are_free(setup: Setup) -> None:
    setup.allocate(512)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.allocate(15 * MIB)
    setup.allocator.set_checkpoint(POOL, checkpoint)
    assert [one["total_size"] for one in setup.allocator.snapshot(POOL)] == [2 * MIB, 16 * MIB]
    assert setup.count_live() == 1


def test_arenas_come_back(setup: Setup) -> None:
    arena = setup.allocator.allocate_exact(3 * MIB, POOL)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.free(arena)
    restored = setup.allocator.set_checkpoint(POOL, checkpoint)
    assert [(one.address, one.nbytes) for one in restored.blocks] == [(arena.address, 3 * MIB)]


def test_what_another_stream_uses_is_waited_for(setup: Setup) -> None:
    blocks = setup.allocate(512, 512)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.allocator.record_stream(blocks[0], SIDE)
    setup.free(blocks[1])
    setup.allocator.set_checkpoint(POOL, checkpoint)
    assert len(setup.events.synchronized) == 1
    assert setup.count_live() == 2
    assert not setup.allocator.find_block(blocks[0].address).stream_uses


def test_a_freed_block_that_is_still_in_use_counts_as_free(setup: Setup) -> None:
    blocks = setup.allocate(512, 512)
    setup.allocator.record_stream(blocks[0], SIDE)
    setup.free(blocks[0])
    checkpoint = setup.allocator.get_checkpoint(POOL)
    assert [one.address for one in checkpoint.blocks] == [blocks[1].address]
    setup.allocator.set_checkpoint(POOL, checkpoint)
    assert setup.count_live() == 1


def test_uses_cannot_be_waited_for_during_a_capture(setup: Setup) -> None:
    blocks = setup.allocate(512)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.allocator.record_stream(blocks[0], SIDE)
    setup.allocator.pools.begin_capture(OTHER_POOL)
    before = setup.read_state()
    with pytest.raises(TracegraphError) as raised:
        setup.allocator.set_checkpoint(POOL, checkpoint)
    setup.allocator.pools.end_capture(OTHER_POOL)
    error_lines.match(
        raised.value,
        what="cannot restore a checkpoint of pool (1, 0) now",
        where="a capture is under way",
        why="during a capture no event tells",
        fix="restore the checkpoint before the capture begins",
    )
    assert setup.read_state() == before
    setup.allocator.set_checkpoint(POOL, checkpoint)


def test_a_segment_that_was_given_back_is_missed(setup: Setup) -> None:
    block = setup.allocator.allocate(512, STREAM)
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.free(block)
    setup.allocator.pools.end(POOL)
    setup.allocator.pools.release(POOL)
    setup.allocator.empty_cache()
    # Another segment at the same address is not the one that was meant.
    setup.allocator.pools.begin(POOL, lambda stream: stream == STREAM)
    again = setup.allocator.allocate(512, STREAM)
    assert again.address == block.address
    with pytest.raises(TracegraphError) as raised:
        setup.allocator.set_checkpoint(POOL, checkpoint)
    error_lines.match(
        raised.value,
        what="cannot restore the checkpoint of pool (1, 0)",
        where=f"pool (1, 0), blocks at {block.address:#x}",
        why="their segments have been released",
        fix="keep the pool in use",
    )
    assert setup.count_live() == 1


def test_a_checkpoint_is_of_one_pool(setup: Setup) -> None:
    checkpoint = setup.allocator.get_checkpoint(POOL)
    setup.allocator.pools.create_or_increment(OTHER_POOL)
    with pytest.raises(TracegraphError) as raised:
        setup.allocator.set_checkpoint(OTHER_POOL, checkpoint)
    setup.allocator.pools.release(OTHER_POOL)
    error_lines.match(
        raised.value,
        what="cannot restore the checkpoint of pool (1, 0)",
        where="pool (2, 0)",
        why="it is of another pool",
        fix="keep the pool in use",
    )


def test_only_live_blocks_can_become_stale(setup: Setup) -> None:
    checkpoint = setup.allocator.get_checkpoint(POOL)
    (freed,) = setup.allocate(512)
    setup.free(freed)
    elsewhere = setup.allocator.allocate(512)
    for block in (freed, elsewhere):
        with pytest.raises(TracegraphError) as raised:
            setup.allocator.set_checkpoint(POOL, checkpoint, stale=[block])
        error_lines.match(
            raised.value,
            what="cannot restore a checkpoint of pool (1, 0): stale blocks are not live",
            where=f"argument `stale`, blocks at {block.address:#x}",
            why="only what is live in the pool",
            fix="pass blocks of this pool",
        )
    setup.free(elsewhere)


@pytest.mark.parametrize("call", ["get_checkpoint", "set_checkpoint"])
def test_a_pool_without_users_has_no_checkpoints(setup: Setup, call: str) -> None:
    setup.allocator.pools.create_or_increment(OTHER_POOL)
    setup.allocator.pools.release(OTHER_POOL)
    arguments = [setup.allocator.get_checkpoint(POOL)] if call == "set_checkpoint" else []
    with pytest.raises(TracegraphError, match="cannot use the pool"):
        getattr(setup.allocator, call)(OTHER_POOL, *arguments)


def test_segments_that_have_grown_since_come_back() -> None:
    config = AllocatorConfig(expandable_segments=True)
    allocator = CachingAllocator(VirtualBytesProvider(256 * MIB), config=config)
    allocator.pools.begin(POOL, lambda stream: stream == STREAM)
    blocks = [allocator.allocate(nbytes, STREAM) for nbytes in (512, 512, 3 * MIB, 30 * MIB)]
    checkpoint = allocator.get_checkpoint(POOL)
    for nbytes in (512, 50 * MIB):
        allocator.allocate(nbytes, STREAM)
    reserved_bytes = allocator.statistics.all.reserved_bytes.current
    restored = allocator.set_checkpoint(POOL, checkpoint)
    assert all(one is two for one, two in zip(restored.blocks, blocks, strict=True))
    # What has grown stays mapped, and is free.
    assert allocator.statistics.all.reserved_bytes.current == reserved_bytes
    assert allocator.statistics.all.allocated_bytes.current == 33 * MIB + 1024
    for block in blocks:
        allocator.free(block)
    again = allocator.set_checkpoint(POOL, checkpoint).blocks
    assert [one.address for one in again] == [state.address for state in checkpoint.blocks]


def test_no_split_pools_come_back() -> None:
    allocator = CachingAllocator(BytesProvider(256 * MIB), config=AllocatorConfig())
    allocator.pools.create_or_increment(POOL, no_split=True)
    allocator.pools.begin(POOL, lambda stream: stream == STREAM)
    blocks = [allocator.allocate(nbytes, STREAM) for nbytes in (512, 600, 2 * MIB)]
    checkpoint = allocator.get_checkpoint(POOL)
    for block in blocks:
        allocator.free(block)
    restored = allocator.set_checkpoint(POOL, checkpoint)
    assert [one.nbytes for one in restored.blocks] == [2 * MIB, 2 * MIB, 20 * MIB]
    assert [one.requested_bytes for one in restored.blocks] == [512, 600, 2 * MIB]
