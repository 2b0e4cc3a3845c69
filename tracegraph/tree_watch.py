"""Watching trees: is this still the tree that was looked at before, leaf for leaf?

A captured train step gets the state tree back that it returned. Comparing the root's identity costs
nothing, but dicts and lists can be changed in place. So for each container that can change, its
children are compared by identity with those seen before, in one call that runs at the speed of C.
A tree that was unchanged once, and can change in its dicts only, is left to Python's own watchers
from then on, where it has them; see Note [Dict watchers].

Note [Dicts of arrays]. Python compares two dicts faster than anything else that looks at all their
items: identical values count as equal without being asked. A value that is not identical is asked,
the one of the first dict first. So a dict that holds only arrays of graphs is compared with a copy
of itself, while such arrays say that they differ from whatever they are compared with.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence, Sized
from typing import Any, NamedTuple

import jax

from tracegraph.dict_watch import DictWatch, watch_dicts
from tracegraph.identities import read_identities
from tracegraph.runtime.array import Array, comparing

_DICTS = (dict, collections.OrderedDict)


class TreeWatch:
    """Remembers a tree and tells whether it is unchanged.

    Args:
        tree: any pytree; the watch keeps it, and so its leaves, alive.

    Attributes:
        tree: the tree.
        is_checked: True after a check in this call of a captured function; no second one is needed.

    Example:
        >>> state = {"w": [1.5, 2.5]}
        >>> watch = TreeWatch(state)
        >>> watch.is_unchanged(state)
        True
        >>> state["w"][0] = 3.5
        >>> watch.is_unchanged(state)
        False
    """

    __slots__ = (
        "_copies",
        "_dicts",
        "_lists",
        "_mappings",
        "_others",
        "_views",
        "_watch",
        "is_checked",
        "tree",
    )

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.is_checked = False
        # Dicts of arrays, and all other mappings.
        self._dicts: list[dict[Any, Any]] = []
        self._mappings: list[dict[Any, Any]] = []
        lists: list[list[Any]] = []
        self._others: list[tuple[Any, _Parts]] = []
        self._visit(tree, lists)
        self._copies = [mapping.copy() for mapping in self._dicts]
        # Keys first, then values: where one dict ends shows in the order, if it is not empty. Views
        # follow what happens to their dict, so that each call has only to walk them.
        views = [view for each in self._mappings for view in (each.keys(), each.values())]
        self._views = _Items(views, [each for each in self._mappings if not each])
        self._lists = _Items(lists, lists)
        self._watch: DictWatch | None = None

    def is_unchanged(self, tree: Any) -> bool:
        """True when this is the same tree object and no container in it was changed."""
        if tree is not self.tree:
            return False
        watch = self._watch
        if watch is None or watch.has_changed:
            # Watched again before the look: what is changed in the meantime must not be missed.
            self._watch = None
            watch = self._start_watch()
            if not self._has_same_dicts():
                return False
            self._watch = watch
        if not self._lists.are_same():
            return False
        return not self._others or all(_has_parts(node, parts) for node, parts in self._others)

    def _start_watch(self) -> DictWatch | None:
        if any(type(each) is not dict for each in self._mappings):
            return None
        return watch_dicts((*self._dicts, *self._mappings))

    def _has_same_dicts(self) -> bool:
        # A state has hundreds of leaves, so what is done per leaf is done without a loop of Python.
        comparing.by_identity = True
        try:
            if self._copies != self._dicts:
                return False
        finally:
            comparing.by_identity = False
        return self._views.are_same()

    def _visit(self, node: Any, lists: list[list[Any]]) -> None:
        if type(node) is dict and all(type(value) is Array for value in node.values()):
            self._dicts.append(node)
            return
        if type(node) in _DICTS:
            self._mappings.append(node)
            children: tuple[Any, ...] = tuple(node.values())
        elif type(node) is list:
            lists.append(node)
            children = tuple(node)
        else:
            parts = _flatten_once(node)
            if parts is None:
                return
            children = parts.children
            if not _is_immutable(node, children):
                self._others.append((node, parts))
        for child in children:
            self._visit(child, lists)


class _Items:
    """The items of some containers, as they were.

    Args:
        containers: looked at again and again.
        sized: those whose length must be asked for.
    """

    __slots__ = ("_containers", "_identities", "_items", "_lengths", "_sized")

    def __init__(self, containers: Sequence[Iterable[Any]], sized: Sequence[Sized]) -> None:
        self._containers, self._sized = containers, sized
        # Kept: what identities stand for must not go and come back as other objects.
        self._items = tuple(itertools.chain.from_iterable(containers))
        self._identities = read_identities(self._items)
        self._lengths = [len(each) for each in sized]

    def are_same(self) -> bool:
        """True when the containers hold the same objects in the same order."""
        if not self._containers:
            return True
        items = tuple(itertools.chain.from_iterable(self._containers))
        if read_identities(items) != self._identities:
            return False
        return not self._sized or list(map(len, self._sized)) == self._lengths


class _Parts(NamedTuple):
    """A node as JAX sees it: what it holds, and what else makes its structure."""

    children: tuple[Any, ...]
    metadata: Any


def _flatten_once(node: Any) -> _Parts | None:
    """Returns the parts of a node; None for a leaf."""
    flat = jax.tree_util.default_registry.flatten_one_level(node)
    return None if flat is None else _Parts(tuple(flat[0]), flat[1])


def _has_parts(node: Any, parts: _Parts) -> bool:
    present = _flatten_once(node)
    return (
        present is not None
        and len(present.children) == len(parts.children)
        and all(map(operator.is_, present.children, parts.children))
        and bool(present.metadata == parts.metadata)
    )


def _is_immutable(node: Any, children: tuple[Any, ...]) -> bool:
    """True when the node cannot come to hold other children: tuples and frozen dataclasses."""
    if (
        node is None
        or type(node) is tuple
        or (isinstance(node, tuple) and hasattr(node, "_fields"))
    ):
        return True
    if not (dataclasses.is_dataclass(node) and node.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return False
    # A frozen dataclass may hand out the items of a list that it holds: the list can change.
    held = {id(getattr(node, field.name, None)) for field in dataclasses.fields(node)}
    return all(id(child) in held for child in children)
