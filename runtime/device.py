"""The protocol that every device speaks. Lowering and replay know nothing else of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.graph import ExecutableGraph, GraphDefinition, ReplayClock
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.static_buffer import StaticBuffer
from tracegraph.runtime.stream import Stream


class Device(Protocol):
    """Memory, buffers and executable graphs of one device."""

    @property
    def name(self) -> str:
        """What users read in reports, as ``host``."""
        ...

    @property
    def jax_device(self) -> Any:
        """The JAX device whose arrays live in the same memory."""
        ...

    @property
    def allocator(self) -> CachingAllocator:
        """Where the memory of this device comes from, that of graphs and that of users."""
        ...

    def number_stream(self, stream: Stream) -> int:
        """Returns how the allocator calls a stream; 0 is the one that JAX computes on."""
        ...

    @property
    def target(self) -> Literal["host", "gpu"]:
        """What lowering makes for it: compiled calls, or the kernels inside them."""
        ...

    @property
    def updates_in_place(self) -> bool:
        """True when compiled regions may overwrite the memory of resident state."""
        ...

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, StaticBuffer]:
        """Returns every slot of a definition as a buffer, filled with bytes that show when read."""
        ...

    def instantiate(
        self, definition: GraphDefinition, buffers: Mapping[str, Any], fresh: Sequence[str]
    ) -> tuple[ExecutableGraph, ...]:
        """Returns one executable graph per stage.

        Args:
            definition: the whole capture.
            buffers: what `bind_buffers` returned for it.
            fresh: results that users get as immutable values; the device may give them memory of
                their own, so that nothing needs to be copied when they are handed out.
        """
        ...
