"""HostDevice: the device protocol over ordinary memory and XLA:CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.graph import ExecutableGraph, GraphDefinition, ReplayClock
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.host.checking import POISON, CheckedHostGraph
from tracegraph.runtime.host.graph import HostGraph, mark_buffers
from tracegraph.runtime.memory.providers.host import HostProvider


class HostDevice:
    """The embedded default: honest streams, pools and graphs without a GPU.

    Args:
        jax_device: one of ``jax.devices("cpu")``.
        is_checking: launch in checking mode, see ``runtime/host/checking.py``.
    """

    name = "host"

    def __init__(self, jax_device: Any, *, is_checking: bool = False) -> None:
        self.jax_device = jax_device
        self.provider = HostProvider()
        self._is_checking = is_checking

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, HostBuffer]:
        """Returns every slot as a NumPy view of the arena that XLA reads in place."""
        return {
            slot.name: HostBuffer(slot, arena, self.jax_device, clock) for slot in definition.slots
        }

    def instantiate(
        self, definition: GraphDefinition, buffers: Mapping[str, HostBuffer], fresh: Sequence[str]
    ) -> tuple[ExecutableGraph, ...]:
        """Returns one executable graph per stage."""
        if self._is_checking:
            # In checking mode everything goes through the arena, where a stale read shows.
            return tuple(
                CheckedHostGraph(definition, index, buffers)
                for index in range(len(definition.stages))
            )
        rebindable = frozenset(mark_buffers(definition, buffers, fresh))
        return tuple(HostGraph(stage, buffers, rebindable) for stage in definition.stages)

    def poison(self, arena: Arena) -> None:
        """Fills the arena with ``0xFF`` bytes."""
        ctypes.memset(arena.address, POISON, arena.nbytes)


def find_host_device(*, is_checking: bool) -> HostDevice:
    """Returns the host device: JAX's default device if it is a CPU, else its first CPU."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, jax.Device) and default.platform == "cpu":
        return HostDevice(default, is_checking=is_checking)
    return HostDevice(jax.local_devices(backend="cpu")[0], is_checking=is_checking)
