"""Both allocators are what the protocol says, and go with all of their memory when dropped."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.bytes_provider import ManualEvents
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pinned.host_pages import PlainPages
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider

MIB = 1 << 20
SIDE = 7


def make_expandable(provider: HostProvider, **options: Any) -> CachingAllocator:
    return CachingAllocator(provider, config=AllocatorConfig(expandable_segments=True), **options)


MAKERS: dict[str, Callable[..., Allocator]] = {
    "caching": CachingAllocator,
    "expandable": make_expandable,
    "direct": DirectAllocator,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Allocator]:
    return MAKERS[request.param]


@pytest.fixture
def provider() -> HostProvider:
    return HostVirtualProvider(limit_bytes=256 * MIB)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory that only the garbage collector could find stays in use."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", [CachingAllocator, DirectAllocator])
def test_an_allocator_has_the_members_of_the_protocol(kind: type) -> None:
    made = kind(HostProvider())
    members = {name for name in vars(Allocator) if not name.startswith("_")}
    members |= set(Allocator.__annotations__)
    assert {"allocate", "statistics", "lock", "pools"} <= members
    for name in sorted(members):
        assert hasattr(made, name), name
        if inspect.isfunction(vars(Allocator).get(name)):
            own = inspect.signature(getattr(kind, name))
            wanted = inspect.signature(getattr(Allocator, name)).parameters
            assert list(own.parameters)[: len(wanted)] == list(wanted), name


def test_neither_allocator_is_a_kind_of_the_other() -> None:
    assert CachingAllocator.__bases__ == DirectAllocator.__bases__ == (object,)


@pytest.mark.usefixtures("no_collector")
class TestWithoutTheCollector:
    def test_an_allocator_goes_with_its_cache(
        self, make: Callable[..., Allocator], provider: HostProvider
    ) -> None:
        allocator = make(provider, events=ManualEvents())
        pool_id = new_pool_id()
        allocator.pools.create_or_increment(pool_id)
        # Split and whole, small, large and exact; in use, cached, or waiting for another stream.
        blocks = [allocator.allocate(nbytes) for nbytes in (100, 1000, 5000, 3 * MIB, 30 * MIB)]
        blocks += [allocator.allocate_exact(5 * MIB, pool_id) for _ in range(2)]
        allocator.record_stream(blocks[1], SIDE)
        freed = blocks[1::2]
        while freed:
            allocator.free(freed.pop())
        gone = weakref.ref(allocator)
        assert provider.reserved_bytes > 0
        del allocator, blocks
        assert gone() is None
        assert provider.reserved_bytes == 0

    def test_a_block_in_use_keeps_its_own_segment_only(
        self, make: Callable[..., Allocator], provider: HostProvider
    ) -> None:
        allocator = make(provider)
        kept = allocator.allocate(100)
        allocator.free(allocator.allocate(64 * MIB))
        del allocator
        assert 0 < provider.reserved_bytes < 64 * MIB
        del kept
        assert provider.reserved_bytes == 0

    def test_a_private_pool_goes_with_its_free_memory(
        self, make: Callable[..., Allocator], provider: HostProvider
    ) -> None:
        allocator = make(provider)
        pool = PrivatePool(new_pool_id(), allocator)
        pool.free_later(pool.allocate(5 * MIB))
        state = weakref.ref(allocator.pools.find(pool.pool_id))
        gone = weakref.ref(pool)
        del pool
        assert (gone(), state()) == (None, None)
        assert provider.reserved_bytes == 0

    @pytest.mark.parametrize("shares_scratch", [True, False])
    def test_an_arena_goes_with_pool_and_allocator(
        self, make: Callable[..., Allocator], provider: HostProvider, shares_scratch: bool
    ) -> None:
        allocator = make(provider)
        pool = PrivatePool(new_pool_id(), allocator)
        size = ArenaSize(3 * MIB, 2 * MIB)
        arena, other = (Arena(pool, size, shares_scratch=shares_scratch) for _ in range(2))
        references = [weakref.ref(each) for each in (arena, pool, allocator)]
        before = pool.allocated_bytes
        del arena
        assert before - pool.allocated_bytes == (3 * MIB if shares_scratch else 5 * MIB)
        del pool, allocator
        assert references[1]() is not None
        del other
        assert [reference() for reference in references] == [None, None, None]
        assert provider.reserved_bytes == 0

    def test_pinned_memory_goes_with_its_allocator(self) -> None:
        provider = HostProvider()
        allocator = CachingHostAllocator(PlainPages(provider))
        blocks = [allocator.allocate(nbytes) for nbytes in (5000, 70_000)]
        segments = [weakref.ref(block.segment) for block in blocks]
        allocator.free(blocks.pop())
        gone = weakref.ref(allocator)
        del allocator, blocks
        assert gone() is None
        assert [segment() for segment in segments] == [None, None]
        assert provider.reserved_bytes == 0
