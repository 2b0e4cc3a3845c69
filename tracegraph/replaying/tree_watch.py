"""Watching trees: is this still the tree that was looked at before, leaf for leaf?

A captured train step gets the state tree back that it returned. Comparing the root's identity costs
nothing, but what is in it can be changed in place. CPython counts the changes of dicts, see
`dict_watch.py` and `dict_tags.py`: while the count is unchanged, they are not looked at. Lists are
compared with what they held by their memory, see `list_items.py`. The children of every other
container that can change, and of dicts whose changes are not counted, are compared by identity with
those seen before, at the speed of C.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tracegraph.replaying.dict_tags import DictTags, has_tags
from tracegraph.replaying.dict_watch import DictWatch, count_changes, read_count
from tracegraph.replaying.identities import Identities
from tracegraph.replaying.list_items import CAN_READ_LISTS, ListItems
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl, PRNGKeyArray

# Python 3.12 gave tags up and has watchers.
_watch_dicts: type[DictTags | DictWatch] = DictTags if has_tags() else DictWatch


class TreeWatch:
    """Remembers a tree and says whether it is unchanged.

    Args:
        tree: any pytree; the watch keeps it, and so its leaves, alive.

    Attributes:
        tree: the tree.
        glance: a function of C. The tree is unchanged if it returns `seen`; else `is_unchanged`
            must be asked. For the hot path, where `is_unchanged` itself would be one frame more.
        seen: what it returned when the tree was looked at.

    Example:
        >>> state = {"w": [1.5, 2.5]}
        >>> watch = TreeWatch(state)
        >>> watch.is_unchanged(state)
        True
        >>> state["w"][0] = 3.5
        >>> watch.is_unchanged(state)
        False
    """

    __slots__ = ("_counted", "_dicts", "_lists", "_others", "_uncounted", "glance", "seen", "tree")

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        found = _Containers([], [], [], [])
        _visit(tree, found)
        self._dicts = dicts = _watch_dicts(found.dicts)
        # Read before anything is looked at: what changes meanwhile is looked at again.
        self.seen: Any = dicts.read()
        self._counted = _Items(dicts.counted) if dicts.counted else None
        lists, uncounted = found.lists, (*dicts.uncounted, *found.ordered)
        if not CAN_READ_LISTS:
            lists, uncounted = [], (*uncounted, *lists)
        self._lists = ListItems(lists) if lists else None
        self._uncounted = _Items(uncounted) if uncounted else None
        self._others = found.others
        # Two new objects are never equal.
        self.glance: Callable[[], Any] = object
        if self._lists is None and self._uncounted is None and not self._others:
            self.glance = read_count if dicts.read is count_changes else dicts.read
            if self._counted is None:
                # Nothing can change.
                self.glance, self.seen = bool, False

    def is_unchanged(self, tree: Any) -> bool:
        """True when this is the same tree object and no container in it was changed."""
        # A state has hundreds of leaves, so what is done per leaf is done without a loop of Python.
        if tree is not self.tree:
            return False
        if self._counted is not None:
            seen = self._dicts.read()
            if seen != self.seen:
                if not self._counted.are_same():
                    return False
                self.seen = seen
        if self._lists is not None and not self._lists.are_same():
            return False
        if self._uncounted is not None and not self._uncounted.are_same():
            return False
        return not self._others or all(_has_parts(node, parts) for node, parts in self._others)


class _Items:
    """Which objects some containers hold.

    Args:
        containers: dicts and lists.
    """

    __slots__ = ("_containers", "_identities", "_lengths", "_views")

    def __init__(self, containers: Sequence[dict[Any, Any] | list[Any]]) -> None:
        self._containers = tuple(containers)
        # Views follow what happens to their dict, so that each call has only to walk them.
        self._views: list[Iterable[Any]] = []
        for each in containers:
            self._views += (each.keys(), each.values()) if isinstance(each, dict) else (each,)
        # Where one container ends and the next begins.
        self._lengths = list(map(len, containers))
        self._identities = Identities(self._list_items())

    def are_same(self) -> bool:
        """True while the containers hold the same objects in the same order."""
        # As `_list_items`, without its frame.
        items: list[Any] = []
        for view in self._views:
            items += view
        return self._identities.are_of(tuple(items)) and (
            len(self._lengths) == 1 or list(map(len, self._containers)) == self._lengths
        )

    def _list_items(self) -> tuple[Any, ...]:
        # One step per container, none per item.
        items: list[Any] = []
        for view in self._views:
            items += view
        return tuple(items)


class _Containers(NamedTuple):
    """The containers of a tree that can change.

    Attributes:
        dicts: exact dicts, whose changes can be counted.
        lists: exact lists.
        ordered: each `OrderedDict`: its order is not in the dict, a change of it is not counted.
        others: every other container with its parts.
    """

    dicts: list[dict[Any, Any]]
    lists: list[list[Any]]
    ordered: list[collections.OrderedDict[Any, Any]]
    others: list[tuple[Any, _Parts]]


def _visit(node: Any, found: _Containers) -> None:
    """Sorts a node and what it holds."""
    kind = type(node)
    # Most nodes, and the only ones whose number is large.
    if kind is Array or kind is ArrayImpl:
        return
    if kind is dict:
        found.dicts.append(node)
        children: tuple[Any, ...] = tuple(node.values())
    elif kind is collections.OrderedDict:
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


# What a watch consists of, besides plain containers.
WATCH_TYPES = (TreeWatch, DictWatch, DictTags, _Items, Identities, ListItems, _Parts)


def list_nodes(tree: Any) -> list[Any]:
    """Returns the containers of a tree, from the outermost inwards, and its typed keys."""
    if type(tree) is PRNGKeyArray:
        return [tree]
    parts = _flatten_once(tree)
    if parts is None:
        return []
    return [tree, *(node for child in parts.children for node in list_nodes(child))]


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
    # A frozen dataclass may return the items of a list that it holds: the list can change.
    held = {id(getattr(node, field.name, None)) for field in dataclasses.fields(node)}
    return all(id(child) in held for child in children)
