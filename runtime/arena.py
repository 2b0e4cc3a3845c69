"""Arena: the planned region of one graph, held by everything that can still read it."""

from __future__ import annotations

import threading

from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.private_pool import PrivatePool, Scratch
from tracegraph.runtime.memory.providers.provider import Provider
from tracegraph.runtime.memory.waiting import allow_waiting


class Arena:
    """Memory of a private pool, freed when its last holder is gone.

    Arrays hold buffers, buffers hold the arena, and the arena's finaliser holds the pool: so a pool
    lives while its graph or any array in it lives, in every order of deletion.

    Note [Shared scratch]. The scratch of an arena means nothing between two replays, so graphs of
    one pool that run without a break have it in the same memory, and share one lock: their replays
    follow one another, in every order and from every thread. On a GPU the
    lock is held until the launch is on the stream, which keeps the order from there on. A graph
    with eager parts calls Python in the middle, which may replay another graph of the pool. So it
    has scratch and a lock of its own.

    Note [Finalisers]. A finaliser may run inside Python's garbage collector, where a call into JAX
    that releases the interpreter's lock corrupts memory. So none of ours calls JAX, and when a
    launch returns nothing reads the arena any more.

    Args:
        pool: where the memory comes from.
        size: of the two parts.
        shares_scratch: whether other graphs of the pool may have their scratch in the same bytes.
        absent: offsets in the kept part of state that another arena holds, see Note [One home].

    Attributes:
        size: as given.
        block: what holds the kept part.
        lock: held during each replay of a graph on this arena, and each read or write of it.
    """

    def __init__(
        self,
        pool: PrivatePool,
        size: ArenaSize,
        *,
        shares_scratch: bool = True,
        absent: range = range(0),
    ) -> None:
        self.size = size
        self._absent, self._kept_bytes = absent, size.kept_bytes - len(absent)
        self.lock = threading.RLock()
        self._blocks: list[Block] = []
        pool.free_with(self, self._blocks)
        # Not the pool: the arena's holders keep it, and it keeps nothing but memory.
        self._allocator, self._pool_id = pool.allocator, pool.pool_id
        self._shared: Scratch | None = None
        # A capture waits anyway.
        with allow_waiting():
            self._blocks.append(pool.allocate(max(self._kept_bytes, 1)))
            self.block = self._scratch = self._blocks[0]
            if size.scratch_bytes and shares_scratch:
                self._shared = shared = pool.share_scratch(size.scratch_bytes)
                self._scratch, self.lock = shared.block, pool.replay_lock
            elif size.scratch_bytes:
                self._blocks.append(pool.allocate(size.scratch_bytes))
                self._scratch = self._blocks[1]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each part that is not empty."""
        parts = ((self.block, self._kept_bytes), (self._scratch, self.size.scratch_bytes))
        return tuple((block.address, nbytes) for block, nbytes in parts if nbytes)

    @property
    def absent_bytes(self) -> int:
        """Bytes of the kept part that are in another arena."""
        return len(self._absent)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the memory that its scratch is in, which may be that of a larger graph."""
        return self._scratch.nbytes if self.size.scratch_bytes else 0

    @property
    def provider(self) -> Provider:
        """Where its memory comes from."""
        return self.block.size_class.provider or self._allocator.provider

    def record_stream(self, address: int, stream: int) -> None:
        """Lets the part that holds an address wait for a stream when it is freed.

        Args:
            address: of a buffer.
            stream: its number.
        """
        is_kept = self.block.address <= address < self.block.address + self.block.nbytes
        self._allocator.record_stream(self.block if is_kept else self._scratch, stream)

    def allocate_beside(self, nbytes: int) -> Block:
        """Returns more memory of the pool, not part of the plan, that lives as long as the arena.

        Raises:
            OutOfMemoryError: neither the pool nor its provider has enough.
        """
        self._blocks.append(self._allocator.allocate_exact(nbytes, self._pool_id))
        return self._blocks[-1]

    def find_place(self, offset: int) -> int | None:
        """Returns how far from its start the byte at an offset is; None if it is elsewhere."""
        if offset in self._absent:
            return None
        return offset - len(self._absent) if offset >= self._absent.stop else offset

    def find_block(self, offset: int) -> Block:
        """Returns the block that holds the byte at an offset."""
        return self.block if offset < self.size.kept_bytes else self._scratch

    def locate(self, offset: int) -> int:
        """Returns the address of the byte at an offset; 0 for one that another arena holds."""
        place = self.find_place(offset)
        if place is None:
            return 0
        if offset < self.size.kept_bytes or not self.size.scratch_bytes:
            return self.block.address + place
        return self._scratch.address + offset - self.size.kept_bytes
