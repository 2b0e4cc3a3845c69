"""Static leaves: leaves of arguments and results that are no arrays, as a model's activation.

Note [Static leaves]. A static leaf is part of its tree's structure: `wrap_static_leaves` puts a
node without children in its place, which holds it. So structures with different static leaves
differ, and all that flattens the tree sees arrays only. When a structure makes a tree again, the
node becomes the leaf that it holds, so that users only see trees of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.constraints.frames import locate_function
from tracegraph.constraints.leaf_kinds import is_static
from tracegraph.constraints.violation import Violation


class StaticLeaf:
    """What stands for a static leaf in a tree, and in the tree's structure.

    Equal ones hold the same object, or two that are equal with `==` and have the same kind.

    Args:
        value: the leaf; it can be hashed.

    Example:
        >>> StaticLeaf("relu") == StaticLeaf("relu"), StaticLeaf((1,)) == StaticLeaf((True,))
        (True, False)
    """

    __slots__ = ("_kind", "value")

    def __init__(self, value: Any) -> None:
        self.value, self._kind = value, find_static_kind(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return NotImplemented
        if self.value is other.value:
            return True
        return bool(self._kind == other._kind and self.value == other.value)

    def __hash__(self) -> int:
        return hash((self._kind, self.value))

    def __repr__(self) -> str:
        return f"static {self.value!r}"


# A structure makes the leaf itself: what is made from it is the user's tree, see the Note.
jax.tree_util.register_pytree_node(
    StaticLeaf, lambda leaf: ((), leaf), lambda leaf, _children: leaf.value
)


def wrap_static_leaves(tree: Any) -> Any:
    """Returns the tree with a node for every static leaf; the same object if it has none.

    Example:
        >>> jax.tree.leaves(wrap_static_leaves({"name": "relu", "scale": 2.0}))
        [2.0]
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    is_wrapped = list(map(is_static, leaves))
    if not any(is_wrapped):
        return tree
    pairs = zip(leaves, is_wrapped, strict=True)
    return structure.unflatten([StaticLeaf(leaf) if held else leaf for leaf, held in pairs])


def list_static_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the static leaves of a tree's structure, each with its path."""
    blank = object()
    flat = jax.tree_util.tree_leaves_with_path(tree.unflatten([blank] * tree.num_leaves))
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if leaf is not blank]


def find_changed_results(function: Callable[..., Any], first: Any, second: Any) -> list[Violation]:
    """Finds static leaves of the results that Python makes anew each time, such as a clock's text.

    Objects that are known by their identity only, such as functions, may be made anew: those of the
    first trace are returned.

    Args:
        function: the user's function.
        first: the tree of its results in one trace.
        second: the same in another.
    """
    before, after = list_static_leaves(first), list_static_leaves(second)
    return [
        Violation(
            "python-work",
            f"`result{path}` is {one!r} at one trace and {other!r} at the next",
            locate_function(function),
            "a static leaf of the results is made once and returned by every replay",
            "make it outside of the captured function",
        )
        for (path, one), (_, other) in zip(before, after, strict=False)
        if type(one) is not type(other)
        or (type(one).__eq__ is not object.__eq__ and StaticLeaf(one) != StaticLeaf(other))
    ]


def find_static_kind(value: Any) -> Any:
    """Returns what distinguishes a static value from others that are equal in Python.

    In Python 1, 1.0 and True are equal, and 0.0 and -0.0; in a traced function they are not. That
    holds for items of tuples and frozensets and for fields of dataclasses, too.

    Example:
        >>> find_static_kind((1, -0.0)) == find_static_kind((True, 0.0))
        False
    """
    if isinstance(value, tuple):
        return (type(value), *(find_static_kind(item) for item in value))
    if isinstance(value, frozenset):
        return (type(value), frozenset((item, find_static_kind(item)) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.compare)
        return (type(value), *(find_static_kind(getattr(value, name, None)) for name in names))
    return (type(value), repr(value)) if isinstance(value, float | complex) else type(value)
