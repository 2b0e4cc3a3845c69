"""HostDevice: the device protocol over ordinary memory and XLA:CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from tracegraph.runtime.allocators import MemorySource, open_allocator
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.graph import ExecutableGraph, GraphDefinition, ReplayClock
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.host.checking import POISON, CheckedHostGraph
from tracegraph.runtime.host.graph import HostGraph, find_in_place, mark_buffers
from tracegraph.runtime.host.owned_buffer import OwnedBuffer
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider
from tracegraph.runtime.memory.providers.provider import NoEvents
from tracegraph.runtime.stream import Stream, default_stream


class HostDevice:
    """The embedded default: honest streams, pools and graphs without a GPU.

    Args:
        jax_device: one of ``jax.devices("cpu")``.
        is_checking: launch in checking mode, see ``runtime/host/checking.py``.
    """

    name = "host"
    target: Literal["host", "gpu"] = "host"

    def __init__(self, jax_device: Any, *, is_checking: bool = False) -> None:
        self.jax_device = jax_device
        self._is_checking = is_checking

    @property
    def allocator(self) -> CachingAllocator:
        """The one allocator of this device, whoever asks."""
        return _find_allocator(self.jax_device)

    def number_stream(self, stream: Stream) -> int:
        """Returns how the allocator calls a stream."""
        return 0 if stream is default_stream() else stream.number

    @property
    def updates_in_place(self) -> bool:
        """True but in checking mode, where everything goes through the arena."""
        return not self._is_checking

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, HostBuffer | OwnedBuffer]:
        """Returns every slot as a NumPy view of the arena, resident state apart."""
        slots = {slot.name: slot for slot in definition.slots}
        buffers: dict[str, HostBuffer | OwnedBuffer] = {
            name: HostBuffer(slot, arena, self.jax_device, clock) for name, slot in slots.items()
        }
        if self.updates_in_place:
            for name in find_in_place(definition, buffers):
                buffers[name] = OwnedBuffer(slots[name], arena, self.jax_device, clock)
        for buffer in buffers.values():
            buffer.fill_bytes(POISON)
        return buffers

    def instantiate(
        self,
        definition: GraphDefinition,
        buffers: Mapping[str, HostBuffer | OwnedBuffer],
        fresh: Sequence[str],
    ) -> tuple[ExecutableGraph, ...]:
        """Returns one executable graph per stage."""
        if self._is_checking:
            # In checking mode everything goes through the arena, where a stale read shows.
            return tuple(
                CheckedHostGraph(definition, index, buffers)
                for index in range(len(definition.stages))
            )
        rebindable = frozenset(mark_buffers(definition, buffers, fresh))
        graphs = tuple(HostGraph(stage, buffers, rebindable) for stage in definition.stages)
        if graphs:
            graphs[0].allow_direct(definition, buffers)
        return graphs


@functools.cache
def _find_allocator(jax_device: Any) -> CachingAllocator:
    provider = HostProvider()
    source = MemorySource(
        device=jax_device.id,
        providers={
            "host": lambda: provider,
            # The system's own allocator keeps what is freed, as the driver's pool does.
            "async": lambda: provider,
            "expandable": HostVirtualProvider,
        },
        events=NoEvents(),
        find_stream=int,
        read_memory=lambda: (provider.available_bytes(), provider.total_bytes()),
    )
    return open_allocator(source)


def find_host_device(*, is_checking: bool) -> HostDevice:
    """Returns the host device: JAX's default device if it is a CPU, else its first CPU."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, jax.Device) and default.platform == "cpu":
        return HostDevice(default, is_checking=is_checking)
    return HostDevice(jax.local_devices(backend="cpu")[0], is_checking=is_checking)
