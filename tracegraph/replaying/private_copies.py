"""Private copies of arrays in the pools of graphs, see Note [Two graphs]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tracegraph.runtime.array import Array


def copy_together(arrays: Iterable[Array]) -> dict[int, Any]:
    """Returns private copies of arrays by their identity, see Note [Two graphs].

    Arrays of one graph are copied under one hold of its lock, so that they are of one replay.
    """
    by_lock: dict[int, list[Array]] = {}
    locks = {}
    for array in arrays:
        lock = array.lock
        locks[id(lock)] = lock
        by_lock.setdefault(id(lock), []).append(array)
    copies = {}
    for key, group in by_lock.items():
        with locks[key]:
            copies |= {id(array): array.peek().copy() for array in group}
    return copies
