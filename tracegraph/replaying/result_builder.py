"""ResultBuilder: from the buffers of a replay to the tree that the user's function returns.

A subtree that holds resident leaves only, such as the state of a train step, is the same tree at
every call: it is kept and returned again, unless the user changed a container of it in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.jax_internals import is_key_dtype
from tracegraph.replaying.tree_watch import TreeWatch
from tracegraph.runtime.jax_interop import wrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.signature import is_leaf_tree
from tracegraph.tracing.static_leaves import wrap_static_leaves


class ResultBuilder:
    """Builds the results of one captured graph.

    Args:
        replay: whose buffers hold the flat results.
        tree: structure of the results.
        avals: JAX's abstract value of each flat result.

    Attributes:
        build: returns the tree of results of the last replay.
        resident_trees: the subtrees that are returned again and again.
        is_plain_leaf: True when the tree is one plain array.
    """

    def __init__(self, replay: Replay, tree: Any, avals: Sequence[Any]) -> None:
        takers = [_make_taker(replay, index, aval) for index, aval in enumerate(avals)]
        is_resident = functools.partial(_is_resident, replay.is_resident_output)
        numbered = wrap_static_leaves(jax.tree_util.tree_unflatten(tree, range(len(avals))))
        parts, outer = jax.tree_util.tree_flatten(numbered, is_leaf=is_resident)
        built = [
            takers[part] if type(part) is int else _ResidentTree(takers, part) for part in parts
        ]
        self.resident_trees = [part for part in built if isinstance(part, _ResidentTree)]
        self.is_plain_leaf = (
            is_leaf_tree(tree)
            and isinstance(avals[0].dtype, np.dtype)
            and (avals[0].dtype != jax.dtypes.float0)
        )
        self.build = _join_parts(outer, built)


def _join_parts(outer: Any, parts: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Returns a function that makes the parts of a tree, and the tree of them."""
    if is_leaf_tree(outer):
        return parts[0]
    if outer == jax.tree_util.tree_structure((0,) * len(parts)):
        return lambda: tuple([part() for part in parts])
    return lambda: outer.unflatten([part() for part in parts])


def _is_resident(is_resident_output: Sequence[bool], node: Any) -> bool:
    """True for a container whose leaves are all resident."""
    leaves = jax.tree_util.tree_leaves(node)
    if type(node) is int or not leaves:
        return False
    return all(is_resident_output[index] for index in leaves)


def _make_taker(replay: Replay, index: int, aval: Any) -> Callable[[], Any]:
    """Returns a function that makes one flat result."""
    if aval.dtype == jax.dtypes.float0:
        return lambda: np.zeros(aval.shape, jax.dtypes.float0)
    take = replay.make_taker(index)
    return (lambda: wrap_key(aval.dtype, take())) if is_key_dtype(aval.dtype) else take


class _ResidentTree:
    """A subtree of resident leaves.

    Attributes:
        indices: of its leaves among the flat results.
        remember: is called with the watch of the returned tree, None when there is none.
    """

    def __init__(self, takers: list[Callable[[], Any]], numbered: Any) -> None:
        self.indices, self.structure = jax.tree_util.tree_flatten(numbered)
        self.remember: Callable[[TreeWatch | None], None] = _ignore
        self._takers = [takers[index] for index in self.indices]
        self._watch: TreeWatch | None = None

    def __call__(self) -> Any:
        """Returns the tree, the same object as last time if it is unchanged."""
        watch = self._watch
        if watch is not None and watch.is_checked:
            # The slot that checked it remembers it already.
            watch.is_checked = False
            return watch.tree
        if watch is None or not watch.is_unchanged(watch.tree):
            watch = TreeWatch(self.structure.unflatten([take() for take in self._takers]))
            self._watch = watch
        self.remember(watch)
        return watch.tree

    def forget(self) -> None:
        """Drops the tree, before its leaves may be detached."""
        self._watch = None
        self.remember(None)


def _ignore(_watch: TreeWatch | None) -> None:
    """Remembers nothing: no slot takes the tree."""
