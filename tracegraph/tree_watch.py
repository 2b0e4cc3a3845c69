"""Watching trees: is this still the tree that was looked at before, leaf for leaf?

A captured train step gets the state tree back that it returned. Comparing the root's identity costs
nothing, but dicts and lists can be changed in place. So for each container that can change, its
children are compared by identity with those seen before, in one call that runs at the speed of C.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any

import jax

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class TreeWatch:
    """Remembers a tree and tells whether it is unchanged.

    Args:
        tree: any pytree; the watch keeps it, and so its leaves, alive.

    Example:
        >>> state = {"w": [1.5, 2.5]}
        >>> watch = TreeWatch(state)
        >>> watch.is_unchanged(state)
        True
        >>> state["w"][0] = 3.5
        >>> watch.is_unchanged(state)
        False
    """

    __slots__ = ("_dicts", "_lists", "_others", "tree")

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._others: list[tuple[Any, tuple[Any, ...]]] = []
        self._visit(tree)

    def is_unchanged(self, tree: Any) -> bool:
        """True when this is the same tree object and no container in it was changed."""
        if tree is not self.tree:
            return False
        for mapping, keys, values in self._dicts:
            if len(mapping) != len(keys):
                return False
            if not all(map(operator.is_, mapping, keys)):
                return False
            if not all(map(operator.is_, mapping.values(), values)):
                return False
        for sequence, items in self._lists:
            if len(sequence) != len(items) or not all(map(operator.is_, sequence, items)):
                return False
        return all(_is_same_node(node, children) for node, children in self._others)

    def _visit(self, node: Any) -> None:
        if type(node) in _DICTS:
            self._dicts.append((node, tuple(node), tuple(node.values())))
            children: tuple[Any, ...] = tuple(node.values())
        elif type(node) is list:
            self._lists.append((node, tuple(node)))
            children = tuple(node)
        else:
            children = _flatten_once(node)
            if children and not _is_immutable(node):
                self._others.append((node, children))
        for child in children:
            self._visit(child)


def _is_same_node(node: Any, children: tuple[Any, ...]) -> bool:
    present = _flatten_once(node)
    return len(present) == len(children) and all(map(operator.is_, present, children))


def _flatten_once(node: Any) -> tuple[Any, ...]:
    """Returns the children of a node as JAX sees them; none for a leaf."""
    flat = jax.tree_util.default_registry.flatten_one_level(node)
    return () if flat is None else tuple(flat[0])


def _is_immutable(node: Any) -> bool:
    if isinstance(node, tuple):
        return True
    return dataclasses.is_dataclass(node) and node.__dataclass_params__.frozen  # type: ignore[attr-defined]
