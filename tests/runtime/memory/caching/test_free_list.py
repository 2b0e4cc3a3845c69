"""Free blocks are found by stream, then size, then address."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from tracegraph.runtime.memory.caching.free_list import FreeList


def _make(nbytes: int, address: int = 0, stream: int = 0) -> SimpleNamespace:
    return SimpleNamespace(stream=stream, nbytes=nbytes, address=address)


def _fill(*blocks: SimpleNamespace) -> FreeList:
    free: FreeList = FreeList()
    for block in blocks:
        free.add(block)
    return free


def test_the_smallest_that_fits_is_found() -> None:
    small, middle, large = _make(512, 1), _make(1024, 2), _make(4096, 3)
    free = _fill(large, small, middle)
    assert free.find(512, 0) is small
    assert free.find(513, 0) is middle
    assert free.find(4096, 0) is large
    assert free.find(4097, 0) is None


def test_of_equal_sizes_the_lowest_address_is_found() -> None:
    high, low = _make(512, 900), _make(512, 100)
    assert _fill(high, low).find(1, 0) is low
    assert _fill(low, high).find(1, 0) is low


def test_blocks_of_other_streams_are_not_found() -> None:
    mine, other = _make(4096, 1, stream=1), _make(512, 2, stream=2)
    free = _fill(mine, other)
    assert free.find(512, 1) is mine
    assert free.find(512, 3) is None


def test_order_is_stream_size_address() -> None:
    blocks = [_make(n, a, s) for s in (2, 0) for n in (1024, 512) for a in (30, 20)]
    keys = [(block.stream, block.nbytes, block.address) for block in _fill(*blocks)]
    assert keys == sorted(keys)
    assert len(keys) == 8


def test_take_refuses_what_is_too_large() -> None:
    block = _make(4096)
    free = _fill(block)
    assert free.take(512, 0, below_bytes=4096) is None
    assert free.take(512, 1, below_bytes=9999) is None
    assert block in free
    assert free.take(512, 0, below_bytes=4097) is block
    assert block not in free
    assert len(free) == 0


def test_removing_what_is_not_there_is_an_error() -> None:
    free = _fill(_make(512, 1))
    with pytest.raises(KeyError, match="not in the free list"):
        free.remove(_make(512, 1))
    with pytest.raises(KeyError):
        free.remove(_make(512, 2, stream=7))


def test_bytes_and_tail() -> None:
    blocks = [_make(512 * n, n) for n in range(1, 6)]
    free = _fill(*blocks)
    assert free.nbytes == 512 * 15
    assert free.list_from(1500, 0) == blocks[2:]
    assert free.list_from(1, stream=4) == []


def test_random_operations_agree_with_a_sorted_list() -> None:
    random_source = random.Random(0)
    free: FreeList = FreeList()
    model: list[SimpleNamespace] = []
    for address in range(2000):
        block = _make(512 * random_source.randint(1, 20), address, random_source.randint(0, 2))
        free.add(block)
        model.append(block)
        nbytes, stream = 512 * random_source.randint(1, 21), random_source.randint(0, 2)
        fitting = [b for b in model if b.stream == stream and b.nbytes >= nbytes]
        wanted = min(fitting, key=lambda b: (b.nbytes, b.address), default=None)
        assert free.find(nbytes, stream) is wanted
        if wanted is not None and random_source.random() < 0.9:
            free.remove(wanted)
            model.remove(wanted)
    assert len(free) == len(model)
