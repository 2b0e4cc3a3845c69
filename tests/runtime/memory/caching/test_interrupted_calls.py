"""An interrupt at each point of each call: the allocator stays whole, and no memory is lost."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.bytes_provider import BytesProvider, ManualEvents
from tests.fakes.virtual_bytes_provider import VirtualBytesProvider
from tests.fuzz.stepping import step_through
from tests.oracles.allocator_invariants import check_allocator
from tracegraph.runtime.memory.caching import block_store
from tracegraph.runtime.memory.caching import repair as repair_module
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.caching.used_blocks import UsedBlocks
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId

MIB = 1 << 20
FOLDER = pathlib.Path(block_store.__file__).parents[1]
POOL = PoolId(7)
OTHER_STREAM = 3


class Subject:
    """An allocator with blocks of several kinds in it.

    Args:
        kind: of the allocator.
    """

    def __init__(self, kind: str) -> None:
        config = AllocatorConfig()
        self.provider: Any = BytesProvider(256 * MIB)
        if kind == "expandable":
            self.provider = VirtualBytesProvider(256 * MIB)
            config = parse_alloc_conf("expandable_segments:True")
        self.events = ManualEvents()
        make: Any = DirectAllocator if kind == "direct" else CachingAllocator
        counts = {"counts": True} if kind == "direct" else {}
        self.allocator: Any = make(self.provider, config=config, events=self.events, **counts)
        self.allocator.history.record(context=None)
        self.allocator.pools.create_or_increment(POOL)
        sizes = (1000, 600, 3 * MIB, 2000, 5 * MIB)
        self.restores = False
        self.blocks = [self.allocator.allocate(nbytes) for nbytes in sizes]
        self.blocks.append(self.allocator.allocate_exact(4000, POOL))
        self.allocator.free(self.blocks.pop(1))
        self.waiting = self.blocks.pop(1)
        self.allocator.record_stream(self.waiting, OTHER_STREAM)

    def allocate_small(self) -> None:
        self.blocks.append(self.allocator.allocate(600))

    def allocate_large(self) -> None:
        self.blocks.append(self.allocator.allocate(40 * MIB))

    def allocate_arena(self) -> None:
        self.blocks.append(self.allocator.allocate_exact(3000, POOL))

    def free(self) -> None:
        self.allocator.free(self.blocks[1])

    def free_arena(self) -> None:
        self.allocator.free(self.blocks[-1])

    def free_used(self) -> None:
        self.allocator.free(self.waiting)
        self.finish_work()
        self.blocks.append(self.allocator.allocate(700))

    def free_from_finalisers(self) -> None:
        with self.allocator.lock:
            for block in self.blocks[1:3]:
                self.allocator.free_later(block)
            self.allocator.release_pool_later(POOL)
        self.blocks.append(self.allocator.allocate(700))

    def finish_work(self) -> None:
        """Lets all that was put on the other stream be over."""
        self.events.finish(OTHER_STREAM, self.events.recorded.get(OTHER_STREAM, 0))

    def empty_cache(self) -> None:
        self.allocator.free(self.blocks[2])
        self.allocator.empty_cache()

    def repair(self) -> None:
        self.allocator.free_later(self.blocks[1])
        self.allocator._used.note_interrupt(KeyboardInterrupt())
        self.allocate_small()

    def change_checkpoint(self) -> None:
        self.restores = True
        checkpoint = self.allocator.get_checkpoint(POOL)
        self.allocator.free(self.blocks[-1])
        self.allocator.set_checkpoint(POOL, checkpoint)

    def close(self) -> None:
        """Uses the allocator further and frees everything; nothing may be left."""
        allocator = self.allocator
        before = [self.allocator.allocate(nbytes) for nbytes in (600, 700, 2 * MIB, 9 * MIB)]
        check_allocator(allocator, self.provider.segments.values())
        # What was freed, or lost its owner, is found by the state of the block.
        for block in dict.fromkeys((*self.blocks, self.waiting, *before)):
            if block.is_allocated:
                allocator.free(block)
        self.finish_work()
        # After an interrupt that came behind the last step of a restored checkpoint.
        for block in allocator._used.list_live(POOL):
            if self.restores:
                allocator.free(block)
        pool = allocator._store.private.get(POOL)
        if pool is not None and pool.use_count:
            allocator.release_pool_later(POOL)
        check_allocator(allocator, self.provider.segments.values())
        allocator.empty_cache()
        check_allocator(allocator, self.provider.segments.values())
        assert not allocator._store.active
        assert not allocator._store.segments
        assert not allocator._store.private
        assert not self.provider.segments
        assert not self.provider.available_bytes() - self.provider.total_bytes()


ACTIONS = [
    Subject.allocate_small,
    Subject.allocate_large,
    Subject.allocate_arena,
    Subject.free,
    Subject.free_arena,
    Subject.free_used,
    Subject.free_from_finalisers,
    Subject.empty_cache,
    Subject.repair,
    Subject.change_checkpoint,
]


def interrupt_everywhere(kind: str, action: Callable[[Subject], None]) -> int:
    """Interrupts an action at each point; returns how many there were."""
    subject: Any = None

    def make() -> Callable[[], None]:
        nonlocal subject
        subject = Subject(kind)
        return lambda: action(subject)

    count = 0
    # A repair looks at every block, and has some thousand points.
    stride = 17 if action is Subject.repair else 1
    for stepper in step_through(FOLDER, make, stride):
        count += 1
        assert subject is not None
        try:
            assert not subject.allocator.lock._is_owned(), "the lock is held"
            check_allocator(subject.allocator, subject.provider.segments.values())
            subject.close()
        except Exception as error:
            raise AssertionError(f"after an interrupt at {stepper.place}") from error
    return count


@pytest.mark.parametrize("kind", ["caching", "expandable"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_an_interrupt_at_any_point_leaves_the_allocator_whole(
    kind: str, action: Callable[[Subject], None]
) -> None:
    assert interrupt_everywhere(kind, action) > 10


@pytest.mark.parametrize("action", ACTIONS[:-1], ids=lambda action: action.__name__)
def test_an_interrupt_at_any_point_leaves_the_direct_allocator_whole(
    action: Callable[[Subject], None],
) -> None:
    assert interrupt_everywhere("direct", action) > 10


# Planted faults: each must be found -----------------------------------------------------------


def plant_no_repair(patch: pytest.MonkeyPatch) -> Callable[[Subject], None]:
    """Interrupts are not noted."""
    patch.setattr(UsedBlocks, "note_interrupt", lambda self, error: None)
    return Subject.allocate_small


def plant_kept_block(patch: pytest.MonkeyPatch) -> Callable[[Subject], None]:
    """A block that is allocated and not returned stays so."""
    patch.setattr(UsedBlocks, "free_unreturned", lambda self, block: None)
    return Subject.allocate_small


def plant_no_uses(patch: pytest.MonkeyPatch) -> Callable[[Subject], None]:
    """What waits for streams is not set right."""
    patch.setattr(StreamUses, "settle", lambda self, blocks: None)
    return Subject.free_used


def plant_no_recount(patch: pytest.MonkeyPatch) -> Callable[[Subject], None]:
    """Statistics stay as the interrupt left them."""
    patch.setattr(repair_module, "_recount", lambda store, free: None)
    return Subject.allocate_large


@pytest.mark.parametrize(
    "plant",
    [plant_no_repair, plant_kept_block, plant_no_uses, plant_no_recount],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], Callable[[Subject], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    action = plant(monkeypatch)
    with pytest.raises(AssertionError, match="after an interrupt at"):
        interrupt_everywhere("caching", action)
