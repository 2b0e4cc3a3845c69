"""The memory of a captured graph over its life: the figures of PyTorch's own test."""

from __future__ import annotations

import pytest

from tests.fakes.scripted_provider import ScriptedProvider
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.sizes import MIB

SIDE_STREAM = 3
GENERATOR_BYTES = 8


class Capture:
    """What `torch.cuda.graph` does to the allocator while ``b = a.clone()`` and then five times
    ``b = b.clone() + 1`` are captured. Seed and offset of the generator live as long as the graph.
    """

    def __init__(self, allocator: CachingAllocator, nbytes: int) -> None:
        self.allocator = allocator
        self.pool_id: PoolId = new_pool_id()
        allocator.pools.begin(self.pool_id, lambda stream: stream == SIDE_STREAM)
        allocator.pools.begin_capture(self.pool_id)
        self.generator = [allocator.allocate(GENERATOR_BYTES, SIDE_STREAM) for _ in range(2)]
        self.output = self._run(nbytes)
        allocator.pools.end_capture(self.pool_id)
        allocator.pools.end(self.pool_id)

    def _run(self, nbytes: int) -> Block:
        output = self.allocator.allocate(nbytes, SIDE_STREAM)
        for _ in range(5):
            clone = self.allocator.allocate(nbytes, SIDE_STREAM)
            result = self.allocator.allocate(nbytes, SIDE_STREAM)
            self.allocator.free(clone)
            self.allocator.free(output)
            output = result
        return output

    def delete(self) -> None:
        for block in self.generator:
            self.allocator.free(block)
        self.allocator.pools.release(self.pool_id)


def _read(allocator: CachingAllocator, nbytes: int) -> dict[str, int]:
    """Figures of the pool that blocks of this size come from, as the test of torch reads them."""
    pool = "small_pool" if nbytes <= MIB else "large_pool"
    figures = allocator.statistics.to_dict()
    names = ("segment", "reserved_bytes", "active", "active_bytes")
    return {name: figures[f"{name}.{pool}.current"] for name in names}


def _subtract(after: dict[str, int], before: dict[str, int]) -> tuple[int, ...]:
    return tuple(after[name] - before[name] for name in after)


@pytest.mark.parametrize(
    ("nbytes", "during", "after"),
    [
        (512, (1, 2 * MIB, 3, 512 + 1024), (1, 2 * MIB, 1, 512)),
        (MIB, (2, 4 * MIB, 3, MIB + 1024), (1, 2 * MIB, 1, MIB)),
        (MIB + 512, (1, 20 * MIB, 1, MIB + 512), (1, 20 * MIB, 1, MIB + 512)),
        (10 * MIB - 512, (2, 40 * MIB, 1, 10 * MIB - 512), (1, 20 * MIB, 1, 10 * MIB - 512)),
        (10 * MIB + 512, (3, 36 * MIB, 1, 10 * MIB + 512), (1, 12 * MIB, 1, 10 * MIB + 512)),
    ],
    ids=["512", "1MiB", "1MiB+512", "10MiB-512", "10MiB+512"],
)
def test_memory_life_cycle_of_a_graph(
    nbytes: int, during: tuple[int, ...], after: tuple[int, ...]
) -> None:
    allocator = CachingAllocator(ScriptedProvider())
    given = allocator.allocate(nbytes)
    before = _read(allocator, nbytes)

    capture = Capture(allocator, nbytes)
    assert _subtract(_read(allocator, nbytes), before) == during
    allocator.empty_cache()
    assert _subtract(_read(allocator, nbytes), before) == during

    capture.delete()
    allocator.empty_cache()
    assert _subtract(_read(allocator, nbytes), before) == after
    assert allocator.pools.use_count(capture.pool_id) == 0

    allocator.free(capture.output)
    allocator.empty_cache()
    assert _subtract(_read(allocator, nbytes), before) == (0, 0, 0, 0)
    allocator.free(given)


def test_nothing_is_left_behind() -> None:
    provider = ScriptedProvider()
    allocator = CachingAllocator(provider)
    for nbytes in (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB + 512):
        capture = Capture(allocator, nbytes)
        allocator.free(capture.output)
        capture.delete()
    allocator.empty_cache()
    assert provider.reserved_bytes == 0
    assert provider.allocation_count == provider.free_count > 0
    assert not any("private" in key for key in allocator.statistics.to_dict())


def test_two_graphs_share_a_pool_until_both_are_gone() -> None:
    provider = ScriptedProvider()
    allocator = CachingAllocator(provider)
    pool_id = new_pool_id()
    blocks = []
    for _ in range(2):
        allocator.pools.begin(pool_id, lambda stream: True)
        blocks.append(allocator.allocate(MIB))
        allocator.pools.end(pool_id)
    assert allocator.pools.use_count(pool_id) == 2
    assert provider.allocation_count == 1
    for block in blocks:
        allocator.free(block)
    allocator.pools.release(pool_id)
    allocator.empty_cache()
    assert provider.reserved_bytes == 2 * MIB
    allocator.pools.release(pool_id)
    allocator.empty_cache()
    assert provider.reserved_bytes == 0
