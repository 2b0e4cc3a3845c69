"""`tg.kernel_cache`: what was compiled for a program is kept in files and found by other processes.

It is on by default. ``TRACEGRAPH_KERNEL_CACHE=0`` turns it off, ``TRACEGRAPH_KERNEL_CACHE_PATH``
names another folder than ``~/.cache/tracegraph/kernels``, and ``TRACEGRAPH_KERNEL_CACHE_MB`` how
much it may take: docs/kernel_cache.md.

Example:
    >>> import tracegraph as tg
    >>> info = tg.kernel_cache.info()
    >>> info.hits, info.entries  # doctest: +SKIP
    (3, 12)
"""

from tracegraph.kernel_caching.cache_report import KernelCacheInfo, clear, info

__all__ = ["KernelCacheInfo", "clear", "info"]
