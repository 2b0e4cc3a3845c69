"""Arena: the planned region of one graph, held by everything that can still read it."""

from __future__ import annotations

import weakref

from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.segment import Block


class Arena:
    """One block of a private pool, given back when the last holder is gone.

    Arrays hold buffers, buffers hold the arena, and the arena's finaliser holds the pool: so a pool
    lives while its graph or any array in it lives, in whatever order users drop things.

    Note [Finalisers]. A finaliser may run inside Python's garbage collector, where a call into JAX
    that releases the interpreter's lock corrupts memory. So none of ours calls JAX, and when a
    launch returns nothing reads the arena any more.

    Args:
        pool: where the block comes from.
        nbytes: at least this many bytes.
    """

    def __init__(self, pool: PrivatePool, nbytes: int) -> None:
        self.block: Block = pool.allocate(max(nbytes, 1))
        # At interpreter exit the process gives all memory back by itself.
        weakref.finalize(self, pool.free, self.block).atexit = False

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.block.address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.block.nbytes
