"""HolderCounts: every reference that is not ours is noticed, and so is every way around it."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.host_memory import make_array
from tracegraph.replaying import holders, object_words
from tracegraph.replaying.holders import HolderCounts, can_count
from tracegraph.replaying.tree_watch import TreeWatch
from tracegraph.runtime.jax_interop import wrap_key

needs_counts = pytest.mark.skipif(not holders.CAN_COUNT, reason="counts say nothing here")
stash: list[Any] = []


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    one: Any
    other: Any


class Proxy:
    """Holds its child in an object that is no container."""

    def __init__(self, child: Any) -> None:
        self.cell: Any = (lambda: child).__closure__


jax.tree_util.register_pytree_node(
    Proxy, lambda p: ((p.cell[0].cell_contents,), None), lambda _, children: Proxy(*children)
)


class Owner:
    """Holds a tree and a watch of it, as a set of results does."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.watch = TreeWatch(tree)


def make_leaf() -> Any:
    return make_array(np.zeros(2, np.float32))


def make_key() -> Any:
    return wrap_key(jax.random.key(0).dtype, make_array(np.zeros(2, np.uint32)))


TREES: dict[str, Callable[[], Any]] = {
    "leaf": make_leaf,
    "dict": lambda: {"a": make_leaf(), "b": {"c": make_leaf()}},
    "list": lambda: [make_leaf(), (make_leaf(), [])],
    "node": lambda: Node(make_leaf(), {"a": make_leaf()}),
    "nodes": lambda: [Node(make_leaf(), Node(make_leaf(), None))],
    "key": lambda: {"key": make_key()},
    "one leaf twice": lambda: [make_leaf()] * 2,
    "partial": lambda: jax.tree_util.Partial(max, make_leaf(), key=make_leaf()),
}


def start(name: str) -> tuple[Any, HolderCounts]:
    owner = Owner(TREES[name]())
    return owner, HolderCounts(owner, [owner.tree])


@needs_counts
@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_is_only_ours(name: str):
    owner, counts = start(name)
    for _ in range(3):
        assert counts.are_all()
    assert owner.tree is owner.watch.tree


HOLDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the tree": ("dict", lambda t: t),
    "a leaf": ("dict", lambda t: t["b"]["c"]),
    "an inner dict": ("dict", lambda t: t["b"]),
    "a view": ("dict", lambda t: t["b"].values()),
    "an inner tuple": ("list", lambda t: t[1]),
    "a node": ("nodes", lambda t: t[0].other),
    "the attributes of a node": ("nodes", lambda t: vars(t[0].other)),
    "a typed key": ("key", lambda t: t["key"]),
    "key data": ("key", lambda t: jax.random.key_data(t["key"])),
    "the arguments of a partial": ("partial", lambda t: t.args),
    "a weak reference": ("dict", lambda t: weakref.ref(t["a"])),
    "a weak reference to a node": ("nodes", lambda t: weakref.ref(t[0])),
}


@needs_counts
@pytest.mark.parametrize("what", HOLDS)
def test_what_is_held_is_noticed(what: str):
    name, hold = HOLDS[what]
    owner, counts = start(name)
    held = hold(owner.tree)
    assert not counts.are_all()
    del held
    # Attributes that were looked at stay an object of their own.
    assert counts.are_all() == (what != "the attributes of a node")


@needs_counts
def test_attributes_that_were_held_before_they_are_counted_are_noticed():
    owner = Owner(TREES["nodes"]())
    held = vars(owner.tree[0].other)
    counts = HolderCounts(owner, [owner.tree])
    assert not counts.are_all()
    del held
    assert counts.are_all()


@needs_counts
def test_a_leaf_that_a_node_gives_to_another_is_noticed():
    owner, counts = start("nodes")
    held = owner.tree[0].one
    owner.tree[0].one = None
    # The count of the leaf is what it was.
    assert not counts.are_all()
    assert held is not None


@needs_counts
@pytest.mark.parametrize("keep", [stash.append, lambda tree: stash.append(tree["b"]["c"])])
def test_what_is_held_before_it_is_counted_is_noticed(keep: Callable[[Any], None]):
    owner = Owner(TREES["dict"]())
    keep(owner.tree)
    counts = HolderCounts(owner, [owner.tree])
    assert not counts.are_all()
    stash.clear()
    assert counts.are_all()


@needs_counts
def test_children_that_cannot_be_seen_are_taken_for_held():
    owner = Owner([Proxy(make_leaf())])
    assert not HolderCounts(owner, [owner.tree]).are_all()


@needs_counts
def test_a_list_of_ours_that_the_user_has_too_is_noticed():
    shared = [make_leaf()]
    owner = Owner({"a": shared})
    assert not HolderCounts(owner, [owner.tree]).are_all()
    assert len(shared) == 1


def test_without_the_interpreters_lock_nothing_is_counted(monkeypatch: pytest.MonkeyPatch):
    assert can_count() == holders.CAN_COUNT
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not can_count()


@needs_counts
def test_another_layout_of_objects_is_noticed(monkeypatch: pytest.MonkeyPatch):
    # As if there were another word before the count.
    monkeypatch.setattr(object_words, "_FIRST", object_words._FIRST - 8)
    assert not can_count()
