"""The private pool: memory reserved to one graph, or to a declared group of graphs.

A CUDA graph writes to the addresses that were baked in when it was built. So its memory is not
shared with anybody outside its pool, and goes back to the provider only when the pool is closed or
when nobody holds the pool any more.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import NamedTuple, Protocol

from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.segment import Block, Segment

# Rounding lets a freed block serve a request of about its size; it wastes three percent at most.
ROUNDING_BYTES = ((1 << 20, 512), (128 << 20, 32 << 10))
LARGE_ROUNDING_BYTES = 2 << 20

_numbers = itertools.count(1)
_pools: weakref.WeakValueDictionary[PoolId, PrivatePool] = weakref.WeakValueDictionary()


class PoolId(NamedTuple):
    """Names a pool; a pair, as in `torch.cuda`: (n, 0) for a pool that a graph made itself."""

    number: int
    second: int = 0

    def __str__(self) -> str:
        return f"({self.number}, {self.second})"


def new_pool_id() -> PoolId:
    """Returns an id that no pool of this process has had before, from any thread."""
    return PoolId(next(_numbers))


class Provider(Protocol):
    """Where the segments of a pool come from."""

    name: str

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh segment of ``nbytes`` bytes, or raises OutOfMemoryError."""
        ...

    def free(self, segment: Segment) -> None:
        """Takes back a segment that ``allocate`` returned."""
        ...

    def available_bytes(self) -> int:
        """Returns how many bytes could still be allocated."""
        ...


class Scratch:
    """Memory that holds nothing between two replays, shared by the graphs of a pool.

    Args:
        block: of the pool.
    """

    def __init__(self, block: Block) -> None:
        self.block = block


class PrivatePool:
    """A set of segments that serves blocks to the graphs of one pool. Safe from several threads.

    A freed block stays in the pool and serves the next request that fits best; it is never split,
    so a block is a whole segment.

    Args:
        pool_id: names the pool in errors and statistics.
        provider: where segments come from.

    Attributes:
        replay_lock: held by whoever replays a graph that shares its scratch.

    Example:
        >>> from tracegraph.runtime.memory.providers.host import HostProvider
        >>> pool = PrivatePool(new_pool_id(), HostProvider())
        >>> block = pool.allocate(1000)
        >>> block.nbytes, pool.reserved_bytes, pool.allocated_bytes
        (1024, 1024, 1024)
        >>> pool.close()
    """

    def __init__(self, pool_id: PoolId, provider: Provider) -> None:
        self.pool_id = pool_id
        self._provider = provider
        self._live: dict[Block, None] = {}
        self._free: list[Segment] = []
        # Reentrant: the collector may free a block while this thread is inside `allocate`.
        self._lock = threading.RLock()
        self.replay_lock = threading.RLock()
        self._scratch: weakref.WeakSet[Scratch] = weakref.WeakSet()
        self._give_back = weakref.finalize(self, _give_back, provider, self._live, self._free)
        # At interpreter exit the process gives all memory back by itself.
        self._give_back.atexit = False
        _pools[pool_id] = self

    def __repr__(self) -> str:
        return (
            f"PrivatePool({self.pool_id}, provider={self._provider.name}, "
            f"reserved={self.reserved_bytes:,} bytes, allocated={self.allocated_bytes:,} bytes)"
        )

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return not self._give_back.alive

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the provider."""
        with self._lock:
            free_bytes = sum(segment.nbytes for segment in self._free)
            return self.allocated_bytes + free_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out in blocks."""
        with self._lock:
            return sum(block.nbytes for block in self._live)

    def allocate(self, nbytes: int) -> Block:
        """Returns a block of at least ``nbytes`` bytes; its contents are undefined.

        Args:
            nbytes: wanted size, rounded up to 512 bytes, above 1 MiB to 32 KiB, above 128 MiB to
                2 MiB.

        Raises:
            OutOfMemoryError: neither the pool nor its provider has that much.
            TracegraphError: the pool is closed, or ``nbytes`` is negative.
        """
        with self._lock:
            if self.is_closed:
                raise _refuse(
                    f"cannot allocate {nbytes:,} bytes from a closed pool",
                    self.pool_id,
                    why="a closed pool has given its memory back and takes no more",
                    fix="capture again, which makes a new pool",
                )
            if nbytes < 0:
                raise _refuse(
                    f"cannot allocate {nbytes:,} bytes",
                    self.pool_id,
                    why="a block has zero bytes or more",
                    fix="internal error in tracegraph: please report this text",
                )
            wanted_bytes = round_up(nbytes)
            segment = self._take_free(wanted_bytes) or self._reserve(wanted_bytes)
            block = Block(segment, 0, segment.nbytes)
            self._live[block] = None
            return block

    def share_scratch(self, nbytes: int) -> Scratch:
        """Returns memory that others of this pool use as well; the smallest that is big enough.

        It is given back when nobody holds it any more.

        Args:
            nbytes: wanted size.

        Raises:
            OutOfMemoryError: there is none so big, and neither pool nor provider has room for it.
        """
        with self._lock:
            fitting = [each for each in self._scratch if each.block.nbytes >= nbytes]
            if fitting:
                return min(fitting, key=lambda each: each.block.nbytes)
            scratch = Scratch(self.allocate(nbytes))
            weakref.finalize(scratch, self.free, scratch.block).atexit = False
            self._scratch.add(scratch)
            return scratch

    def free(self, block: Block) -> None:
        """Returns a block to the pool, which keeps it for reuse.

        After `close` there is nothing left to return, and this does nothing.

        Raises:
            TracegraphError: the block was freed before, or is not of this pool.
        """
        with self._lock:
            if self.is_closed:
                return
            if block not in self._live:
                raise _refuse(
                    f"cannot free the block at {block.address:#x}: it is not in use in this pool",
                    self.pool_id,
                    why="it was freed before or belongs to another pool; its bytes may be in use",
                    fix="free each block once, in the pool that allocated it",
                )
            del self._live[block]
            self._free.append(block.segment)

    def close(self) -> None:
        """Gives all segments back to the provider. May be called again; nothing happens then."""
        with self._lock:
            self._give_back()

    def _take_free(self, wanted_bytes: int) -> Segment | None:
        fitting = [segment for segment in self._free if segment.nbytes >= wanted_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda segment: (segment.nbytes, segment.address))
        self._free.remove(best)
        return best

    def _reserve(self, wanted_bytes: int) -> Segment:
        try:
            return self._provider.allocate(wanted_bytes)
        except OutOfMemoryError as error:
            if not self._free:
                raise self._name_pool(error) from error
        self._release_free()
        try:
            return self._provider.allocate(wanted_bytes)
        except OutOfMemoryError as error:
            raise self._name_pool(error) from error

    def _release_free(self) -> None:
        while self._free:
            self._provider.free(self._free.pop())

    def _name_pool(self, error: OutOfMemoryError) -> OutOfMemoryError:
        return OutOfMemoryError(
            error.what,
            where=f"private pool {self.pool_id} with {self.reserved_bytes:,} bytes, {error.where}",
            why=error.why,
            fix=error.fix,
            anchor=error.anchor,
        )


def find_pool(pool_id: PoolId) -> PrivatePool:
    """Returns the pool of this id.

    Raises:
        TracegraphError: nobody holds such a pool any more.
    """
    pool = _pools.get(pool_id)
    if pool is None or pool.is_closed:
        raise _refuse(
            f"there is no pool {pool_id}",
            pool_id,
            why="a pool lives while a graph, or an array in it, lives",
            fix="keep the captured function whose pool() this is, or leave pool= out",
        )
    return pool


def round_up(nbytes: int) -> int:
    """Returns the size of the segment that serves a request of ``nbytes`` bytes.

    Example:
        >>> round_up(1), round_up(1 << 20), round_up((1 << 20) + 1)
        (512, 1048576, 1081344)
    """
    fitting = (rounding for border, rounding in ROUNDING_BYTES if nbytes <= border)
    rounding = next(fitting, LARGE_ROUNDING_BYTES)
    return max(-(-nbytes // rounding), 1) * rounding


def _give_back(provider: Provider, live: dict[Block, None], free: list[Segment]) -> None:
    # No method: the finaliser must not point back to the pool.
    segments = [*free, *(block.segment for block in live)]
    free.clear()
    live.clear()
    for segment in segments:
        provider.free(segment)


def _refuse(what: str, pool_id: PoolId, *, why: str, fix: str) -> TracegraphError:
    return TracegraphError(what, where=f"private pool {pool_id}", why=why, fix=fix, anchor="pool")
