"""Arena: one block of a pool, freed when the last holder is gone, in whatever order."""

from __future__ import annotations

import gc
import itertools
import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.stepping import Stepper, step_through
from tracegraph.runtime import arena as arena_module
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.used_blocks import UsedBlocks
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.host import HostProvider


def make_pool(**options: Any) -> PrivatePool:
    return PrivatePool(new_pool_id(), CachingAllocator(HostProvider(**options)))


def test_an_arena_is_a_block_of_its_pool():
    pool = make_pool()
    arena = Arena(pool, ArenaSize(5000))
    assert arena.block.nbytes == pool.allocated_bytes >= 5000
    assert arena.ranges == ((arena.block.address, 5000),)
    assert arena.locate(0) == arena.block.address
    assert arena.locate(0) % 256 == 0


def test_an_empty_arena_has_an_address():
    arena = Arena(make_pool(), ArenaSize(0))
    assert arena.locate(0) > 0
    assert arena.ranges == ()


def test_two_arenas_of_a_pool_do_not_overlap():
    pool = make_pool()
    arenas = (Arena(pool, ArenaSize(3000)), Arena(pool, ArenaSize(3000)))
    first, second = sorted(arenas, key=lambda each: each.locate(0))
    assert first.locate(0) + 3000 <= second.locate(0)


def test_the_block_goes_back_with_the_arena_and_serves_the_next():
    pool = make_pool()
    arena = Arena(pool, ArenaSize(5000))
    address = arena.locate(0)
    del arena
    gc.collect()
    assert pool.allocated_bytes == 0
    assert Arena(pool, ArenaSize(4000)).locate(0) == address


def test_a_holder_keeps_the_block():
    pool = make_pool()
    holders = [Arena(pool, ArenaSize(5000))]
    holders.append(holders[0])
    del holders[0]
    gc.collect()
    assert pool.allocated_bytes > 0
    del holders[0]
    gc.collect()
    assert pool.allocated_bytes == 0


def test_an_arena_keeps_its_pool():
    pool = make_pool()
    arena, gone = Arena(pool, ArenaSize(5000)), weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is not None
    del arena
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_dropping_frees_everything(order: tuple[int, ...]):
    provider = HostProvider()
    pool = PrivatePool(new_pool_id(), CachingAllocator(provider))
    held: dict[int, Any] = {
        0: pool,
        1: Arena(pool, ArenaSize(5000)),
        2: Arena(pool, ArenaSize(50_000)),
    }
    del pool
    for index in order:
        assert provider.reserved_bytes > 0
        del held[index]
        gc.collect()
    assert provider.reserved_bytes == 0


def test_an_arena_that_does_not_fit_leaves_the_pool_as_it_was():
    pool = make_pool(limit_bytes=10_000)
    kept = Arena(pool, ArenaSize(5000))
    before = pool.allocated_bytes
    with pytest.raises(OutOfMemoryError):
        Arena(pool, ArenaSize(1 << 20))
    assert pool.allocated_bytes == before == kept.block.nbytes


def test_scratch_stands_behind_what_is_kept():
    arena = Arena(make_pool(), ArenaSize(512, 1024))
    (kept, kept_bytes), (scratch, scratch_bytes) = arena.ranges
    assert (kept_bytes, scratch_bytes) == (512, 1024)
    assert arena.locate(511) == kept + 511
    assert arena.locate(512) == scratch
    assert arena.locate(1535) == scratch + 1023
    assert arena.find_block(512).address == scratch
    assert not kept < scratch + scratch_bytes <= kept + kept_bytes


def test_arenas_of_a_pool_share_scratch_and_lock_but_nothing_that_is_kept():
    pool = make_pool()
    large, small = Arena(pool, ArenaSize(512, 4096)), Arena(pool, ArenaSize(512, 1024))
    assert large.locate(512) == small.locate(512)
    assert large.lock is small.lock is pool.replay_lock
    assert large.locate(0) != small.locate(0)
    assert pool.allocated_bytes == 512 + 4096 + 512
    larger = Arena(pool, ArenaSize(512, 8192))
    assert larger.locate(512) != large.locate(512)
    assert Arena(pool, ArenaSize(512, 4000)).locate(512) == large.locate(512)


def test_an_arena_that_does_not_share_has_scratch_and_a_lock_of_its_own():
    pool = make_pool()
    shared, apart = (
        Arena(pool, ArenaSize(512, 1024)),
        Arena(pool, ArenaSize(512, 1024), shares_scratch=False),
    )
    assert shared.locate(512) != apart.locate(512)
    assert shared.lock is not apart.lock
    del shared, apart
    gc.collect()
    assert pool.allocated_bytes == 0


def test_an_arena_without_scratch_has_a_lock_of_its_own():
    pool = make_pool()
    assert Arena(pool, ArenaSize(512)).lock is not Arena(pool, ArenaSize(512)).lock


def test_scratch_lives_as_long_as_one_of_its_users():
    pool = make_pool()
    first, second = Arena(pool, ArenaSize(512, 1024)), Arena(pool, ArenaSize(512, 1024))
    del first
    gc.collect()
    assert pool.allocated_bytes == 512 + 1024
    del second
    gc.collect()
    assert pool.allocated_bytes == 0


def test_pools_do_not_share():
    first, second = Arena(make_pool(), ArenaSize(0, 1024)), Arena(make_pool(), ArenaSize(0, 1024))
    assert first.locate(0) != second.locate(0)
    assert first.lock is not second.lock


@pytest.mark.parametrize("shares_scratch", [False, True])
def test_an_interrupt_at_any_point_leaves_no_memory_behind(shares_scratch: bool):
    allocator = CachingAllocator(HostProvider())
    size = ArenaSize(2000, 3000)

    # Else finalisers would be interrupted, too, which loses what they do.
    kept: list[Any] = []

    def make() -> None:
        kept.append(PrivatePool(new_pool_id(), allocator))
        kept.append(Arena(kept[0], size, shares_scratch=shares_scratch))
        kept[1].allocate_beside(500)

    def prepare() -> Callable[[], None]:
        kept.clear()
        return make

    count = 0
    for stepper in step_through(pathlib.Path(arena_module.__file__).parent, prepare):
        count += 1
        kept.clear()
        total = allocator.statistics.all
        found = total.allocated_bytes.current, total.reserved_bytes.current
        assert found == (0, 0), stepper.place
    assert count > 50


def drop_interrupted(point: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, int, int]:
    """Drops an arena with an interrupt at a point of its finalisers; returns what is left."""
    allocator = CachingAllocator(HostProvider())
    held = [Arena(PrivatePool(new_pool_id(), allocator), ArenaSize(3000, 2000))]
    # Also those of Python's own library, as the finalisers of `weakref` are.
    stepper = Stepper(pathlib.Path("/"), point)
    with monkeypatch.context() as context:
        # Python shows an error in a finaliser, and goes on.
        context.setattr(sys, "unraisablehook", lambda found: None)
        stepper.run(held.clear)
    left = allocator.statistics.all
    return stepper.place, left.reserved_bytes.current, len(allocator._store.private)


def test_an_interrupt_in_a_finaliser_loses_no_memory(monkeypatch: pytest.MonkeyPatch):
    places = []
    while not places or places[-1] is not None:
        place, reserved_bytes, pools = drop_interrupted(len(places), monkeypatch)
        assert (reserved_bytes, pools) == (0, 0), place
        places.append(place)
    assert len(places) > 20


def test_a_finaliser_in_python_loses_memory(monkeypatch: pytest.MonkeyPatch):
    def give_back_with(self: Any, owner: object, items: list[Any], kept: object) -> None:
        weakref.finalize(owner, lambda: self.noted.extend(items)).atexit = False

    monkeypatch.setattr(UsedBlocks, "give_back_with", give_back_with)
    assert any(drop_interrupted(point, monkeypatch)[1] for point in range(4))
