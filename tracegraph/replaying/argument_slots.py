"""Argument slots: from the arguments of a call to updates of static inputs, as cheaply as can be.

A slot belongs to one dynamic argument of one captured graph. It answers three questions in order of
cost: is this the very tree that was loaded last (one identity check), does it have the same
structure and leaf types (then only the leaves that changed are copied), or is it another signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import jax
import jax.core
import numpy as np

from tracegraph.replaying.padded_leaf import PaddedLeaf
from tracegraph.replaying.tree_watch import TreeWatch
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.static_buffer import PartBuffer, StaticBuffer
from tracegraph.runtime.jax_interop import ArrayImpl, find_sharding, unwrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.signature import LeafType, describe_leaf, describe_placed_leaf
from tracegraph.tracing.static_leaves import find_static_kind

_MAX_KNOWN = 64
_is_deleted = ArrayImpl.is_deleted


def _write_nothing(value: Any) -> None:
    """Is never called: takes the place of a writer where no value may be written at once."""
    raise AssertionError(f"{value} is written before all arguments are accepted")


class LeafSlot:
    """The slot of one array.

    Args:
        replay: whose static input this is.
        index: which of its inputs.
        leaf: the type of the values that it accepts.
        is_donated: True when the caller gives them up.
    """

    __slots__ = ("_describe", "_index", "_leaf", "_replay", "_sharding", "known", "write")

    def __init__(self, replay: Replay, index: int, leaf: LeafType, *, is_donated: bool) -> None:
        self._replay, self._index, self._leaf = replay, index, leaf
        self._sharding = find_sharding(replay.inputs[index].jax_device)
        # Arrays over several devices share the object that says their type, wherever they are.
        self._describe = describe_leaf if leaf.sharding is None else describe_placed_leaf
        # JAX shares the object that says an array's type between arrays: its identity tells.
        self.known: dict[int, Any] = {}
        # A donated value waits until all arguments are accepted: the leaf that lives in the buffer
        # is detached first, and the value is consumed.
        self.write = _write_nothing if is_donated else replay.inputs[index].make_writer()

    @property
    def buffer(self) -> StaticBuffer:
        """The static input of the graph."""
        return self._replay.inputs[self._index]

    def collect(self, value: Any, updates: list[tuple[int, Any]]) -> bool:
        """Copies an immutable array in, or adds to the updates; False for another signature.

        The results of the last replay must be settled.
        """
        # What a graph returned has memory of its own, which another graph can read as it is.
        plain = value.find_memory() if type(value) is Array else value
        if type(plain) is ArrayImpl and self._learn(plain):
            self.write(plain)
            return True
        if type(value) is PaddedLeaf:
            return self._take_part(value)
        array = unwrap_key(value)
        if self._replay.is_leaf_of(array, self._index):
            return True
        if not self._accepts(value):
            return False
        if array is value or not self._take_key_data(array):
            updates.append((self._index, array))
        return True

    def forget(self) -> None:
        """Has nothing to forget: every value is looked at."""

    def _take_key_data(self, data: Any) -> bool:
        """Takes what is inside of a typed key that was accepted; False if it must be copied.

        Its type is never learned: the same data without a key around it is another signature.
        """
        plain = data.find_memory() if type(data) is Array else data
        if self.write is _write_nothing or type(plain) is not ArrayImpl:
            return False
        if plain.sharding != self._sharding:
            return False
        self.write(plain)
        return True

    def _take_part(self, value: PaddedLeaf) -> bool:
        """Copies a smaller array to the front of the static input; False for another signature."""
        memory = value.memory
        if type(memory) is ArrayImpl and memory.sharding != self._sharding:
            return False
        if value.shape != self._leaf.shape or self.write is _write_nothing:
            return False
        try:
            found = self._describe(memory)
        except TypeError:
            return False
        if (found.dtype, found.weak_type) != (self._leaf.dtype, self._leaf.weak_type):
            return False
        # Only graphs of one device have buckets.
        cast(PartBuffer, self.buffer).write_part(memory)
        return True

    def _learn(self, value: Any) -> bool:
        """True for a plain array of the right type on this very device, not to be donated."""
        if self.write is _write_nothing:
            return False
        if id(value.aval) in self.known:
            return True
        if value.sharding != self._sharding or not self._accepts(value):
            return False
        if self._leaf.sharding is None and len(self.known) < _MAX_KNOWN:
            self.known[id(value.aval)] = value.aval
        return True

    def _accepts(self, value: Any) -> bool:
        if isinstance(value, jax.Array) and not self._can_read(value):
            return False
        if type(value) is int and not _fits(value, self._leaf.dtype):
            return False
        try:
            return self._describe(value) == self._leaf
        except (TypeError, OverflowError):
            return False

    def _can_read(self, array: jax.Array) -> bool:
        """True for an array here, or for one that JAX would move here."""
        if isinstance(array, jax.core.Tracer) or array.is_deleted():
            return False
        devices = array.sharding.device_set
        return devices == self._sharding.device_set or (len(devices) == 1 and not array.committed)


class SeenTree:
    """The tree whose leaves a graph has all loaded; graphs of one home share it for their state.

    Attributes:
        watch: of the tree; None if there is none.
        dropped_leaves: the clock's count when it was loaded.
        plain: arrays that stand for leaves of that tree: none may be deleted.
    """

    __slots__ = ("dropped_leaves", "plain", "watch")

    def __init__(self) -> None:
        self.watch: TreeWatch | None = None
        self.dropped_leaves = 0
        self.plain: list[Any] = []


class TreeSlot:
    """The slot of a tree of arrays; like the static slot it takes no value by its type alone.

    Args:
        replay: whose static inputs these are.
        start: index of the first of them.
        tree: structure of the argument; static leaves are in it.
        leaves: the types of its leaves.
        is_donated: True when the caller gives them up.

    Attributes:
        structure: as given.
        seen: the last value.
    """

    __slots__ = (
        "_clock",
        "_may_watch",
        "_slots",
        "_static_slots",
        "_structure",
        "seen",
        "structure",
    )
    known: ClassVar[dict[int, Any]] = {}
    write = staticmethod(_write_nothing)

    def __init__(
        self,
        replay: Replay,
        start: int,
        tree: Any,
        leaves: Sequence[LeafType],
        *,
        is_donated: bool,
    ) -> None:
        self.structure = tree
        # As the user's trees are flattened: with static leaves among the others.
        blank = object()
        flat, self._structure = jax.tree_util.tree_flatten(tree.unflatten([blank] * len(leaves)))
        self._static_slots = (
            [None if leaf is blank else StaticSlot(leaf) for leaf in flat]
            if len(flat) > len(leaves)
            else []
        )
        self._slots = [
            LeafSlot(replay, start + i, leaf, is_donated=is_donated)
            for i, leaf in enumerate(leaves)
        ]
        # What other graphs may overwrite is copied in at each call.
        self._may_watch = not is_donated and not replay.shares_inputs
        self._clock = replay.clock
        self.seen = SeenTree()

    def collect(self, value: Any, updates: list[tuple[int, Any]]) -> bool:
        """Adds what must be copied; returns False for a value of another signature."""
        seen = self.seen
        watch = seen.watch
        if (
            watch is not None
            and (
                (value is watch.tree and watch.glance() == watch.seen) or watch.is_unchanged(value)
            )
            and seen.dropped_leaves == self._clock.dropped_leaves
            and not (seen.plain and any(map(_is_deleted, seen.plain)))
        ):
            return True
        leaves, tree = jax.tree_util.tree_flatten(value)
        if tree != self._structure:
            return False
        if self._static_slots:
            if not self._has_static_leaves(leaves):
                return False
            pairs = zip(leaves, self._static_slots, strict=True)
            leaves = [leaf for leaf, slot in pairs if slot is None]
        self.forget()
        count = len(updates)
        if not all(map(LeafSlot.collect, self._slots, leaves, [updates] * len(leaves))):
            return False
        # What is only collected is not loaded yet, and will not be if another slot refuses.
        if len(updates) == count:
            self._watch_if_immutable(value, leaves)
        return True

    def _has_static_leaves(self, leaves: list[Any]) -> bool:
        """True if the leaves that were static at the capture are the same now."""
        pairs = zip(leaves, self._static_slots, strict=True)
        return all(slot is None or slot.collect(leaf, []) for leaf, slot in pairs)

    def forget(self) -> None:
        """Forgets the last value: the next one is looked at leaf by leaf."""
        self.seen.watch = None

    def _watch_if_immutable(self, value: Any, leaves: list[Any]) -> None:
        """Remembers a tree of immutable leaves, until it is changed or they are deleted."""
        if self._may_watch and all(type(leaf) is ArrayImpl for leaf in leaves):
            seen = self.seen
            seen.plain, seen.watch = leaves, TreeWatch(value)
            seen.dropped_leaves = self._clock.dropped_leaves


class StaticSlot:
    """The slot of a static argument: it must be the value that was baked in."""

    __slots__ = ("_kind", "_value")
    known: ClassVar[dict[int, Any]] = {}
    write = staticmethod(_write_nothing)

    def __init__(self, value: Any) -> None:
        self._value, self._kind = value, find_static_kind(value)

    def collect(self, value: Any, _updates: list[tuple[int, Any]]) -> bool:
        """Returns False for another value; a static argument is never copied."""
        if value is self._value:
            return True
        return find_static_kind(value) == self._kind and bool(value == self._value)

    def forget(self) -> None:
        """Has nothing to forget."""


Slot = LeafSlot | TreeSlot | StaticSlot


def _fits(number: int, dtype: Any) -> bool:
    """True when an integer input can hold the number; a float input holds any."""
    if not np.issubdtype(dtype, np.integer):
        return True
    limits = np.iinfo(dtype)
    return int(limits.min) <= number <= int(limits.max)


def is_consumable(value: Any) -> bool:
    """True for what donation takes away: JAX arrays and arrays of other graphs."""
    return isinstance(unwrap_key(value), ArrayImpl | Array)
