"""PeerMemory: the memory through which kernels on several GPUs meet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.definition.signals import PLACES_OFFSET, count_signal_bytes
from tracegraph.runtime.errors import UnsupportedError


class PeerMemory:
    """Memory of each of some GPUs that all of them reach; it lives as long as the process.

    See Note [Meetings] of ``lowering/kernels/collectives.py`` for what is in it.

    Args:
        contexts: of the GPUs, in the order of their parts.

    Attributes:
        addresses: of the memory on each.

    Raises:
        UnsupportedError: a GPU cannot reach another.
        OutOfMemoryError: a GPU has no memory for it.
    """

    def __init__(self, contexts: Sequence[CudaContext]) -> None:
        self._contexts = tuple(contexts)
        for context in contexts:
            _allow_peers(context, contexts)
        nbytes = count_signal_bytes(len(contexts))
        self.addresses: list[int] = []
        self._streams: list[int] = []
        for context in contexts:
            driver = context.driver
            with context.order.use_context():
                self.addresses.append(driver.allocate_memory(nbytes))
                self._streams.append(driver.create_stream())
        self.clear()

    def stop(self) -> None:
        """Ends all waiting, after a GPU could not be launched; then makes the next launch possible.

        What the others have launched computes nothing that may be used.
        """
        for context, address, stream in self._iterate():
            with context.order.use_context():
                # JAX's stream is behind the kernels that wait.
                context.driver.fill_async(address, 1, 1, 4, stream)
        for context, _, _ in self._iterate():
            context.synchronize()
        self.clear()

    def clear(self) -> None:
        """Sets all counts to zero; no kernel may be at work."""
        for context, address, stream in self._iterate():
            with context.order.use_context():
                context.driver.fill_async(address, 0, 1, PLACES_OFFSET, stream)
                context.driver.synchronize_stream(stream)

    def _iterate(self) -> Sequence[tuple[CudaContext, int, int]]:
        return [*zip(self._contexts, self.addresses, self._streams, strict=True)]


def _allow_peers(context: CudaContext, contexts: Sequence[CudaContext]) -> None:
    driver, ordinal = context.driver, context.jax_device.local_hardware_id
    for other in contexts:
        if other is context:
            continue
        if not driver.can_access_peer(ordinal, other.jax_device.local_hardware_id):
            raise UnsupportedError(
                f"{context.jax_device} cannot reach the memory of {other.jax_device}",
                where="capture over several GPUs",
                why="their graphs read each other's memory, over NVLink or PCIe",
                fix="use GPUs for which tg.can_device_access_peer is True, or jax.jit",
                anchor="several-devices",
            )
        with context.order.use_context():
            driver.allow_peer(other.order.primary)


_memories: dict[tuple[Any, ...], PeerMemory] = {}
_lock = threading.Lock()


def find_peer_memory(contexts: Sequence[CudaContext]) -> PeerMemory:
    """Returns the one memory of some GPUs, in this order.

    Raises:
        UnsupportedError: a GPU cannot reach another.
        OutOfMemoryError: a GPU has no memory for it.
    """
    key = tuple(context.jax_device for context in contexts)
    with _lock:
        if key not in _memories:
            _memories[key] = PeerMemory(contexts)
        return _memories[key]
