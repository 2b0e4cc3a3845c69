"""CacheInfo: how often a captured function was captured and replayed."""

from __future__ import annotations

from typing import NamedTuple


class CacheInfo(NamedTuple):
    """Counts of a captured function's calls and signatures; `tg.GraphedFunction.cache_info` has it.

    A forward graph and its backward graph, captured under an eager `jax.grad`, count as one.

    Attributes:
        hits: calls that replayed an existing graph.
        misses: calls that captured a new one.
        maxsize: signatures kept; the least recently used is dropped beyond.
        currsize: signatures kept now.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int

    @property
    def captures(self) -> int:
        """Graphs captured so far: one per miss."""
        return self.misses

    def join(self, other: CacheInfo) -> CacheInfo:
        """Returns the counts of two captured functions together."""
        sizes = (self.maxsize, self.currsize + other.currsize)
        return CacheInfo(self.hits + other.hits, self.misses + other.misses, *sizes)
