"""What is done about arguments while no lock is held.

Note [Two graphs]. Another graph may be replaying while its arrays are read by this one. Waiting for
its lock while this graph's is held could deadlock, so the arrays are copied under their own lock,
all of one graph together, while this graph's lock is not held. On a GPU that is seldom needed:
where the other lock is free, it is held until this graph is launched, and state is read where it is
(`LentState`). Whatever replaces the state comes later on the same stream.

An argument may still be computed by a program that calls back into Python, and that callback may
call the graph that the argument is for. On the host, reading an array waits for it: while a lock is
held, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl


def wait_for_arguments(args: Any) -> None:
    """Waits for the arrays of a tree that are still being computed on the host."""
    for leaf in jax.tree_util.tree_leaves(args):
        if isinstance(leaf, ArrayImpl) and not leaf.is_deleted() and is_late(leaf):
            leaf.block_until_ready()


def is_late(value: Any) -> bool:
    """True for a plain array that is still being computed on the host."""
    return type(value) is ArrayImpl and not value.is_ready() and _is_on_host(value)


def _is_on_host(array: Any) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def copy_together(arrays: Iterable[Array]) -> dict[int, Any]:
    """Returns private copies of arrays by their identity, see Note [Two graphs].

    Arrays of one graph are copied under one hold of its lock, so that they are of one replay.
    """
    by_lock: dict[int, list[Array]] = {}
    locks = {}
    for array in arrays:
        array.wait()
        lock = array.lock
        locks[id(lock)] = lock
        by_lock.setdefault(id(lock), []).append(array)
    copies = {}
    for key, group in by_lock.items():
        with locks[key]:
            copies |= {id(array): array.peek().copy() for array in group}
    return copies
