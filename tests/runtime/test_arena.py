"""Arena: one block of a pool, given back when the last holder is gone, in whatever order."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.private_pool import PrivatePool, new_pool_id
from tracegraph.runtime.memory.providers.host import HostProvider


def make_pool(**options: Any) -> PrivatePool:
    return PrivatePool(new_pool_id(), HostProvider(**options))


def test_an_arena_is_a_block_of_its_pool():
    pool = make_pool()
    arena = Arena(pool, 5000)
    assert arena.nbytes >= 5000
    assert arena.nbytes == pool.allocated_bytes
    assert arena.address == arena.block.address
    assert arena.address % 256 == 0


def test_an_empty_arena_has_an_address():
    arena = Arena(make_pool(), 0)
    assert arena.address > 0
    assert arena.nbytes > 0


def test_two_arenas_of_a_pool_do_not_overlap():
    pool = make_pool()
    first, second = sorted((Arena(pool, 3000), Arena(pool, 3000)), key=lambda each: each.address)
    assert first.address + first.nbytes <= second.address


def test_the_block_goes_back_with_the_arena_and_serves_the_next():
    pool = make_pool()
    arena = Arena(pool, 5000)
    address = arena.address
    del arena
    gc.collect()
    assert pool.allocated_bytes == 0
    assert Arena(pool, 4000).address == address


def test_a_holder_keeps_the_block():
    pool = make_pool()
    holders = [Arena(pool, 5000)]
    holders.append(holders[0])
    del holders[0]
    gc.collect()
    assert pool.allocated_bytes > 0
    del holders[0]
    gc.collect()
    assert pool.allocated_bytes == 0


def test_an_arena_keeps_its_pool():
    pool = make_pool()
    arena, gone = Arena(pool, 5000), weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is not None
    del arena
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_dropping_frees_everything(order: tuple[int, ...]):
    provider = HostProvider()
    pool = PrivatePool(new_pool_id(), provider)
    held: dict[int, Any] = {0: pool, 1: Arena(pool, 5000), 2: Arena(pool, 50_000)}
    del pool
    for index in order:
        assert provider.reserved_bytes > 0
        del held[index]
        gc.collect()
    assert provider.reserved_bytes == 0


def test_an_arena_dropped_after_its_pool_was_closed_does_nothing():
    pool = make_pool()
    arena = Arena(pool, 5000)
    pool.close()
    del arena
    gc.collect()
    assert pool.reserved_bytes == 0


def test_an_arena_that_does_not_fit_leaves_the_pool_as_it_was():
    pool = make_pool(limit_bytes=10_000)
    kept = Arena(pool, 5000)
    before = pool.allocated_bytes
    with pytest.raises(OutOfMemoryError):
        Arena(pool, 1 << 20)
    assert pool.allocated_bytes == before == kept.nbytes
