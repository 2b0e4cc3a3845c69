"""Structures of trees to records of a file and back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.saving import saved_trees
from tracegraph.saving.plain_values import VALUE_TYPES, NamedObject, Names, UnknownNameError
from tracegraph.saving.saved_trees import (
    TREE_TYPES,
    SavedTree,
    TreeNode,
    join_trees,
    pack_tree,
    unpack_tree,
)
from tracegraph.tracing.static_leaves import wrap_static_leaves

codec = RecordCodec((*VALUE_TYPES, *TREE_TYPES))
LEAF = TreeNode("leaf")


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any
    name: str = dataclasses.field(metadata={"static": True}, default="state")


class Box:
    def __init__(self, value: Any, label: str) -> None:
        self.value, self.label = value, label


def flatten_box(box: Any) -> Any:
    return ((jax.tree_util.GetAttrKey("value"), box.value),), [box.label]


def make_box(label: Any, children: Any) -> Box:
    return Box(children[0], label[0])


jax.tree_util.register_pytree_with_keys(Box, flatten_box, make_box)


@jax.tree_util.register_pytree_node_class
class Local:
    def tree_flatten(self) -> Any:
        return (1,), lambda: 0

    @classmethod
    def tree_unflatten(cls, data: Any, children: Any) -> Any:
        return cls()


def carry(tree: Any) -> Any:
    """Returns the structure that a file would give for an object's."""
    structure = jax.tree_util.tree_structure(wrap_static_leaves(tree))
    encoded = codec.encode(pack_tree(structure))
    saved = codec.decode(encoded.tree, encoded.blobs, SavedTree)
    assert unpack_tree(saved, Names()) == structure
    return unpack_tree(saved, Names()).unflatten(range(structure.num_leaves))


@pytest.mark.parametrize(
    "tree",
    [
        0, None, (), [], {}, (0, [1, None]), {"b": 0, "a": {2: 1, 1: 2}}, Pair(0, (1, 2)),
        collections.OrderedDict(z=0, a=1), collections.defaultdict(int, a=1), "relu", [jnp.sin, 0],
        State({"w": 0}, 1, "other"), Box([0, 1], "label"), {"model": Box(State(0, 1), "x")},
        optax.adam(1e-3).init({"w": jnp.ones(2)}), {(1, "a"): 0}, jax.tree_util.Partial(jnp.sin, 1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_structures_come_back_equal(tree: Any) -> None:
    made = carry(tree)
    structure = jax.tree_util.tree_structure(wrap_static_leaves(tree))
    assert jax.tree_util.tree_structure(wrap_static_leaves(made)) == structure
    assert type(made) is type(tree) or type(tree) in (int, float)


def test_a_file_is_as_small_as_the_tree() -> None:
    tree = jax.tree_util.tree_structure([{"w": 0, "b": 1}] * 100)
    encoded = codec.encode(pack_tree(tree))
    assert len(encoded.tree["rows"]) < 10


def test_structures_of_this_process_only_are_refused() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Inner:
        value: Any

    assert carry(Inner(0)) is not None, "found among the registered types"
    for tree in (Local(), collections.defaultdict(lambda: 0, a=1)):
        with pytest.raises(SaveProblem):
            pack_tree(jax.tree_util.tree_structure(tree))


def test_arguments_are_joined_as_jax_flattens_a_call() -> None:
    args, kwargs = (0, {"w": 1}), {"z": 2, "a": (3,)}
    trees = [jax.tree_util.tree_structure(each) for each in args]
    named = {key: jax.tree_util.tree_structure(each) for key, each in kwargs.items()}
    assert join_trees(trees, named) == jax.tree_util.tree_structure((args, kwargs))
    assert join_trees([], {}) == jax.tree_util.tree_structure(((), {}))


def make_record(kind: type, *nodes: TreeNode, data: Any = (), fields: Any = ()) -> SavedTree:
    name = NamedObject(kind.__module__, kind.__qualname__)
    return SavedTree((*nodes, TreeNode("node", len(nodes), data, name, fields)))


@pytest.mark.parametrize(
    "saved",
    [
        SavedTree(()),
        SavedTree((LEAF, LEAF)),
        SavedTree((TreeNode("tuple", 1),)),
        SavedTree((LEAF, TreeNode("tuple", -1))),
        SavedTree((LEAF, TreeNode("none", 1))),
        SavedTree((LEAF, TreeNode("leaf", 1))),
        SavedTree((LEAF, TreeNode("dict", 1, None))),
        SavedTree((LEAF, TreeNode("dict", 1, ("a", "b")))),
        SavedTree((LEAF, LEAF, TreeNode("dict", 2, ("b", "a")))),
        SavedTree((LEAF, LEAF, TreeNode("dict", 2, ("a", "a")))),
        SavedTree((LEAF, TreeNode("dict", 1, ([],)))),
        SavedTree((LEAF, TreeNode("node", 1))),
        SavedTree((LEAF, *[TreeNode("list", 1)] * 600)),
        make_record(State, LEAF, data=("a",), fields=(("params", "step"), ("name",))),
        make_record(State, LEAF, LEAF, data=(), fields=(("params", "step"), ("name",))),
        make_record(State, LEAF, LEAF, data=None, fields=(("params", "step"), ("name",))),
        make_record(Pair, LEAF, fields=(("first", "second"),), data=None),
        make_record(Box, data=("a",)),
        make_record(Box, LEAF, data=None),
    ],
)
def test_records_that_no_tree_has_are_refused(saved: SavedTree) -> None:
    with pytest.raises(ContentProblem):
        unpack_tree(saved, Names())


@pytest.mark.parametrize(
    ("saved", "change"),
    [
        (make_record(collections.Counter, LEAF), "is not registered with JAX as a node of trees"),
        (make_record(dict, LEAF), "is not registered with JAX as a node of trees"),
        (make_record(Pair, LEAF, LEAF, fields=(("second", "first"),)), "has other fields than"),
        (
            make_record(State, LEAF, LEAF, data=("a",), fields=(("step", "params"), ("name",))),
            "has other fields than",
        ),
        (make_record(Pair, LEAF, LEAF), "has other fields than"),
    ],
)
def test_a_class_that_has_changed_is_refused(saved: SavedTree, change: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        unpack_tree(saved, Names())
    assert caught.value.change.startswith(change)


def test_children_that_have_changed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = pack_tree(jax.tree_util.tree_structure(Box(0, "label")))
    assert saved.paths == (".value",)
    monkeypatch.setattr(saved_trees, "_list_paths", lambda tree: (".other",))
    with pytest.raises(UnknownNameError) as caught:
        unpack_tree(saved, Names())
    assert caught.value.change == "has other children than when the file was saved"
