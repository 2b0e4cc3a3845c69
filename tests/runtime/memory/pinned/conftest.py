"""The caching host allocator over fakes, for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.fakes.pinned_pages import FakeEvents, FakePages
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator


@pytest.fixture
def pages() -> FakePages:
    return FakePages()


@pytest.fixture
def events() -> FakeEvents:
    return FakeEvents()


@pytest.fixture
def allocator(pages: FakePages, events: FakeEvents) -> CachingHostAllocator:
    return CachingHostAllocator(pages, events=events)
