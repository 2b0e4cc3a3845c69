"""Watching trees: is this still the tree that was looked at before, leaf for leaf?

A captured train step gets the state tree back that it returned. Comparing the root's identity costs
nothing, but dicts and lists can be changed in place. So for each container that can change, its
children are compared by identity with those seen before, in one call that runs at the speed of C.

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
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

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
        "_identities",
        "_items",
        "_lengths",
        "_others",
        "_sized",
        "_views",
        "is_checked",
        "tree",
    )

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.is_checked = False
        self._dicts: list[dict[Any, Any]] = []
        # Views follow what happens to their dict, so that each call has only to walk them.
        self._views: list[Iterable[Any]] = []
        self._sized: list[list[Any] | dict[Any, Any]] = []
        self._others: list[tuple[Any, _Parts]] = []
        self._visit(tree)
        self._copies = [mapping.copy() for mapping in self._dicts]
        self._lengths = [len(each) for each in self._sized]
        # Kept: what identities stand for must not go and come back as other objects.
        self._items = tuple(itertools.chain.from_iterable(self._views))
        self._identities = read_identities(self._items)

    def is_unchanged(self, tree: Any) -> bool:
        """True when this is the same tree object and no container in it was changed."""
        # A state has hundreds of leaves, so what is done per leaf is done without a loop of Python.
        if tree is not self.tree:
            return False
        comparing.by_identity = True
        try:
            if self._copies != self._dicts:
                return False
        finally:
            comparing.by_identity = False
        if read_identities(tuple(itertools.chain.from_iterable(self._views))) != self._identities:
            return False
        if self._sized and list(map(len, self._sized)) != self._lengths:
            return False
        return not self._others or all(_has_parts(node, parts) for node, parts in self._others)

    def _visit(self, node: Any) -> None:
        if type(node) is dict and all(type(value) is Array for value in node.values()):
            self._dicts.append(node)
            return
        if type(node) in _DICTS:
            # Keys first, then values: where one dict ends shows in the order, if it is not empty.
            self._views += (node.keys(), node.values())
            if not node:
                self._sized.append(node)
            children: tuple[Any, ...] = tuple(node.values())
        elif type(node) is list:
            self._views.append(node)
            self._sized.append(node)
            children = tuple(node)
        else:
            parts = _flatten_once(node)
            if parts is None:
                return
            children = parts.children
            if not _is_immutable(node, children):
                self._others.append((node, parts))
        for child in children:
            self._visit(child)


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
