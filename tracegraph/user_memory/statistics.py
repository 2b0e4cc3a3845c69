"""Counts and bytes of the allocators, on devices and in page-locked memory."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.memory.snapshots.summary import format_summary
from tracegraph.user_memory.pinned_memory import find_host_allocator


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns all statistics, under the keys of ``torch.cuda.memory_stats``, sorted.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.

    Example:
        >>> before = tg.memory.memory_stats()["active.all.current"]
        >>> address = tg.memory.caching_allocator_alloc(1)
        >>> tg.memory.memory_stats()["active.all.current"] - before
        1
        >>> tg.memory.caching_allocator_delete(address)
    """
    return find_any_device(device).allocator.statistics.to_dict()


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Returns the statistics as dicts of dicts: one level per part of a key.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.

    Example:
        >>> sorted(tg.memory.memory_stats_as_nested_dict()["segment"]["all"])
        ['allocated', 'current', 'freed', 'peak']
    """
    nested: dict[str, Any] = {}
    for key, value in memory_stats(device).items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def reset_peak_memory_stats(device: Any = None) -> None:
    """Resets the peak values to the current ones.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    allocator = find_any_device(device).allocator
    with allocator.lock:
        allocator.statistics.reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Resets the accumulated counts of allocations, frees and events.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    allocator = find_any_device(device).allocator
    with allocator.lock:
        allocator.statistics.reset_accumulated()


def memory_allocated(device: Any = None) -> int:
    """Returns the bytes that graphs, their arrays and users have allocated.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.

    Example:
        >>> before = tg.memory.memory_allocated()
        >>> address = tg.memory.caching_allocator_alloc(1000)
        >>> tg.memory.memory_allocated() - before
        1024
        >>> tg.memory.caching_allocator_delete(address)
    """
    return find_any_device(device).allocator.statistics.all.allocated_bytes.current


def max_memory_allocated(device: Any = None) -> int:
    """Returns the peak of `memory_allocated` since `reset_peak_memory_stats`, in bytes.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    return find_any_device(device).allocator.statistics.all.allocated_bytes.peak


def memory_reserved(device: Any = None) -> int:
    """Returns the bytes that the allocator holds, in use or cached.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    return find_any_device(device).allocator.statistics.all.reserved_bytes.current


def max_memory_reserved(device: Any = None) -> int:
    """Returns the peak of `memory_reserved` since `reset_peak_memory_stats`, in bytes.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    return find_any_device(device).allocator.statistics.all.reserved_bytes.peak


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Returns the statistics as a table, with the rows of ``torch.cuda.memory_summary``.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
        abbreviated: leave out the rows of the large and the small pool.
    """
    allocator = find_any_device(device).allocator
    stats = allocator.statistics.to_dict()
    return format_summary(stats, device=allocator.device, is_abbreviated=abbreviated)


def host_memory_stats() -> dict[str, Any]:
    """Returns the statistics of page-locked memory, under the keys of PyTorch."""
    return find_host_allocator().statistics.to_dict()


def reset_peak_host_memory_stats() -> None:
    """Resets the peak values of page-locked memory to the current ones."""
    find_host_allocator().statistics.reset_peak()


def reset_accumulated_host_memory_stats() -> None:
    """Resets the accumulated counts of page-locked memory."""
    find_host_allocator().statistics.reset_accumulated()
