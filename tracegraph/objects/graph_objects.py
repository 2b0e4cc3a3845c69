"""Objects of flax.nnx as trees: a structure that belongs to the key, and arrays.

flax is optional: it is never imported here, and used only where the user has imported it. All names
of it are public.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl

# Most nodes of a tree.
_PLAIN = frozenset(
    (ArrayImpl, Array, np.ndarray, dict, list, tuple, type(None), bool, int, float, complex, str)
)
# Names the inside of a traced call among nnx's update contexts.
_INNER = "tracegraph"


def find_nnx() -> Any:
    """Returns the module `flax.nnx`; None if the user has not imported it."""
    return sys.modules.get("flax.nnx")


def is_object(nnx: Any, value: Any) -> bool:
    """True for a Module, Optimizer, Metric, Rngs, Variable or another node of an object graph."""
    return (
        type(value) not in _PLAIN
        and not isinstance(value, jax.Ref)
        and nnx.graph.is_graph_node(value)
    )


def has_objects(tree: Any) -> bool:
    """True for a tree that holds an object of nnx."""
    nnx = find_nnx()
    if nnx is None:
        return False
    flat, _ = flatten_to_objects(nnx, tree)
    return any(is_object(nnx, leaf) for _, leaf in flat)


def flatten_to_objects(nnx: Any, tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Flattens a tree down to its objects; returns paths with leaves, and the structure.

    A `nnx.State` is a tree of arrays: what is passed in one is not updated.
    """

    def is_leaf(value: Any) -> bool:
        return type(value) not in _PLAIN and (is_object(nnx, value) or isinstance(value, nnx.State))

    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)


@dataclasses.dataclass(frozen=True)
class SplitObject:
    """An object, split.

    Attributes:
        graphdef: its structure, and where it is shared with objects before it.
        state: its arrays.
    """

    graphdef: Any = dataclasses.field(metadata={"static": True})
    state: Any


jax.tree_util.register_dataclass(SplitObject)


def split_objects(nnx: Any, tree: Any, tag: Any) -> Any:
    """Returns the tree with its objects split, those that are shared once only."""

    def split(context: Any, _path: Any, _prefix: Any, node: Any) -> SplitObject:
        return SplitObject(*context.split(node))

    return nnx.to_tree(tree, split_fn=split, ctxtag=tag)


def merge_objects(nnx: Any, tree: Any, tag: Any, *, is_inner: bool) -> Any:
    """Returns the tree with its objects put together, or updated where they are the user's."""

    def merge(context: Any, _path: Any, _prefix: Any, node: SplitObject) -> Any:
        return context.merge(node.graphdef, node.state)

    return nnx.from_tree(
        tree,
        merge_fn=merge,
        is_node_leaf=is_split,
        is_leaf=is_split,
        is_inner=is_inner,
        ctxtag=tag,
    )


def is_split(value: Any) -> bool:
    """True for an object that was split."""
    return isinstance(value, SplitObject)


def find_structure(objects: list[SplitObject]) -> Any:
    """Returns the structure of split objects, wherever they come from."""
    plain = [SplitObject(each.graphdef.with_no_outer_index(), each.state) for each in objects]
    return jax.tree_util.tree_structure(plain)


def run_on_copies(nnx: Any, function: Any, objects: list[Any], call: Any) -> tuple[Any, Any]:
    """Runs a function on new objects that are made of split ones.

    Args:
        nnx: the module.
        function: takes the arguments that ``call`` makes.
        objects: the split objects.
        call: from objects to positional and keyword arguments.

    Returns:
        The same objects, split as the function left them, and its result with its objects split.
    """
    with nnx.update_context(_INNER):
        inner = merge_objects(nnx, objects, _INNER, is_inner=True)
        args, kwargs = call(inner)
        result = function(*args, **kwargs)
        return split_objects(nnx, (inner, result), _INNER)
