"""An interrupt at each point of each call: the host allocator stays whole, no block is lost."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.stepping import step_through
from tests.runtime.memory.pinned.test_host_allocator import FakeEvents, FakePages
from tracegraph.runtime.memory.pinned import host_allocator
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pool_id import PoolId

FOLDER = pathlib.Path(host_allocator.__file__).parents[1]
POOL = PoolId(9)
CAPTURED, OTHER = 7, 8


class Subject:
    """A host allocator with blocks in use, free, waiting for copies, and read by a graph."""

    def __init__(self) -> None:
        self.pages, self.events = FakePages(), FakeEvents()
        self.allocator = CachingHostAllocator(self.pages, events=self.events)
        self.blocks = [self.allocator.allocate(nbytes) for nbytes in (5000, 5000, 9000, 70_000)]
        self.allocator.free(self.blocks.pop())
        self.allocator.record_event(self.blocks[2], OTHER)
        self.allocator.begin_allocate_to_pool(POOL, CAPTURED.__eq__)
        self.blocks.append(self.allocator.allocate(3000, CAPTURED))
        self.allocator.record_event(self.blocks[1], CAPTURED)
        self.allocator.end_allocate_to_pool(POOL)
        self.is_released = False

    def allocate_cached(self) -> None:
        self.blocks.append(self.allocator.allocate(70_000))

    def allocate_new(self) -> None:
        self.blocks.append(self.allocator.allocate(300_000))

    def free(self) -> None:
        self.allocator.free(self.blocks[0])

    def free_read_blocks(self) -> None:
        self.allocator.free(self.blocks[1])
        self.allocator.free(self.blocks[2])
        self.events.finish()
        self.allocator.poll()

    def free_from_finalisers(self) -> None:
        for block in self.blocks[:2]:
            self.allocator.free_later(block)
        self.allocator.poll()

    def record(self) -> None:
        self.allocator.record_event(self.blocks[2], OTHER)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def release_pool(self) -> None:
        self.allocator.free(self.blocks[1])
        self.is_released = True
        self.allocator.release_pool(POOL)

    def check(self) -> None:
        """Raises AssertionError where the records contradict each other."""
        allocator = self.allocator
        allocator.poll()
        blocks = list(allocator._map.blocks.values())
        assert allocator._map._addresses == sorted(allocator._map.blocks)
        pools = (allocator._pools.common, *allocator._pools._private.values())
        free = [block for pool in pools for same in pool._free.values() for block in same]
        assert len(free) == len(set(free)), "a block is free twice"
        waiting = {block for queue in allocator._pending._queues.values() for _, block in queue}
        for block in blocks:
            read = bool(block.captured_by) or block in waiting
            assert (block in free) == (not block.is_allocated and not read), block
            assert block.pool in pools
        assert set(free) <= set(blocks)
        figures = allocator.statistics
        in_use = [block for block in blocks if block not in free]
        assert figures.allocations.current == len(blocks)
        assert figures.allocated_bytes.current == sum(block.nbytes for block in blocks)
        assert figures.active_requests.current == len(in_use)
        assert figures.active_bytes.current == sum(block.nbytes for block in in_use)
        assert {block.segment for block in blocks} == set(self.pages.live)

    def close(self) -> None:
        """Uses the allocator further and frees everything; nothing may be left."""
        self.blocks += [self.allocator.allocate(nbytes) for nbytes in (5000, 70_000)]
        self.check()
        for block in self.blocks:
            if block.is_allocated:
                self.allocator.free(block)
        self.events.finish()
        if POOL in self.allocator._pools._private:
            self.allocator.release_pool(POOL)
        self.allocator.poll()
        self.check()
        self.allocator.empty_cache()
        assert not self.allocator._map.blocks
        assert not self.pages.live


ACTIONS = [
    Subject.allocate_cached,
    Subject.allocate_new,
    Subject.free,
    Subject.free_read_blocks,
    Subject.free_from_finalisers,
    Subject.record,
    Subject.empty_cache,
    Subject.release_pool,
]


def interrupt_everywhere(action: Callable[[Subject], None]) -> int:
    """Interrupts an action at each point; returns how many there were."""
    subject: Any = None

    def make() -> Callable[[], None]:
        nonlocal subject
        subject = Subject()
        return lambda: action(subject)

    count = 0
    for stepper in step_through(FOLDER, make):
        count += 1
        assert subject is not None
        try:
            assert not subject.allocator._lock.locked(), "the lock is held"
            subject.check()
            subject.close()
        except Exception as error:
            raise AssertionError(f"after an interrupt at {stepper.place}") from error
    return count


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_an_interrupt_at_any_point_leaves_the_host_allocator_whole(
    action: Callable[[Subject], None],
) -> None:
    assert interrupt_everywhere(action) > 2


def test_a_missing_repair_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_allocator, "repair", lambda *parts: None)
    with pytest.raises(AssertionError, match="after an interrupt at"):
        interrupt_everywhere(Subject.free)
