"""TreeWatch: every change of a tree is seen, and an unchanged tree is recognised."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.fakes.host_memory import make_array
from tracegraph.replaying import dict_watch, tree_watch
from tracegraph.replaying.dict_tags import DictTags, has_tags
from tracegraph.replaying.dict_watch import DictWatch, DictWatcher, has_watchers
from tracegraph.replaying.tree_watch import TreeWatch

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(params=["heard", "tagged", "compared"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Changes of dicts are notified or numbered by Python; they and lists can be compared."""
    if not {"heard": has_watchers, "tagged": has_tags, "compared": lambda: True}[request.param]():
        pytest.skip("this Python does not tell of changes of dicts in this way")
    monkeypatch.setattr(
        tree_watch, "_watch_dicts", DictTags if request.param == "tagged" else DictWatch
    )
    if request.param == "compared":
        monkeypatch.setattr(tree_watch, "CAN_READ_LISTS", False)
        monkeypatch.setattr(dict_watch, "has_watchers", lambda: False)
        monkeypatch.setattr(dict_watch, "_watcher", DictWatcher())
    return request.param


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Mutable:
    weight: Any
    bias: Any
    mode: str = dataclasses.field(default="train", metadata={"static": True})


class Bag:
    """A node with children and metadata that may both change."""

    def __init__(self, *items: Any, label: Any = "a") -> None:
        self.items = list(items)
        self.label = label


jax.tree_util.register_pytree_node(
    Bag, lambda bag: (tuple(bag.items), bag.label), lambda label, items: Bag(*items, label=label)
)


@dataclasses.dataclass(frozen=True)
class FrozenBag:
    """Frozen, but its children are the items of a list."""

    items: list[Any]


jax.tree_util.register_pytree_node(
    FrozenBag, lambda bag: (tuple(bag.items), None), lambda _, items: FrozenBag(list(items))
)


class Leaf:
    """An object of its own, so that identity tells."""


def make(count: int = 2) -> list[Leaf]:
    return [Leaf() for _ in range(count)]


TREES: dict[str, Callable[[], Any]] = {
    "leaf": Leaf,
    "none": lambda: None,
    "tuple": lambda: tuple(make()),
    "empty": lambda: ([], {}, ()),
    "namedtuple": lambda: Pair(*make()),
    "dict": lambda: {"a": Leaf(), "b": Leaf()},
    "ordered": lambda: collections.OrderedDict(b=Leaf(), a=Leaf()),
    "default": lambda: collections.defaultdict(Leaf, a=Leaf()),
    "frozen": lambda: Frozen(*make()),
    "mutable": lambda: Mutable(Leaf(), Leaf()),
    "bag": lambda: Bag(*make()),
    "empty bag": Bag,
    "frozen bag": lambda: FrozenBag(make()),
    "nested": lambda: {"a": [Pair(Frozen([Leaf()], Leaf()), {"b": Bag(Mutable(Leaf(), Leaf()))})]},
}


@pytest.mark.parametrize("name", TREES)
def test_an_unchanged_tree_is_recognised(name: str):
    tree = TREES[name]()
    watch = TreeWatch(tree)
    assert watch.is_unchanged(tree)
    assert watch.is_unchanged(tree)
    assert watch.tree is tree


@pytest.mark.parametrize("name", [name for name in TREES if name != "none"])
def test_another_tree_is_not_taken_for_it(name: str):
    assert not TreeWatch(TREES[name]()).is_unchanged(TREES[name]())


def _swap_order(tree: dict[str, Any]) -> None:
    tree["a"] = tree.pop("a")


def _replace_key(tree: dict[Any, Any]) -> None:
    tree["c"] = tree.pop("b")


def _set_factory(tree: Any) -> None:
    tree.default_factory = list


CHANGES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("dict", "replaced value", lambda t: t.update(a=Leaf())),
    ("dict", "added key", lambda t: t.update(c=Leaf())),
    ("dict", "removed key", lambda t: t.pop("a")),
    ("dict", "replaced key", _replace_key),
    ("dict", "key order", _swap_order),
    ("ordered", "replaced value", lambda t: t.update(a=Leaf())),
    ("ordered", "key order", lambda t: t.move_to_end("b")),
    ("default", "replaced value", lambda t: t.update(a=Leaf())),
    ("default", "added by reading", lambda t: t["z"]),
    ("default", "factory", _set_factory),
    ("mutable", "replaced field", lambda t: setattr(t, "weight", Leaf())),
    ("mutable", "replaced metadata", lambda t: setattr(t, "mode", "eval")),
    ("bag", "replaced item", lambda t: t.items.__setitem__(0, Leaf())),
    ("bag", "added item", lambda t: t.items.append(Leaf())),
    ("bag", "removed item", lambda t: t.items.pop()),
    ("bag", "metadata", lambda t: setattr(t, "label", "b")),
    ("empty bag", "added item", lambda t: t.items.append(Leaf())),
    ("empty bag", "metadata", lambda t: setattr(t, "label", "b")),
    ("frozen bag", "replaced item", lambda t: t.items.__setitem__(0, Leaf())),
    ("frozen bag", "added item", lambda t: t.items.append(Leaf())),
    ("nested", "list in a frozen dataclass", lambda t: t["a"][0].left.weight.append(Leaf())),
    ("nested", "dict in a namedtuple", lambda t: t["a"][0].right.update(b=Leaf())),
    ("nested", "dataclass in a node", lambda t: setattr(t["a"][0].right["b"].items[0], "bias", 1)),
    ("nested", "outer list", lambda t: t["a"].append(Leaf())),
    ("empty", "item in an empty list", lambda t: t[0].append(Leaf())),
    ("empty", "item in an empty dict", lambda t: t[1].update(a=Leaf())),
]


@pytest.mark.parametrize(
    ("name", "change"), [pytest.param(n, c, id=f"{n}, {what}") for n, what, c in CHANGES]
)
@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_change_in_place_is_seen(name: str, change: Callable[[Any], Any], looks: int):
    tree = TREES[name]()
    watch = TreeWatch(tree)
    for _ in range(looks):
        assert watch.is_unchanged(tree)
    change(tree)
    for _ in range(2):
        assert not watch.is_unchanged(tree)


def test_a_list_with_replaced_added_or_removed_items():
    for change in (
        lambda t: t.__setitem__(1, Leaf()),
        lambda t: t.append(Leaf()),
        lambda t: t.pop(),
        lambda t: t.reverse(),
    ):
        tree = make()
        watch = TreeWatch(tree)
        change(tree)
        assert not watch.is_unchanged(tree)


def test_a_change_that_is_undone_is_no_change():
    tree: dict[str, Any] = TREES["dict"]()
    watch = TreeWatch(tree)
    kept = tree["b"]
    tree["b"] = Leaf()
    assert not watch.is_unchanged(tree)
    tree["b"] = kept
    assert watch.is_unchanged(tree)


def test_equal_metadata_is_no_change():
    tree = Bag(*make(), label=tuple(range(300)))
    watch = TreeWatch(tree)
    tree.label = tuple(range(300))
    assert watch.is_unchanged(tree)


class Pretender:
    """Says that it equals everything, and counts how often it is asked."""

    __hash__ = None  # type: ignore[assignment]
    asked = 0

    def __eq__(self, other: object) -> bool:
        type(self).asked += 1
        return True


def make_dict_of_arrays() -> dict[str, Any]:
    return {name: make_array(np.float32(1.0)) for name in ("a", "b", "c")}


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize(
    "make",
    [lambda: make_array(np.float32(1.0)), Pretender, lambda: jax.numpy.float32(1.0), lambda: 1.0],
    ids=["Array", "Pretender", "jax", "float"],
)
def test_an_equal_value_in_a_dict_of_arrays_is_another_one(name: str, make: Callable[[], Any]):
    state = {"layer": make_dict_of_arrays(), "other": [make_dict_of_arrays()]}
    watch = TreeWatch(state)
    assert watch.is_unchanged(state)
    Pretender.asked = 0
    state["layer"][name] = make()
    assert not watch.is_unchanged(state)
    assert Pretender.asked == 0


def change_key(mapping: dict[str, Any]) -> None:
    mapping["d"] = mapping.pop("c")


def add_key(mapping: dict[str, Any]) -> None:
    mapping["d"] = mapping["c"]


def drop_key(mapping: dict[str, Any]) -> None:
    del mapping["c"]


def swap_values(mapping: dict[str, Any]) -> None:
    mapping["a"], mapping["b"] = mapping["b"], mapping["a"]


@pytest.mark.parametrize("change", [change_key, add_key, drop_key, swap_values, dict.clear])
def test_changes_of_a_dict_of_arrays_are_seen(change: Callable[[Any], Any]):
    state = [make_dict_of_arrays(), make_dict_of_arrays()]
    watch = TreeWatch(state)
    assert watch.is_unchanged(state)
    change(state[1])
    assert not watch.is_unchanged(state)


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that grows with each comparison of dicts."""
    compare, seen = tree_watch._Items.are_same, []

    def are_same(items: Any) -> bool:
        if any(isinstance(each, dict) for each in items._containers):
            seen.append(items)
        return compare(items)

    monkeypatch.setattr(tree_watch._Items, "are_same", are_same)
    return seen


def test_dicts_are_looked_at_only_after_a_change(way: str, monkeypatch: pytest.MonkeyPatch):
    state = {"a": make_dict_of_arrays(), "b": [make_dict_of_arrays()]}
    other = make_dict_of_arrays()
    watch, others = TreeWatch(state), TreeWatch(other)
    seen = count_comparisons(monkeypatch)
    for _ in range(5):
        assert watch.is_unchanged(state)
    assert len(seen) == (5 if way == "compared" else 0)
    # A change of whatever watched dict, even one that is undone, costs one comparison; with tags
    # those of other dicts cost none.
    seen.clear()
    other["d"] = other["a"]
    for _ in range(5):
        assert watch.is_unchanged(state)
    del other["d"]
    assert watch.is_unchanged(state)
    assert len(seen) == {"heard": 2, "tagged": 0, "compared": 6}[way]
    assert others.is_unchanged(other)


def test_changes_that_leave_the_tree_as_it_was_are_looked_at_once(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    tree = {"a": make_dict_of_arrays(), "b": ({"c": Leaf()}, [Leaf()])}
    watch = TreeWatch(tree)
    seen = count_comparisons(monkeypatch)
    tree["a"].update(tree["a"])
    tree["b"][0]["c"] = tree["b"][0].pop("c")
    for _ in range(2):
        assert watch.is_unchanged(tree)
    assert len(seen) == (2 if way == "compared" else 1)


def test_a_change_that_came_before_a_look_at_another_tree_is_seen():
    first, second = [make_dict_of_arrays()], [make_dict_of_arrays()]
    watches = TreeWatch(first), TreeWatch(second)
    first[0]["a"] = second[0]["a"]
    assert watches[1].is_unchanged(second)
    assert not watches[0].is_unchanged(first)
    # It stays a change, however often it is checked.
    assert not watches[0].is_unchanged(first)


def test_a_tree_that_two_watches_hold(way: str, monkeypatch: pytest.MonkeyPatch):
    state = make_dict_of_arrays()
    first, second = TreeWatch(state), TreeWatch(state)
    seen = count_comparisons(monkeypatch)
    assert first.is_unchanged(state)
    assert second.is_unchanged(state)
    # The mark of the dict is the first one's; a tag is everyone's.
    compared = {"heard": [second], "tagged": [], "compared": [first, second]}
    assert seen == [watch._uncounted for watch in compared[way]]
    del first
    state["a"] = state["b"]
    assert not second.is_unchanged(state)


def test_a_glance_tells_what_a_look_tells():
    for name, make_tree in TREES.items():
        tree = make_tree()
        watch = TreeWatch(tree)
        # Only what is certain: a glance that does not know asks for a look.
        assert watch.glance() != watch.seen or watch.is_unchanged(tree), name
    for name, what, change in CHANGES:
        tree = TREES[name]()
        watch = TreeWatch(tree)
        change(tree)
        assert watch.glance() != watch.seen, (name, what)
        assert not watch.is_unchanged(tree)
        assert watch.glance() != watch.seen, (name, what)


def test_after_an_undone_change_a_glance_is_enough_again(way: str):
    tree = {"a": Leaf(), "b": {"c": Leaf()}}
    watch = TreeWatch(tree)
    tree["b"]["c"], kept = Leaf(), tree["b"]["c"]
    tree["b"]["c"] = kept
    assert watch.glance() != watch.seen
    assert watch.is_unchanged(tree)
    assert (watch.glance() == watch.seen) == (way != "compared")


def test_a_list_that_loses_an_item_to_its_neighbour():
    state = [[Leaf(), Leaf()], [Leaf()]]
    watch = TreeWatch(state)
    state[1].insert(0, state[0].pop())
    assert not watch.is_unchanged(state)


def test_one_dict_in_two_places():
    shared = make_dict_of_arrays()
    state = [shared, shared]
    watch = TreeWatch(state)
    assert watch.is_unchanged(state)
    shared["a"] = shared["b"]
    assert not watch.is_unchanged(state)


def test_a_watch_ends_with_its_tree_alive():
    state = make_dict_of_arrays()
    watch = TreeWatch(state)
    del watch
    marks = DictWatch([state])
    assert (marks.uncounted == []) == dict_watch._watcher.is_open


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "replaced": lambda o: setattr(o, "a", Leaf()),
    "added": lambda o: setattr(o, "c", Leaf()),
    "removed": lambda o: delattr(o, "b"),
    "in the dict": lambda o: vars(o).update(a=Leaf()),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_an_object_whose_dict_is_the_tree(name: str):
    bag = Leaf()
    bag.a, bag.b = make()  # type: ignore[attr-defined]
    watch = TreeWatch(vars(bag))
    assert watch.is_unchanged(vars(bag))
    ATTRIBUTES[name](bag)
    assert watch.glance() != watch.seen
    assert not watch.is_unchanged(vars(bag))
