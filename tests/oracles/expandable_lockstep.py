"""The caching allocator with expandable segments and its slow model in step."""

from __future__ import annotations

from tests.fakes.bytes_provider import ManualEvents
from tests.fakes.virtual_bytes_provider import VirtualBytesProvider
from tests.oracles.allocator_lockstep import Lockstep
from tests.oracles.expandable_model import ExpandableModel
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig


class ExpandableLockstep(Lockstep):
    """A Lockstep over a provider of addresses and memory apart."""

    def __init__(self, config: AllocatorConfig, capacity_bytes: int) -> None:
        super().__init__(AllocatorConfig(), capacity_bytes)
        self.provider: VirtualBytesProvider = VirtualBytesProvider(capacity_bytes)
        self.events = ManualEvents()
        self.allocator = CachingAllocator(self.provider, config=config, events=self.events)
        self.model: ExpandableModel = ExpandableModel(config, capacity_bytes)

    def compare(self) -> None:
        """Compares all statistics, and all calls of the provider since the last time."""
        calls = [call for call in self.provider.calls if call.name in ("unmap", "release")]
        assert sorted(map(repr, calls)) == sorted(map(repr, self.model.taken_away))
        self.model.taken_away.clear()
        super().compare()

    def close(self) -> None:
        """Ends and frees everything; then nothing may be left."""
        super().close()
        assert not self.provider.mapped
        assert not self.provider.ranges

    def _expect_calls(self) -> None:
        names = ("allocate", "reserve", "map")
        self.model.calls = iter([call for call in self.provider.calls if call.name in names])
