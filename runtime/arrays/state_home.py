"""StateHome: resident state that the graphs of one function update in turns.

Note [One home]. A function that reads values has a graph for each way that it takes, and each of
them updates the same state. They have it in the same buffers, with one clock and one set of leaves:
what one graph returns is in its place for the next, whichever that is, and it is in memory once.
That takes graphs which hold one lock while they run (Note [Shared scratch]), return the state in
the same trees, and name its buffers alike. A graph that joins finds the home empty: leaves that
are still held get copies first, since the graph's verification writes there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.leaf_set import LeafSet
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.definition.graph import ReplayClock


class Turns(Protocol):
    """The trees that graphs return their state in; made above this module."""

    def forget(self) -> None:
        """Drops the trees that are shown, before their leaves may be detached."""
        ...


class StateHome:
    """The state of one graph, or of several, see Note [One home].

    Args:
        clock: counts the replays of all of them.

    Attributes:
        buffers: of the state, by name.
        pending: results that may need settling before the next replay.
        shown: the leaves that show, or showed, the state.
        turns: the trees that it is returned in; None without any.
    """

    __slots__ = ("__weakref__", "buffers", "clock", "pending", "shown", "turns")

    def __init__(self, clock: ReplayClock) -> None:
        self.clock = clock
        self.buffers: Mapping[str, StaticBuffer] = {}
        self.pending: list[weakref.ref[Array]] = []
        self.shown: LeafSet | None = None
        self.turns: Any = None

    def settle(self) -> None:
        """Gives every live result of the last replay a private copy; the caller has the lock."""
        for reference in self.pending:
            array = reference()
            if array is not None:
                array.settle()
        self.pending.clear()

    def vacate(self) -> None:
        """Gives every live result and leaf of the last replay a private copy."""
        with self.clock.lock:
            self.settle()
            if self.turns is not None:
                self.turns.forget()
            if self.shown is not None:
                for name in list(self.shown.leaves):
                    self.shown.detach(name)
                self.shown = None


class StateHomes:
    """The homes of one function's graphs, as long as one of these lives."""

    def __init__(self) -> None:
        self._homes: weakref.WeakValueDictionary[Hashable, StateHome]
        self._homes = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> StateHome | None:
        """Returns the home of graphs whose state is alike; None if there are none."""
        with self._lock:
            return self._homes.get(key)

    def keep(self, key: Hashable, home: StateHome) -> None:
        """Lets later graphs whose state is alike find a home."""
        with self._lock:
            self._homes[key] = home
