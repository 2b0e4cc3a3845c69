"""What the kernel cache holds, and what this process found in it."""

from __future__ import annotations

import dataclasses
import pathlib

from tracegraph.kernel_caching.cached_lowering import read_counts
from tracegraph.kernel_caching.storing import wait_for_stores
from tracegraph.runtime.errors import count_noun
from tracegraph.runtime.saving.kernel_store import find_store


@dataclasses.dataclass(frozen=True)
class KernelCacheInfo:
    """The kernel cache as it is now.

    More than six fields because the folder is shared, and the counts are this process's.

    Attributes:
        path: of its folder; None where the cache is off.
        entries: files in it, of all processes: programs, choices of replacements, own kernels.
        nbytes: that they take.
        limit: bytes that it is kept to.
        hits: captures of this process that found their program.
        misses: those that did not.
        stores: programs that this process has stored.
    """

    path: pathlib.Path | None
    entries: int
    nbytes: int
    limit: int
    hits: int
    misses: int
    stores: int

    def __str__(self) -> str:
        counts = f"hits {self.hits}, misses {self.misses}, stores {self.stores}"
        if self.path is None:
            return f"kernel cache: off; {counts}"
        files = count_noun(self.entries, "file")
        size = f"{files}, {self.nbytes:,} of {self.limit:,} bytes"
        return f"kernel cache {self.path}: {size}; {counts}"


def info() -> KernelCacheInfo:
    """Returns what the cache holds, and what this process found in it.

    Raises:
        ConfigError: an environment variable has a value that is not allowed.
    """
    store, counts = find_store(), read_counts()
    if store is None:
        return KernelCacheInfo(None, 0, 0, 0, **counts)
    found = store.read_info()
    return KernelCacheInfo(found.path, found.entries, found.nbytes, found.limit, **counts)


def clear() -> int:
    """Removes all files of the cache, those of other processes too; returns how many.

    Graphs that are captured already are not touched.

    Raises:
        ConfigError: an environment variable has a value that is not allowed.
    """
    wait_for_stores()
    store = find_store()
    return 0 if store is None else store.clear()
