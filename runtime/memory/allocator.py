"""Allocator: what graphs and users need of the memory of a device, with or without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import History
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.provider import Provider
from tracegraph.runtime.memory.statistics import Statistics


class Allocator(Protocol):
    """Allocates and frees blocks of one device's memory. Safe from several threads.

    Attributes:
        device: its index.
        history: what happened, if it is recorded.
        provider: where segments come from; private pools may have their own.
        pools: the private pools, and the captures that fill them.
    """

    device: int
    history: History
    provider: Provider
    pools: PoolRouter

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Re-entrant; to be held where several calls belong together."""
        ...

    @property
    def config(self) -> AllocatorConfig:
        """The settings."""
        ...

    @property
    def statistics(self) -> Statistics:
        """What was done so far."""
        ...

    @property
    def memory_fraction(self) -> float:
        """The share of the device that may be reserved, from 0 to 1."""
        ...

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits what may be reserved to a share of the device, from 0 to 1; 1 for no limit."""
        ...

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of at least ``nbytes`` bytes, for use on ``stream``."""
        ...

    def allocate_exact(self, nbytes: int, pool_id: PoolId, stream: int = 0) -> Block:
        """Returns a block of a private pool that is a whole segment: the arena of a graph."""
        ...

    def free(self, block: Block) -> None:
        """Frees a block."""
        ...

    def free_later(self, block: Block) -> None:
        """Frees a block as soon as possible, for finalisers."""
        ...

    def give_back_with(
        self, owner: object, items: Sequence[Block | PoolId], kept: object = None
    ) -> None:
        """Frees blocks, and ends uses of pools, as soon as possible after an object is gone."""
        ...

    def release_pool_later(self, pool_id: PoolId) -> None:
        """Counts one user of a private pool less, and releases what it leaves, for finalisers."""
        ...

    def pool_bytes(self, pool_id: PoolId) -> tuple[int, int]:
        """Returns the reserved and the allocated bytes of a private pool."""
        ...

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses a block: after `free`, reuse waits for that stream."""
        ...

    def empty_cache(self) -> None:
        """Releases all cached memory without users."""
        ...

    def snapshot(self, pool_id: PoolId | None = None) -> list[dict[str, Any]]:
        """Returns all segments with their blocks, or those of a private pool."""
        ...
