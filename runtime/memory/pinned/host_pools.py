"""HostPools: the common pool of page-locked memory, and the private ones of captures."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tracegraph.runtime.errors import CaptureError, TracegraphError
from tracegraph.runtime.memory.pinned.host_block import HostBlock, HostPool
from tracegraph.runtime.memory.pool_id import PoolId


class HostPools:
    """Which pool serves a stream. Its owner holds a lock during every call.

    Attributes:
        common: serves everything outside of captures.
        is_any_capturing: True while a capture is under way.
    """

    def __init__(self) -> None:
        self.common = HostPool()
        self.is_any_capturing = False
        self._private: dict[PoolId, HostPool] = {}

    def find_capturing(self, stream: int) -> HostPool | None:
        """Returns the pool of the capture that a stream belongs to, None outside of captures."""
        for pool in self._private.values():
            if pool.matches is not None and pool.matches(stream):
                return pool
        return None

    def begin(self, pool_id: PoolId, matches: Callable[[int], bool]) -> None:
        """Begins a capture; makes its pool if there is none.

        Raises:
            TracegraphError: a capture to this pool is under way.
        """
        pool = self._private.setdefault(pool_id, HostPool(pool_id))
        if pool.matches is not None:
            raise refuse(
                f"pool {pool_id} is captured to already", "one capture uses a pool at a time"
            )
        pool.use_count += 1
        pool.matches = matches
        self.is_any_capturing = True

    def end(self, pool_id: PoolId) -> None:
        """Ends a capture; its pool stays.

        Raises:
            TracegraphError: there is no such pool.
        """
        self._find(pool_id).matches = None
        pools = self._private.values()
        self.is_any_capturing = any(pool.matches is not None for pool in pools)

    def release(self, pool_id: PoolId, blocks: Iterable[HostBlock]) -> list[HostBlock]:
        """Ends one use of a pool; after the last, its blocks belong to the common pool.

        Args:
            pool_id: of a private pool.
            blocks: all blocks there are.

        Returns:
            Freed blocks that only graphs of this pool have copied from.

        Raises:
            TracegraphError: there is no such pool.
        """
        pool = self._find(pool_id)
        pool.use_count -= 1
        if pool.use_count:
            return []
        del self._private[pool_id]
        for block in pool.take_all():
            self.common.put(block)
        for block in blocks:
            if block.pool is pool:
                block.pool = self.common
        for block in pool.kept:
            block.captured_by.discard(pool_id)
        return [each for each in pool.kept if not each.is_allocated and not each.captured_by]

    def _find(self, pool_id: PoolId) -> HostPool:
        pool = self._private.get(pool_id)
        if pool is None:
            raise refuse(f"there is no pool {pool_id} of pinned memory", "it was released before")
        return pool


def refuse(what: str, why: str) -> TracegraphError:
    """Returns the error of a caller that uses pinned memory wrongly."""
    return TracegraphError(
        what,
        where="caching host allocator",
        why=why,
        fix="internal error in tracegraph: please report this text",
        anchor="pinned",
    )


def refuse_pageable(address: int, stream: int) -> CaptureError:
    """Returns the error of a captured copy whose host memory is not page-locked."""
    return CaptureError(
        "a copy of ordinary host memory is captured",
        where=f"host address {address:#x}, stream {stream:#x}",
        why="the driver reads such memory during the call, but a graph copies at each replay",
        fix="copy the array with `tg.memory.pin_memory` first, and keep it alive",
        anchor="pinned",
    )
