"""What the allocator of a device may reserve, and what it returns to the device."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.allocators import find_backend_name, list_allocators
from tracegraph.runtime.default_device import find_any_device


def empty_cache() -> None:
    """Frees all cached memory that is not in use, on every device.

    The memory of a graph, and of the arrays that it returned, stays.
    """
    for allocator in list_allocators():
        allocator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits what the allocator may reserve to a fraction of the device's memory.

    Args:
        fraction: from 0 to 1; 1 for no limit.
        device: a JAX device, the index of one, or None for the device that captures use.

    Raises:
        ConfigError: ``fraction`` is not a number from 0 to 1.

    Example:
        >>> tg.memory.set_per_process_memory_fraction(0.5)
        >>> tg.memory.get_per_process_memory_fraction()
        0.5
        >>> tg.memory.set_per_process_memory_fraction(1)
    """
    find_any_device(device).allocator.set_memory_fraction(fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Returns the fraction set by `set_per_process_memory_fraction`, 1 by default.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """
    return find_any_device(device).allocator.memory_fraction


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns the free and the total bytes of the allocator's provider.

    For the provider ``jax`` these are the bytes of JAX's allocator, not of the whole GPU.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.

    Example:
        >>> free_bytes, total_bytes = tg.memory.mem_get_info()
        >>> free_bytes <= total_bytes
        True
    """
    provider = find_any_device(device).allocator.provider
    return provider.available_bytes(), provider.total_bytes()


def get_allocator_backend() -> str:
    """Returns ``"native"``, ``"cudaMallocAsync"`` or ``"pluggable"``."""
    return find_backend_name(find_any_device().allocator)
