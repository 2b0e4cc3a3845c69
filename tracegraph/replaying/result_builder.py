"""ResultBuilder: from the buffers of a replay to the tree that the user's function returns.

A subtree that holds resident leaves only, such as the state of a train step, is the same tree at
every call: it is kept and handed out again, unless the user changed a container of it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegraph.jax_internals import is_key_dtype
from tracegraph.replaying.tree_watch import TreeWatch
from tracegraph.runtime.jax_interop import wrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.signature import is_leaf_tree


class ResultBuilder:
    """Builds the results of one captured graph.

    Args:
        replay: whose buffers hold the flat results.
        tree: structure of the results.
        avals: JAX's abstract value of each flat result.

    Attributes:
        build: returns the tree of results of the last replay.
    """

    def __init__(self, replay: Replay, tree: Any, avals: list[Any]) -> None:
        self._replay = replay
        self._takers = [self._make_taker(index, aval) for index, aval in enumerate(avals)]
        numbered = jax.tree_util.tree_unflatten(tree, range(len(avals)))
        parts, self._outer = jax.tree_util.tree_flatten(numbered, is_leaf=self._is_resident)
        self._parts = [
            self._takers[part] if type(part) is int else _ResidentTree(self._takers, part)
            for part in parts
        ]
        is_single = is_leaf_tree(self._outer)
        is_tuple = self._outer == jax.tree_util.tree_structure((0,) * len(self._parts))
        self.is_plain_leaf = (
            is_leaf_tree(tree)
            and isinstance(avals[0].dtype, np.dtype)
            and (avals[0].dtype != jax.dtypes.float0)
        )
        build = self._build_tuple if is_tuple else self._build_tree
        self.build: Callable[[], Any] = self._parts[0] if is_single else build

    @property
    def resident_trees(self) -> list[_ResidentTree]:
        """The subtrees that are handed out again and again, with their flat indices."""
        return [part for part in self._parts if isinstance(part, _ResidentTree)]

    def _build_tuple(self) -> Any:
        return tuple([part() for part in self._parts])

    def _build_tree(self) -> Any:
        return self._outer.unflatten([part() for part in self._parts])

    def _is_resident(self, node: Any) -> bool:
        """True for a container whose leaves are all resident."""
        leaves = jax.tree_util.tree_leaves(node)
        if type(node) is int or not leaves:
            return False
        return all(self._replay.is_resident_output[index] for index in leaves)

    def _make_taker(self, index: int, aval: Any) -> Callable[[], Any]:
        """Returns a function that makes one flat result."""
        if aval.dtype == jax.dtypes.float0:
            return lambda: np.zeros(aval.shape, jax.dtypes.float0)
        take = self._replay.make_taker(index)
        return (lambda: wrap_key(aval.dtype, take())) if is_key_dtype(aval.dtype) else take


class _ResidentTree:
    """A subtree of resident leaves.

    Attributes:
        indices: of its leaves among the flat results.
        remember: hears of the watch of the tree that is handed out, None when there is none.
    """

    def __init__(self, takers: list[Callable[[], Any]], numbered: Any) -> None:
        self.indices, self.structure = jax.tree_util.tree_flatten(numbered)
        self.remember: Callable[[TreeWatch | None], None] = _ignore
        self._takers = [takers[index] for index in self.indices]
        self._watch: TreeWatch | None = None

    def __call__(self) -> Any:
        """Returns the tree, the same object as last time if nobody changed it."""
        watch = self._watch
        if watch is not None and watch.is_checked:
            # Whoever checked it remembers it already.
            watch.is_checked = False
            return watch.tree
        if watch is None or not watch.is_unchanged(watch.tree):
            watch = TreeWatch(self.structure.unflatten([take() for take in self._takers]))
            self._watch = watch
        self.remember(watch)
        return watch.tree

    def forget(self) -> None:
        """Lets go of the tree, before its leaves may be detached."""
        self._watch = None
        self.remember(None)


def _ignore(_watch: TreeWatch | None) -> None:
    """Hears of the tree for no slot."""
