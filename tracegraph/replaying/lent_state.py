"""State of other graphs that a call reads where it is, see Note [Two graphs]."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, TypeAlias

from tracegraph.replaying.private_copies import is_late
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_state import ArrayState
from tracegraph.runtime.replay import Replay

# Pairs of input index and value.
Updates: TypeAlias = list[tuple[int, Any]]


class LentState:
    """The locks of other graphs that one call of a graph holds until it is launched.

    They are taken without waiting, so no two graphs wait for each other. The graph's own lock is
    held meanwhile.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: list[threading.RLock] = []

    def take(
        self,
        replay: Replay,
        updates: Updates,
        donated: Collection[int],
        *,
        is_lent: bool,
    ) -> Updates | None:
        """Returns what is to be copied in at once; None if private copies must be made before.

        Args:
            replay: of the graph that reads.
            updates: that were accepted.
            donated: indices of the inputs that are written.
            is_lent: True where state of other graphs may be read in place: inputs are pointed at
                it, and what is given up is copied from its own memory.
        """
        if not is_lent:
            must_wait = any(i in donated or type(v) is Array or is_late(v) for i, v in updates)
            return None if must_wait else updates
        if not all(self._is_ready(replay, value, index in donated) for index, value in updates):
            self.give_back()
            return None
        return [
            (index, value)
            for index, value in updates
            if index in donated
            or type(value) is not Array
            or not replay.inputs[index].read_at(value.data_ptr())
        ]

    def give_back(self) -> None:
        """Releases the locks; called after the launch, or when there will be none."""
        # An interrupt may come before and after each of these calls.
        while self._locks:
            if self._locks[-1]._is_owned():  # type: ignore[attr-defined]
                self._locks[-1].release()
            self._locks.pop()

    def _is_ready(self, replay: Replay, value: Any, is_donated: bool) -> bool:
        """True for a value that can be read where it is; its lock is held from now on."""
        if type(value) is not Array:
            return not is_donated and not is_late(value)
        is_on_host = replay.inputs[0].context is None
        if is_on_host or value.state is not ArrayState.RESIDENT:
            return False
        if replay.holds(value) or value.devices() != replay.devices:
            return False
        # It may have left its graph, or been taken by a replay, before the lock was held.
        return (
            self._hold(value.lock) and value.state is ArrayState.RESIDENT and not value.is_deleted()
        )

    def _hold(self, lock: threading.RLock) -> bool:
        if lock._is_owned():  # type: ignore[attr-defined]
            return True
        self._locks.append(lock)
        return lock.acquire(blocking=False)
