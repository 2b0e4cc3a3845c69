"""`tg.memory`: statistics and control of the memory of graphs, as in ``torch.cuda.memory``.

Functions with a ``device`` take a JAX device, the index of one, or None for the device that
captures use. Sizes are bytes. Arrays that JAX allocates do not count here; with the provider
``jax`` the segments come from JAX's allocator.

Example:
    >>> import tracegraph as tg
    >>> reserved = tg.memory.memory_reserved()
    >>> address = tg.memory.caching_allocator_alloc(1024)
    >>> tg.memory.caching_allocator_delete(address)
    >>> tg.memory.empty_cache()
    >>> tg.memory.memory_reserved() <= reserved
    True
"""

from tracegraph.runtime.allocators import change_current_allocator
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator
from tracegraph.user_memory.allocations import caching_allocator_alloc, caching_allocator_delete
from tracegraph.user_memory.capacity import (
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    mem_get_info,
    set_per_process_memory_fraction,
)
from tracegraph.user_memory.mem_pool import MemPool, use_mem_pool
from tracegraph.user_memory.pinned_memory import (
    empty_host_cache,
    is_pinned,
    pin_memory,
    synchronize_copies,
)
from tracegraph.user_memory.snapshots import (
    dump_snapshot,
    memory_snapshot,
    record_memory_history,
)
from tracegraph.user_memory.statistics import (
    host_memory_stats,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
)

__all__ = [
    "MemPool",
    "PluggableAllocator",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "dump_snapshot",
    "empty_cache",
    "empty_host_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "is_pinned",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "pin_memory",
    "record_memory_history",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "synchronize_copies",
    "use_mem_pool",
]
