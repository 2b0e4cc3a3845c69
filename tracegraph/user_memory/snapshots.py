"""The state of the allocators, and the history of what they did."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from tracegraph.runtime.allocators import list_allocators
from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.snapshots.snapshot import build_snapshot, write_snapshot
from tracegraph.user_memory.live_plans import describe_live_plans


def memory_snapshot(mempool_id: PoolId | None = None) -> list[dict[str, Any]]:
    """Returns every segment with its blocks, of all devices in use.

    Args:
        mempool_id: ``id`` of a `MemPool`, or ``pool()`` of a captured function: only the segments
            of this pool. None for those of all pools.

    Returns:
        A dict per segment, under the keys of ``torch.cuda.memory_snapshot``.

    Raises:
        ConfigError: ``mempool_id`` is not a pair of integers.

    Example:
        >>> address = tg.memory.caching_allocator_alloc(1000)
        >>> blocks = [b for segment in tg.memory.memory_snapshot() for b in segment["blocks"]]
        >>> [b["requested_size"] for b in blocks if b["address"] == address]
        [1000]
        >>> tg.memory.caching_allocator_delete(address)
    """
    if mempool_id is not None and not _is_pool_id(mempool_id):
        raise ConfigError(
            f"`mempool_id` is {mempool_id!r}",
            where="argument `mempool_id` of tg.memory.memory_snapshot",
            why="a pool is named by a pair of numbers",
            fix="pass `id` of a MemPool, pool() of a captured function, or leave it out",
            anchor="config",
        )
    return [segment for each in _list_allocators() for segment in each.snapshot(mempool_id)]


def record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: Any = None,
    clear_history: bool = False,
    skip_actions: Iterable[str] = (),
) -> None:
    """Starts, changes or stops recording the actions of the allocators.

    Args:
        enabled: ``"all"`` keeps an entry for every action, ``"state"`` only the call stacks of
            what is in use; None stops, and drops what was recorded.
        context: the call stacks that are kept: ``"state"`` those of what is in use, ``"alloc"``
            those of all allocations, ``"all"`` those of frees too; None keeps none.
        stacks: ``"all"`` frames, or only those from the user's line on: ``"python"``.
        max_entries: length of the history; the oldest entries are dropped.
        device: a JAX device, the index of one, or None for all that are in use.
        clear_history: drop what was recorded before.
        skip_actions: actions that are not recorded, such as ``"snapshot"``.

    Raises:
        ConfigError: an argument has a value not listed here.

    Example:
        >>> tg.memory.record_memory_history()
        >>> address = tg.memory.caching_allocator_alloc(1000)
        >>> tg.memory.dump_snapshot(path)  # to be seen with `python -m tracegraph memory`
        >>> tg.memory.record_memory_history(None)
        >>> tg.memory.caching_allocator_delete(address)
    """
    for allocator in _list_allocators() if device is None else (find_any_device(device).allocator,):
        with allocator.lock:
            allocator.history.record(
                enabled, context, stacks, max_entries, clear_history, skip_actions
            )


def dump_snapshot(path: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Writes state and history of the allocators into a file.

    ``python -m tracegraph memory FILE`` draws it, and so does pytorch.org/memory_viz.

    Args:
        path: of the new file.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> tg.memory.dump_snapshot(path)
    """
    allocators = _list_allocators()
    plans = describe_live_plans()
    write_snapshot(os.fspath(path), build_snapshot(allocators, allocators[0].config, plans=plans))


def _list_allocators() -> tuple[Allocator, ...]:
    """Returns the allocators in use; opens that of the default device if there is none."""
    return list_allocators() or (find_any_device().allocator,)


def _is_pool_id(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(number, int) for number in value)
