"""Watching trees: is this still the tree that was looked at before, leaf for leaf?

A captured train step gets the state tree back that it returned. Comparing the root's identity costs
nothing, but dicts and lists can be changed in place. CPython tells of changes of dicts, see
`dict_watch`. The children of every other container that can change, and of the dicts where CPython
does not tell, are compared by identity with those seen before, at the speed of C.

Note [Dicts of arrays]. Python compares two dicts faster than anything else that looks at all their
items: identical values count as equal without being asked. A value that is not identical is asked,
the one of the first dict first. So a dict that holds only arrays of graphs is compared with a copy
of itself, while such arrays say that they differ from whatever they are compared with.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tracegraph.replaying.dict_watch import DictWatch, count_changes
from tracegraph.replaying.identities import read_identities
from tracegraph.runtime.array import Array, comparing


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
        "_changes",
        "_copies",
        "_dict_items",
        "_dict_watch",
        "_dicts",
        "_is_heard",
        "_items",
        "_others",
        "is_checked",
        "tree",
    )

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.is_checked = False
        found = _Containers([], [], [], [], [])
        _visit(tree, found)
        self._dict_watch = DictWatch((*found.array_dicts, *found.dicts))
        self._is_heard = self._dict_watch.is_complete
        # Read before anything is looked at: what changes meanwhile is looked at again.
        self._changes = count_changes()
        self._dicts, self._others = found.array_dicts, found.others
        self._copies = [mapping.copy() for mapping in self._dicts]
        self._dict_items = _Items(found.dicts)
        self._items = _Items((*found.ordered, *found.lists))

    def is_unchanged(self, tree: Any) -> bool:
        """True when this is the same tree object and no container in it was changed."""
        # A state has hundreds of leaves, so what is done per leaf is done without a loop of Python.
        if tree is not self.tree:
            return False
        if self._is_heard:
            changes = count_changes()
            if changes != self._changes:
                if not self._has_same_dicts():
                    return False
                self._changes = changes
        elif not self._has_same_dicts():
            return False
        if not self._items.are_same():
            return False
        return not self._others or all(_has_parts(node, parts) for node, parts in self._others)

    def _has_same_dicts(self) -> bool:
        comparing.by_identity = True
        try:
            if self._copies != self._dicts:
                return False
        finally:
            comparing.by_identity = False
        return self._dict_items.are_same()


class _Items:
    """Which objects some containers hold.

    Args:
        containers: dicts and lists.
    """

    __slots__ = ("_containers", "_held", "_identities", "_lengths", "_views")

    def __init__(self, containers: Sequence[dict[Any, Any] | list[Any]]) -> None:
        self._containers = tuple(containers)
        # Views follow what happens to their dict, so that each call has only to walk them.
        self._views: list[Iterable[Any]] = []
        for each in containers:
            self._views += (each.keys(), each.values()) if isinstance(each, dict) else (each,)
        # Where one container ends and the next begins.
        self._lengths = list(map(len, containers))
        # Kept: what identities stand for must not go and come back as other objects.
        self._held = tuple(functools.reduce(operator.iadd, self._views, []))
        self._identities = read_identities(self._held)

    def are_same(self) -> bool:
        """True while the containers hold the same objects in the same order."""
        if not self._views:
            return True
        # Lists are joined without a look at each item.
        held = tuple(functools.reduce(operator.iadd, self._views, []))
        return (
            read_identities(held) == self._identities
            and list(map(len, self._containers)) == self._lengths
        )


class _Containers(NamedTuple):
    """The containers of a tree that can change: those that can be watched, and the others."""

    array_dicts: list[dict[Any, Any]]
    dicts: list[dict[Any, Any]]
    ordered: list[collections.OrderedDict[Any, Any]]
    lists: list[list[Any]]
    others: list[tuple[Any, _Parts]]


def _visit(node: Any, found: _Containers) -> None:
    """Sorts a node and what it holds."""
    kind = type(node)
    if kind is dict and all(type(value) is Array for value in node.values()):
        found.array_dicts.append(node)
        return
    if kind is dict:
        found.dicts.append(node)
        children: tuple[Any, ...] = tuple(node.values())
    elif kind is collections.OrderedDict:
        # Its order is not in the dict, so nobody tells of its changes.
        found.ordered.append(node)
        children = tuple(node.values())
    elif kind is list:
        found.lists.append(node)
        children = tuple(node)
    else:
        parts = _flatten_once(node)
        if parts is None:
            return
        children = parts.children
        if not _is_immutable(node, children):
            found.others.append((node, parts))
    for child in children:
        _visit(child, found)


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
