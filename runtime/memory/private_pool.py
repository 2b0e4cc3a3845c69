"""The private pool: memory reserved to one graph, or to a declared group of graphs.

A CUDA graph writes to the addresses that were baked in when it was built. So its memory is not
shared with anything outside its pool, and is released when the last holder of the pool is gone.

Note [When a pool goes]. PyTorch keeps the free memory of a dead pool until `empty_cache`, or until
its allocator runs out of memory. Here other memory of the device is JAX's, which cannot ask us to
release ours. So the memory of a capture is released as soon as it has no users. A pool that the
user made (`MemPool`) keeps PyTorch's rule.
"""

from __future__ import annotations

import threading
import weakref

from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id

_pools: weakref.WeakValueDictionary[PoolId, PrivatePool] = weakref.WeakValueDictionary()
# Pools that captures may share before any has made them, with the allocator that has them, if any.
_handles: dict[PoolId, Allocator | None] = {}
_lock = threading.Lock()
_FIX = "donate the state (`donate_argnums`), capture a smaller batch, or drop unused graphs"
_FIX_JAX = "; XLA_PYTHON_CLIENT_MEM_FRACTION sets JAX's share of the GPU"


class Scratch:
    """Memory that holds nothing between two replays, shared by the graphs of a pool.

    Attributes:
        blocks: of the pool, one once it is allocated; freed with the scratch.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    @property
    def block(self) -> Block:
        """The memory."""
        return self.blocks[0]


class PrivatePool:
    """One user of a private pool of an allocator. Safe from several threads.

    Args:
        pool_id: of a pool that exists, or names a new one.
        allocator: of the device.

    Attributes:
        pool_id: as given.
        allocator: as given.
        replay_lock: held during each replay of a graph that shares its scratch.

    Raises:
        TracegraphError: the pool has lost its last user.

    Example:
        >>> from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
        >>> from tracegraph.runtime.memory.providers.host import HostProvider
        >>> pool = PrivatePool(new_pool_id(), CachingAllocator(HostProvider()))
        >>> block = pool.allocate(1000)
        >>> block.nbytes, pool.reserved_bytes, pool.allocated_bytes
        (1024, 1024, 1024)
    """

    def __init__(self, pool_id: PoolId, allocator: Allocator) -> None:
        self.pool_id, self.allocator = pool_id, allocator
        self.replay_lock = threading.RLock()
        self._lock = threading.Lock()
        self._scratch: weakref.WeakSet[Scratch] = weakref.WeakSet()
        # First, since an interrupt may come in between; what is not in the list is not released.
        used: list[PoolId] = []
        allocator.give_back_with(self, used)
        allocator.pools.create_or_increment(pool_id)
        used.append(pool_id)

    def __repr__(self) -> str:
        return (
            f"PrivatePool({self.pool_id}, provider={self.allocator.provider.name}, "
            f"reserved={self.reserved_bytes:,} bytes, allocated={self.allocated_bytes:,} bytes)"
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the provider."""
        return self.allocator.pool_bytes(self.pool_id)[0]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of its blocks in use."""
        return self.allocator.pool_bytes(self.pool_id)[1]

    def allocate(self, nbytes: int) -> Block:
        """Returns a block of at least ``nbytes`` bytes; its contents are undefined.

        Args:
            nbytes: wanted size, rounded up to 512 bytes, above 1 MiB to 32 KiB, above 128 MiB to
                2 MiB.

        Raises:
            OutOfMemoryError: neither the pool nor its provider has enough.
            TracegraphError: ``nbytes`` is negative.
        """
        try:
            return self.allocator.allocate_exact(nbytes, self.pool_id)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                error.what,
                where=f"private pool {self.pool_id} with {self.reserved_bytes:,} bytes, "
                f"{error.where}",
                why="a graph keeps all of its buffers in memory of its own for as long as it lives",
                fix=_FIX + (_FIX_JAX if self.allocator.provider.name == "jax" else ""),
                anchor=error.anchor,
            ) from error

    def share_scratch(self, nbytes: int) -> Scratch:
        """Returns the smallest scratch of this pool that is large enough; other graphs use it too.

        It is freed when its last holder is gone.

        Args:
            nbytes: wanted size.

        Raises:
            OutOfMemoryError: none is large enough, and neither pool nor provider has room.
        """
        with self._lock:
            fitting = self._find_scratch(nbytes)
            if fitting is not None:
                return fitting
            scratch = Scratch()
            self.free_with(scratch, scratch.blocks)
            scratch.blocks.append(self.allocate(nbytes))
            self._scratch.add(scratch)
            return scratch

    def _find_scratch(self, nbytes: int) -> Scratch | None:
        fitting = [each for each in self._scratch if each.block.nbytes >= nbytes]
        return min(fitting, key=lambda each: each.block.nbytes, default=None)

    def free_with(self, owner: object, blocks: list[Block]) -> None:
        """Frees blocks with their owner, and keeps the pool until then.

        Called before they are allocated: an interrupt may come at any point after that.

        Args:
            owner: of the blocks.
            blocks: of the pool; the owner adds to them.
        """
        self.allocator.give_back_with(owner, blocks, self)

    def free_later(self, block: Block) -> None:
        """Frees a block of the pool as soon as possible; for finalisers."""
        self.allocator.free_later(block)


def graph_pool_handle() -> PoolId:
    """Returns the id of a new private pool, for captures to share.

    The pool has no memory, and no device, before the first capture into it.

    Example:
        >>> handle = tg.graph_pool_handle()
        >>> first, second = tg.capture(jnp.sin, pool=handle), tg.capture(jnp.cos, pool=handle)
        >>> first.pool() == second.pool() == handle
        True
    """
    handle = new_pool_id()
    announce_pool(handle)
    return handle


def announce_pool(pool_id: PoolId, allocator: Allocator | None = None) -> None:
    """Lets captures share a pool that no capture has made, until `withdraw_pool`.

    Args:
        pool_id: its id.
        allocator: that has the pool already; None if the first capture sets it.
    """
    _handles[pool_id] = allocator


def withdraw_pool(pool_id: PoolId) -> None:
    """Ends what `announce_pool` began."""
    _handles.pop(pool_id, None)


def find_pool(pool_id: PoolId) -> PrivatePool | None:
    """Returns the pool of a living graph; None for a handle into which nothing was captured yet.

    Raises:
        TracegraphError: the last holder of such a pool is gone.
    """
    pool = _pools.get(pool_id)
    if pool is not None or pool_id in _handles:
        return pool
    raise TracegraphError(
        f"there is no pool {pool_id}",
        where=f"private pool {pool_id}",
        why="a pool lives while a graph, or an array in it, lives",
        fix="keep the captured function whose pool() this is, or leave pool= out",
        anchor="pool",
    )


def join_pool(pool_id: PoolId, allocator: Allocator) -> PrivatePool:
    """Returns the one PrivatePool of an id; captures that share it share its scratch.

    Args:
        pool_id: of a living pool, or of a new one.
        allocator: of the device of the capture.

    Raises:
        TracegraphError: the pool is one of another device, or has lost its last user.
    """
    with _lock:
        pool = _pools.get(pool_id)
        owner = pool.allocator if pool is not None else _handles.get(pool_id) or allocator
        if pool is None and owner is allocator:
            pool = _pools[pool_id] = PrivatePool(pool_id, allocator)
    if pool is not None and owner is allocator:
        return pool
    raise TracegraphError(
        f"the pool {pool_id} is one of another device",
        where=f"private pool {pool_id} of {owner}",
        why="a pool is memory of one device",
        fix="share pools between captures of one device only",
        anchor="pool",
    )
