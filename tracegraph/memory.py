"""`tg.memory`: statistics and control of the memory of graphs, as in ``torch.cuda.memory``.

Functions with a ``device`` take a JAX device, the index of one, or None for the device that
captures use. Sizes are bytes. Arrays that JAX allocates do not count here; with the provider
``jax`` the segments come from JAX's allocator.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any, SupportsIndex

from tracegraph.replaying.live_plans import describe_live_plans
from tracegraph.runtime.allocators import choose_allocator as change_current_allocator
from tracegraph.runtime.allocators import find_backend_name, list_allocators
from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.errors import ConfigError, TracegraphError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator as PluggableAllocator
from tracegraph.runtime.memory.snapshots.snapshot import build_snapshot, write_snapshot
from tracegraph.runtime.memory.snapshots.summary import format_summary
from tracegraph.runtime.stream import Stream, current_stream
from tracegraph.user_memory.mem_pool import MemPool as MemPool
from tracegraph.user_memory.mem_pool import use_mem_pool as use_mem_pool
from tracegraph.user_memory.pinned_memory import empty_host_cache as empty_host_cache
from tracegraph.user_memory.pinned_memory import find_host_allocator
from tracegraph.user_memory.pinned_memory import is_pinned as is_pinned
from tracegraph.user_memory.pinned_memory import pin_memory as pin_memory
from tracegraph.user_memory.pinned_memory import synchronize_copies as synchronize_copies

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


# What `caching_allocator_alloc` returned and is not deleted yet, by address.
_blocks: dict[int, tuple[Allocator, Block]] = {}


def caching_allocator_alloc(
    size: SupportsIndex, device: Any = None, stream: Stream | None = None
) -> int:
    """Returns the address of ``size`` bytes of the device's memory, with undefined contents.

    Args:
        size: bytes, at least 0; the allocator rounds up.
        device: the device to allocate on.
        stream: the stream that uses the memory; the current one if left out.

    Raises:
        ConfigError: ``size`` is not an integer, or ``stream`` not a tg.Stream.
        OutOfMemoryError: the device does not have enough memory.
        TracegraphError: the size is negative.

    Example:
        >>> address = caching_allocator_alloc(1024)
        >>> caching_allocator_delete(address)
    """
    call = "caching_allocator_alloc"
    nbytes = _read_index("size", size, call, "pass a number of bytes, as 4 * 1024")
    if stream is not None and not isinstance(stream, Stream):
        why = "memory is used on a stream of tracegraph"
        raise _refuse("stream", stream, call, why, "pass a tg.Stream, or leave it out")
    found = find_any_device(device)
    number = found.number_stream(stream if stream is not None else current_stream())
    block = found.allocator.allocate(nbytes, number)
    _blocks[block.address] = found.allocator, block
    return block.address


def caching_allocator_delete(mem_ptr: SupportsIndex) -> None:
    """Frees what `caching_allocator_alloc` returned.

    Raises:
        ConfigError: ``mem_ptr`` is not an integer.
        TracegraphError: `caching_allocator_alloc` did not return it, or it was deleted before.
    """
    call = "caching_allocator_delete"
    address = _read_index("mem_ptr", mem_ptr, call, "pass what caching_allocator_alloc returned")
    # Removed before it is freed: from then on the address may belong to another block.
    owner, block = _blocks.pop(address, (None, None))
    if owner is None or block is None:
        raise TracegraphError(
            f"nothing that caching_allocator_alloc returned is at {address:#x}",
            where=f"argument `mem_ptr` of tg.memory.{call}",
            why="it was deleted before, is the memory of a graph, or was not allocated here",
            fix="pass the address that caching_allocator_alloc returned, once",
            anchor="pool",
        )
    owner.free(block)


def empty_cache() -> None:
    """Frees all cached memory that is not in use."""
    for allocator in list_allocators():
        allocator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits what the allocator may reserve to a fraction of the device, from 0 to 1.

    Raises:
        ConfigError: the fraction is not a number from 0 to 1.
    """
    _find_allocator(device).set_memory_fraction(fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Returns the fraction set by `set_per_process_memory_fraction`, 1 by default."""
    return _find_allocator(device).memory_fraction


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Returns free and total bytes of the allocator's provider.

    For the provider ``jax`` that is JAX's allocator, not the whole GPU.
    """
    provider = _find_allocator(device).provider
    return provider.available_bytes(), provider.total_bytes()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns all statistics under the keys of ``torch.cuda.memory_stats``, sorted.

    Example:
        >>> before = memory_stats()["active.all.current"]
        >>> address = caching_allocator_alloc(1)
        >>> memory_stats()["active.all.current"] - before
        1
        >>> caching_allocator_delete(address)
    """
    return _find_allocator(device).statistics.to_dict()


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Returns the statistics as dicts of dicts: one level per part of a key."""
    nested: dict[str, Any] = {}
    for key, value in memory_stats(device).items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def reset_peak_memory_stats(device: Any = None) -> None:
    """Resets the peak values to the current ones."""
    allocator = _find_allocator(device)
    with allocator.lock:
        allocator.statistics.reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Resets the accumulated counts of allocations, frees and events."""
    allocator = _find_allocator(device)
    with allocator.lock:
        allocator.statistics.reset_accumulated()


def memory_allocated(device: Any = None) -> int:
    """Returns the bytes allocated to graphs and to users."""
    return _find_allocator(device).statistics.all.allocated_bytes.current


def max_memory_allocated(device: Any = None) -> int:
    """Returns the highest `memory_allocated` since the last reset."""
    return _find_allocator(device).statistics.all.allocated_bytes.peak


def memory_reserved(device: Any = None) -> int:
    """Returns the bytes reserved from the provider, in use or cached."""
    return _find_allocator(device).statistics.all.reserved_bytes.current


def max_memory_reserved(device: Any = None) -> int:
    """Returns the highest `memory_reserved` since the last reset."""
    return _find_allocator(device).statistics.all.reserved_bytes.peak


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Returns the statistics as a table, with the rows of ``torch.cuda.memory_summary``."""
    allocator = _find_allocator(device)
    stats = allocator.statistics.to_dict()
    return format_summary(stats, device=allocator.device, is_abbreviated=abbreviated)


def memory_snapshot(mempool_id: PoolId | None = None) -> list[dict[str, Any]]:
    """Returns every segment with its blocks, of all devices in use.

    Args:
        mempool_id: only the segments of this pool; empty if the pool has no memory.

    Raises:
        ConfigError: ``mempool_id`` is not the id of a pool.
    """
    if mempool_id is not None and not _is_pool_id(mempool_id):
        why = "a pool is named by a pair of numbers"
        fix = "pass `id` of a MemPool, pool() of a captured function, or leave it out"
        raise _refuse("mempool_id", mempool_id, "memory_snapshot", why, fix)
    return [segment for each in _list_allocators() for segment in each.snapshot(mempool_id)]


def record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = (1 << 63) - 1,
    device: Any = None,
    clear_history: bool = False,
    skip_actions: Iterable[str] = (),
) -> None:
    """Starts, changes or stops recording the actions of the allocators.

    Args:
        enabled: ``"all"``, ``"state"`` (only stacks of blocks in use) or None to stop.
        context: which call stacks are kept: ``"all"``, ``"alloc"``, ``"state"`` or None.
        stacks: ``"all"`` frames, or from the user's ``"python"`` line on.
        max_entries: length of the trace; the oldest go first.
        device: one device; None for all that are in use.
        clear_history: forget what was recorded before.
        skip_actions: actions that are left out.

    Raises:
        ConfigError: an argument has a value not listed here.
    """
    for allocator in _list_allocators() if device is None else (_find_allocator(device),):
        with allocator.lock:
            allocator.history.record(
                enabled, context, stacks, max_entries, clear_history, skip_actions
            )


def dump_snapshot(path: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Writes state and history for pytorch.org/memory_viz and ``python -m tracegraph memory``.

    Args:
        path: of the new file.

    Raises:
        OSError: it cannot be written.
    """
    allocators = _list_allocators()
    plans = describe_live_plans()
    write_snapshot(os.fspath(path), build_snapshot(allocators, allocators[0].config, plans=plans))


def get_allocator_backend() -> str:
    """Returns ``native``, ``cudaMallocAsync`` or ``pluggable``."""
    return find_backend_name(_find_allocator(None))


def host_memory_stats() -> dict[str, Any]:
    """Returns the statistics of page-locked memory, under PyTorch's keys."""
    return find_host_allocator().statistics.to_dict()


def reset_peak_host_memory_stats() -> None:
    """Resets the peak values of page-locked memory to the current ones."""
    find_host_allocator().statistics.reset_peak()


def reset_accumulated_host_memory_stats() -> None:
    """Resets the accumulated counts of page-locked memory."""
    find_host_allocator().statistics.reset_accumulated()


def _find_allocator(device: Any) -> Allocator:
    return find_any_device(device).allocator


def _list_allocators() -> tuple[Allocator, ...]:
    """Returns the allocators in use; if there is none yet, that of the default device."""
    return list_allocators() or (_find_allocator(None),)


def _is_pool_id(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(number, int) for number in value)


def _read_index(name: str, value: Any, call: str, fix: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _refuse(name, value, call, "it must be an integer", fix) from None


def _refuse(name: str, value: Any, call: str, why: str, fix: str) -> ConfigError:
    return ConfigError(
        f"`{name}` is {value!r}",
        where=f"argument `{name}` of tg.memory.{call}",
        why=why,
        fix=fix,
        anchor="config",
    )
