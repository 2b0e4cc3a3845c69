"""MemPool: a private pool that the user makes, and the context that allocates from it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from tracegraph.runtime.allocators import make_pluggable_provider
from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.private_pool import announce_pool, withdraw_pool
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator
from tracegraph.runtime.streams.handles import Handle


class MemPool(Handle):
    """A private pool of a device's allocator: its memory serves only what is allocated in it.

    Captures share it by ``pool=``; `use_mem_pool` sends what a thread allocates there. Blocks in it
    may outlive this object; its memory returns to the provider with the first `empty_cache` after
    it was freed.

    Args:
        allocator: where its segments come from; None for the device's own provider.
        use_on_oom: it also serves requests to the default pool that would run out of memory.
        no_split: each block has a segment of its own.
        device: a JAX device or its index; None for the one that captures use.

    Attributes:
        id: names it, as ``pool=`` takes it.
        allocator: as given.

    Raises:
        ConfigError: ``allocator`` is no PluggableAllocator, a flag is no bool, or there is no such
            device.

    Example:
        >>> pool = tg.memory.MemPool()
        >>> with tg.memory.use_mem_pool(pool):
        ...     pool.use_count()
        2
        >>> pool.use_count()
        1
    """

    def __init__(
        self,
        allocator: PluggableAllocator | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
        device: Any = None,
    ) -> None:
        if allocator is not None and not isinstance(allocator, PluggableAllocator):
            raise ConfigError(
                f"`allocator` is a {type(allocator).__name__}",
                where="argument `allocator` of tg.memory.MemPool",
                why="an allocator is two functions of a shared library",
                fix="pass tg.memory.PluggableAllocator(path_to_so, alloc_fn_name, free_fn_name)",
                anchor="pluggable-allocator",
            )
        for name, flag in (("use_on_oom", use_on_oom), ("no_split", no_split)):
            # A text like "False" would count as true.
            if not isinstance(flag, bool):
                raise ConfigError(
                    f"`{name}` is {flag!r}",
                    where=f"argument `{name}` of tg.memory.MemPool",
                    why="it is True or False",
                    fix="pass a bool, or leave it out",
                    anchor="pool",
                )
        self.allocator = allocator
        self.id: PoolId = new_pool_id()
        self._owner: Allocator = find_any_device(device).allocator
        provider = None if allocator is None else make_pluggable_provider(allocator, self._owner)
        self._owner.pools.create_or_increment(
            self.id, provider=provider, no_split=no_split, use_on_oom=use_on_oom
        )
        announce_pool(self.id, self._owner)
        # At interpreter exit the system frees all memory by itself.
        weakref.finalize(self, _leave, self._owner, self.id).atexit = False

    def __repr__(self) -> str:
        return f"MemPool(id={self.id}, {self._owner})"

    def use_count(self) -> int:
        """Returns how many users the pool has: this object, captures, and open contexts."""
        return self._owner.pools.use_count(self.id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns the pool's segments with their blocks, in the keys of a snapshot file."""
        return self._owner.snapshot(self.id)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Sends what this thread allocates from the device's allocator to a pool.

    That is `caching_allocator_alloc`; a capture goes to the pool that its ``pool=`` names, and
    JAX's own arrays stay where JAX puts them.

    Args:
        pool: the pool that requests go to.
        device: of the pool; None for the pool's own.

    Raises:
        ConfigError: ``pool`` is not a MemPool, or one of another device.
        TracegraphError: requests go to this pool already.

    Example:
        >>> pool = tg.memory.MemPool()
        >>> with tg.memory.use_mem_pool(pool):
        ...     address = tg.memory.caching_allocator_alloc(1000)
        >>> len(pool.snapshot())
        1
        >>> tg.memory.caching_allocator_delete(address)
    """
    owner = pool._owner if isinstance(pool, MemPool) else None
    if owner is None or (device is not None and find_any_device(device).allocator is not owner):
        raise ConfigError(
            f"`pool` is {pool!r}",
            where="argument `pool` of tg.memory.use_mem_pool",
            why="it takes a MemPool, and a pool is memory of one device",
            fix="pass a tg.memory.MemPool of that device",
            anchor="pool",
        )
    thread = threading.get_ident()
    owner.pools.begin(pool.id, lambda _stream: threading.get_ident() == thread)
    try:
        yield
    finally:
        owner.pools.end(pool.id)
        owner.pools.release(pool.id)


def _leave(owner: Allocator, pool_id: PoolId) -> None:
    withdraw_pool(pool_id)
    owner.release_pool_later(pool_id)
