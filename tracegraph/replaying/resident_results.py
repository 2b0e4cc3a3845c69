"""ResidentResults: a set of leaves with the trees that a call returns, which take turns.

A captured train step returns its state in the same few trees again and again: making a tree of a
thousand leaves anew would cost more than the launch. See Note [Leaf sets].
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.replaying.argument_slots import SeenTree
from tracegraph.replaying.holders import CAN_COUNT, HolderCounts
from tracegraph.replaying.tree_watch import TreeWatch
from tracegraph.runtime.arrays.leaf_set import LeafSet
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.jax_interop import wrap_key
from tracegraph.runtime.replay import Replay


class ResidentPart:
    """A result, or a subtree of the results, that holds resident leaves only.

    Args:
        numbered: the part, with indices of flat results for leaves.
        names: the buffer of each flat result.
        key_types: the dtype of each flat result that is a typed key, by its index.

    Attributes:
        indices: of its leaves among the flat results.
        structure: of the part; static leaves are in it.
        is_tree: False for one leaf by itself.
        seen: of the argument that takes the returned tree back; None if none does.
    """

    def __init__(self, numbered: Any, names: Sequence[str], key_types: Mapping[int, Any]) -> None:
        self.indices, self.structure = jax.tree_util.tree_flatten(numbered)
        self.is_tree = type(numbered) is not int
        self.seen: SeenTree | None = None
        self._leaves: list[tuple[str, Any]] = [
            (names[int(index)], key_types.get(index)) for index in self.indices
        ]

    def make(self, leaf_set: LeafSet) -> Any:
        """Returns the part, made of the leaves of a set."""
        leaves = [
            leaf_set.leaves[name] if key is None else wrap_key(key, leaf_set.leaves[name])
            for name, key in self._leaves
        ]
        return self.structure.unflatten(leaves)


class ResidentResults:
    """One set of leaves, and the parts of the results that are made of them.

    Args:
        leaf_set: the leaves.
        parts: what to make of them; None for a result that is not resident.

    Attributes:
        leaf_set: as given.
        values: one per part; None where there is none.
        watches: of the values that are trees.
        pairs: what the argument that takes one of them back has seen, with its watch.
        residence: of the leaves.
        was_held: True when it could not be returned again at the last attempt.
    """

    __slots__ = (
        "_counts",
        "_dropped_leaves",
        "leaf_set",
        "pairs",
        "residence",
        "values",
        "was_held",
        "watches",
    )

    def __init__(self, leaf_set: LeafSet, parts: Sequence[ResidentPart | None]) -> None:
        self.leaf_set = leaf_set
        self.was_held = False
        self.values = [None if part is None else part.make(leaf_set) for part in parts]
        self.residence = leaf_set.residence
        trees = [
            (part.seen, TreeWatch(value))
            for part, value in zip(parts, self.values, strict=True)
            if part is not None and part.is_tree
        ]
        self.watches = [watch for _, watch in trees]
        self.pairs = [(seen, watch) for seen, watch in trees if seen is not None]
        self._dropped_leaves = leaf_set.clock.dropped_leaves
        self._counts: HolderCounts | None = None

    def is_free(self) -> bool:
        """True when nothing else holds a leaf or a container, and all are as they were made."""
        # Each step counts here, as in a call: see Note [Hot path].
        if self._dropped_leaves != self.leaf_set.clock.dropped_leaves:
            return False
        for watch in self.watches:
            # As in `TreeSlot.collect`.
            if watch.glance() != watch.seen and not watch.is_unchanged(watch.tree):
                return False
        counts = self._counts
        if counts is None:
            # No name holds the values while they are counted.
            counts = self._counts = HolderCounts(self, [v for v in self.values if v is not None])
        return counts.read() == counts.expected if counts.is_plain else counts.are_all()


class ResidentTurns:
    """The sets of leaves of one home, which take turns.

    Args:
        parts: of the results; None for one that is not resident.

    Attributes:
        parts: as given; graphs that join the home have them as well.
        trees: those of them that are trees.
        shown: what the last replay returned.
        spares: the other sets.
    """

    __slots__ = ("parts", "shown", "spares", "trees")

    def __init__(self, parts: Sequence[ResidentPart | None]) -> None:
        self.parts = parts
        self.trees = [part for part in parts if part is not None and part.is_tree]
        self.shown: ResidentResults | None = None
        self.spares: collections.deque[ResidentResults] = collections.deque()

    def forget(self) -> None:
        """Drops the trees that are shown, before their leaves may be detached."""
        self.shown = None
        for part in self.trees:
            if part.seen is not None:
                part.seen.watch = None


class ResidentRotation:
    """What returns the results of one graph, with the sets of leaves of its home.

    Args:
        replay: of the graph.
        parts: of the results; None for one that is not resident.
        donations: what to say of a leaf that a later replay has taken, by the name of its buffer.
        others: the place of each other part, and what returns it.
        join: makes the tree of results of all parts.
    """

    def __init__(
        self,
        replay: Replay,
        parts: Sequence[ResidentPart | None],
        donations: Mapping[str, Donation],
        others: Sequence[tuple[int, Callable[[], Any]]],
        join: Callable[[list[Any]], Any],
    ) -> None:
        self._others, self._join = others, join
        self._replay, self._donations = replay, donations
        self._home, self._clock = replay.home, replay.clock
        if self._home.turns is None:
            self._home.turns = ResidentTurns(parts)
        self._turns: ResidentTurns = self._home.turns
        self.trees = self._turns.trees

    def build(self) -> Any:
        """Returns the tree of results of the last replay.

        The leaves that were shown before are deleted.
        """
        # Each step counts here, as in a call: see Note [Hot path].
        turns = self._turns
        last, turns.shown = turns.shown, None
        spares = turns.spares
        chosen = spares.popleft() if spares else None
        if chosen is None or not chosen.is_free():
            chosen = self._find_other(chosen)
        if last is not None and CAN_COUNT:
            if last.residence.values:
                last.leaf_set.drop_values()
            spares.append(last)
        # What `Replay.show` does.
        self._home.shown = chosen.leaf_set
        chosen.residence.generation = self._clock.generation
        for seen, watch in chosen.pairs:
            seen.watch, seen.plain = watch, chosen.residence.values
            seen.dropped_leaves = self._clock.dropped_leaves
        turns.shown = chosen
        values = chosen.values.copy()
        for place, take in self._others:
            values[place] = take()
        return self._join(values)

    def forget(self) -> None:
        """Drops the trees that are shown, before their leaves may be detached."""
        self._turns.forget()

    def _find_other(self, held: ResidentResults | None) -> ResidentResults:
        """Returns a set that nothing else holds; one that is held twice is given up.

        Args:
            held: a set that is held; None if there is no set at all.
        """
        spares = self._turns.spares
        tried = [] if held is None else [held]
        found = None
        while spares and found is None:
            spare = spares.popleft()
            if spare.is_free():
                found = spare
                found.was_held = False
            else:
                tried.append(spare)
        spares.extend(each for each in tried if not each.was_held)
        for each in tried:
            each.was_held = True
        if found is not None:
            return found
        return ResidentResults(self._replay.make_leaves(self._donations), self._turns.parts)
