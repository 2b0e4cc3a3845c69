"""A donated leaf that is kept beyond its call is deleted for ever, in whatever way it is kept."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.replaying import holders, resident_results

GONE = "has been deleted: it was donated to `step`"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    b: Any


class Pair(NamedTuple):
    w: Any
    b: Any


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def full(size: int, value: float) -> jax.Array:
    return jnp.full(size, value, jnp.float32)


def step(p, x):
    return jax.tree.map(lambda leaf: leaf + x, p), x * 2


STATES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"w": jnp.zeros(3), "b": jnp.zeros(2)},
    "nested": lambda: {"w": jnp.zeros(3), "b": {"a": [jnp.zeros(2), (jnp.zeros(2),)]}},
    "ordered": lambda: collections.OrderedDict(w=jnp.zeros(3), b=jnp.zeros(2)),
    "frozen dict": lambda: flax.core.FrozenDict({"w": jnp.zeros(3), "b": jnp.zeros(2)}),
    "dataclass": lambda: Model(jnp.zeros(3), {"c": jnp.zeros(2)}),
    "namedtuple": lambda: Pair(jnp.zeros(3), [jnp.zeros(2)]),
    "equinox": lambda: eqx.partition(eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.is_array)[0],
    "list": lambda: [jnp.zeros(3), jnp.zeros(2)],
    "leaf": lambda: jnp.zeros(3),
}


@functools.cache
def find_step(kind: str = "dict") -> Any:
    """Returns one captured function per kind of state; it has one signature."""
    return tg.capture(step, donate_argnums=0, verify=False, name="step")


def start(kind: str = "dict") -> tuple[Any, Any]:
    """Returns the captured function and a state after enough calls for sets to take turns."""
    captured, state = find_step(kind), STATES[kind]()
    for _ in range(4):
        state, _ = captured(state, 1.0)
    return captured, state


def check_gone(*leaves: Any) -> None:
    for leaf in leaves:
        assert leaf.is_deleted()
        with pytest.raises(tg.ReplayError, match=GONE):
            np.asarray(leaf)


def first(state: Any) -> Any:
    return jax.tree.leaves(state)[0]


# What is kept of the state, and how a leaf is found in it after the call.
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the tree": (lambda s: s, first),
    "a leaf": (lambda s: s["w"], lambda k: k),
    "a dict": (lambda s: {"best": s["w"]}, lambda k: k["best"]),
    "a list": (lambda s: [s], lambda k: k[0]["w"]),
    "a tuple": (lambda s: (1, s["w"]), lambda k: k[1]),
    "a dataclass": (lambda s: Model(s["w"], None), lambda k: k.w),
    "an object": (lambda s: types.SimpleNamespace(s=s), lambda k: k.s["w"]),
    "an object with slots": (lambda s: Slotted(s["w"]), lambda k: k.held),
    "a closure": (lambda s: lambda: s["w"], lambda k: k()),
    "a default argument": (lambda s: eval("lambda x=s: x['w']", {"s": s}), lambda k: k()),
    "a partial": (lambda s: functools.partial(dict.get, s), lambda k: k("w")),
    "a bound method": (lambda s: s.get, lambda k: k("w")),
    "a method of a leaf": (lambda s: s["w"].is_deleted, lambda k: k.__self__),
    "a view of the values": (lambda s: s.values(), lambda k: next(iter(k))),
    "a view of the items": (lambda s: s.items(), lambda k: dict(k)["w"]),
    "an iterator": (lambda s: iter(list(s.values())), next),
    "an iterator of the tree": (lambda s: zip([0], [s["w"]], strict=True), lambda k: next(k)[1]),
    "a generator": (lambda s: (leaf for leaf in [s["w"]]), next),
    "a mapping proxy": (types.MappingProxyType, lambda k: k["w"]),
    "a copied dict": (dict, lambda k: k["w"]),
    "a chain of dicts": (lambda s: collections.ChainMap({}, s), lambda k: k["w"]),
    "a shallow copy": (copy.copy, lambda k: k["w"]),
    "jax.tree.leaves": (jax.tree.leaves, lambda k: k[-1]),
    "jax.tree.map": (lambda s: jax.tree.map(lambda leaf: leaf, s), lambda k: k["w"]),
    "flatten with path": (jax.tree_util.tree_leaves_with_path, lambda k: k[-1][1]),
    "tree_at": (lambda s: eqx.tree_at(lambda t: t["b"], s, 0.0), lambda k: k["w"]),
    "a Partial": (lambda s: jax.tree_util.Partial(print, s["w"]), lambda k: k.args[0]),
    "an object array": (lambda s: make_object_array(s["w"]), lambda k: k[0]),
    "jnp.asarray": (lambda s: jnp.asarray(s["w"]), lambda k: k),
    "a cell of an exception": (lambda s: KeyError(s["w"]), lambda k: k.args[0]),
    "a weak reference": (lambda s: weakref.ref(s["w"]), lambda k: k),
    "a deque": (lambda s: collections.deque([s["w"]]), lambda k: k[0]),
    "itertools": (lambda s: itertools.repeat(s["w"]), next),
}


def make_object_array(value: Any) -> Any:
    held = np.empty(1, object)
    held[0] = value
    return held


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_deleted_for_ever(way: str):
    keep, find = WAYS[way]
    captured, state = start()
    kept = keep(state)
    address = state["w"].data_ptr()
    state, _ = captured(state, 1.0)
    is_weak = way == "a weak reference"
    leaf = None if is_weak else find(kept)
    if leaf is not None:
        check_gone(leaf)
    for _ in range(6):
        state, _ = captured(state, 1.0)
        assert state["w"].data_ptr() == address
        assert leaf is None or leaf.is_deleted()
        # A new object, or none: never one that shows another value.
        assert not is_weak or kept() is None or kept().is_deleted()
    if leaf is not None:
        check_gone(leaf)
        with pytest.raises(tg.ReplayError, match=GONE):
            captured({"w": leaf, "b": jnp.zeros(2)}, 1.0)
    assert_same(state, {"w": full(3, 11.0), "b": full(2, 11.0)})


@pytest.mark.filterwarnings("ignore::tracegraph.RecaptureWarning")
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("way", ["tree", "last leaf", "inner dict", "changed"])
def test_every_container_of_a_state(kind: str, way: str):
    captured, state = start(kind)
    leaves = jax.tree.leaves(state)
    inner = [vars(state)] if way == "inner dict" and hasattr(state, "__dict__") else []
    if way == "changed" and kind in ("dict", "nested", "ordered"):
        # The dict no longer holds the leaf, so that its count is what it was.
        inner = [state.pop("w")]
        state["w"] = inner[0]
        state["w"] = inner[0] if kind == "dict" else full(3, 4.0)
    kept = {"tree": state, "last leaf": leaves[-1]}.get(way, inner)
    count = len(leaves)
    del leaves
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    for index in range(1, 7):
        state, _ = captured(state, 1.0)
        # The leaves themselves are not held from call to call.
        # What was not passed has its value still.
        is_passed = way != "changed" or kind == "dict"
        assert all(leaf.is_deleted() == is_passed for leaf in find_arrays(kept))
        assert is_passed or all(np.asarray(leaf)[0] == 4.0 for leaf in find_arrays(kept))
        got = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        assert len(got) == count
        for one, other in zip(before, got, strict=True):
            np.testing.assert_array_equal(one + index, other)


def find_arrays(held: Any) -> list[Any]:
    if isinstance(held, list | dict) or dataclasses.is_dataclass(held):
        values = vars(held) if dataclasses.is_dataclass(held) else held
        items = values.values() if isinstance(values, dict) else values
        return [array for item in items for array in find_arrays(item)]
    return [leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, jax.Array)]


EVERY_USE = {
    "print": print,
    "numpy": np.asarray,
    "dlpack": np.from_dlpack,
    "jnp": jnp.sin,
    "jit": lambda x: jax.jit(lambda v: v + 1)(x),
    "grad": lambda x: jax.grad(lambda v: v.sum())(x),
    "vmap": lambda x: jax.vmap(lambda v: v * 2)(x),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "float": lambda x: float(x[0]),
    "compare": lambda x: x == x,
    "device_put": jax.device_put,
    "device_get": jax.device_get,
    "block": jax.block_until_ready,
    "closed over": lambda x: jax.jit(lambda v: v + x)(1.0),
    "another captured function": lambda x: tg.capture(lambda v: v * 3, name="triple")(x),
    "captured and closed over": lambda x: tg.capture(lambda v: v + x, name="add")(1.0),
    "donated once more": lambda x: find_step()({"w": x, "b": jnp.zeros(2)}, 1.0),
}


@pytest.mark.parametrize("name", EVERY_USE)
def test_every_use_raises(name: str):
    captured, best = start()
    state, _ = captured(best, 1.0)
    with pytest.raises(tg.ReplayError, match=GONE) as caught:
        EVERY_USE[name](best["w"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    # The line that calls `deepcopy` is not the innermost of the user's frames.
    assert "calls/test_aliases.py:" in lines[1] or name == "deepcopy"
    assert lines[1].endswith("it was `p['w']` of that call")
    assert "jax.tree.map(jnp.copy, tree)" in lines[3]
    assert (best["w"].shape, best["w"].dtype) == ((3,), jnp.float32)
    # Nothing was lost.
    assert_same(captured(state, 1.0)[0]["w"], full(3, 6.0))


def test_the_best_parameters_are_kept_by_a_copy():
    captured, state = start()
    best = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        state, _ = captured(state, 1.0)
    assert_same(best, {"w": full(3, 4.0), "b": full(2, 4.0)})
    assert_same(captured(best, 1.0)[0], {"w": full(3, 5.0), "b": full(2, 5.0)})


def test_what_was_not_passed_keeps_its_value():
    captured, old = start()
    taken = old["b"]
    new, _ = captured({"w": full(3, 70.0), "b": old["b"]}, 1.0)
    check_gone(taken)
    assert_same(old["w"], full(3, 4.0))
    for _ in range(4):
        new, _ = captured(new, 1.0)
    assert_same(old["w"], full(3, 4.0))
    assert_same(new, {"w": full(3, 75.0), "b": full(2, 9.0)})
    check_gone(taken)


def test_leaves_in_each_others_place():
    captured = tg.capture(lambda s: {"a": s["a"] + 1, "b": s["b"] * 2}, donate_argnums=0)
    state = captured({"a": jnp.zeros(2), "b": jnp.ones(2)})
    for _ in range(3):
        a, b = state["a"], state["b"]
        state = captured({"a": b, "b": a})
        for leaf in (a, b):
            with pytest.raises(tg.ReplayError, match="it was donated"):
                np.asarray(leaf)
    assert_same(state, {"a": full(2, 7.0), "b": full(2, 6.0)})


def test_single_leaves_and_typed_keys():
    captured = tg.capture(
        lambda key, n: (jax.random.fold_in(key, 1), n + 1),
        donate_argnums=(0, 1),
        name="step",
        verify=False,
    )
    key, n = captured(jax.random.key(0), jnp.int32(0))
    kept = []
    for _ in range(6):
        kept.append((key, jax.random.key_data(key), n))
        key, n = captured(key, n)
        assert all(each[0].is_deleted() for each in kept)
        check_gone(*(leaf for each in kept for leaf in each[1:]))
        with pytest.raises(tg.ReplayError, match=GONE):
            jax.random.split(kept[0][0])
    wanted = jax.random.key(0)
    for _ in range(7):
        wanted = jax.random.fold_in(wanted, 1)
    assert_same((key, n), (wanted, jnp.int32(7)))


def test_a_state_that_alternates_between_two_functions():
    ahead = tg.capture(step, donate_argnums=0, name="step")
    back = tg.capture(lambda p, x: step(p, -x), donate_argnums=0, name="step")
    state, kept = STATES["dict"](), []
    for captured, x in itertools.islice(itertools.cycle([(ahead, 3.0), (back, 1.0)]), 9):
        state, _ = captured(state, x)
        check_gone(*kept)
        kept.append(state["w"])
    assert_same(state["w"], full(3, 11.0))


def test_a_state_of_two_shapes_of_one_function():
    captured = tg.capture(step, donate_argnums=0, name="step")
    small, large = {"w": jnp.zeros(2)}, {"w": jnp.zeros(5)}
    kept: list[Any] = []
    for _ in range(5):
        small, _ = captured(small, 1.0)
        check_gone(*kept)
        large, _ = captured(large, 2.0)
        kept += [small["w"], large["w"]]
        small, _ = captured(small, 1.0)
        large, _ = captured(large, 2.0)
    assert_same((small["w"], large["w"]), (full(2, 10.0), full(5, 20.0)))


def test_a_state_of_which_a_part_is_returned():
    captured = tg.capture(
        lambda s: ({"w": s["w"] + 1}, s["b"].sum()), donate_argnums=0, verify=False, name="step"
    )
    w, kept = jnp.zeros(3), []
    for count in range(1, 7):
        state, total = captured({"w": w, "b": full(2, count)})
        assert float(total) == 2 * count
        check_gone(*kept)
        w = state["w"]
        kept.append(w)
    assert_same(w, full(3, 6.0))


def test_state_that_a_failed_call_did_not_take():
    captured, state = start()
    gone = jnp.ones(())
    gone.delete()
    for _ in range(2):
        with pytest.raises(tg.CaptureError, match="has been deleted"):
            captured(state, gone)
        assert_same(state["w"], full(3, 4.0))
    new, _ = captured(state, 1.0)
    check_gone(state["w"])
    assert_same(new["w"], full(3, 5.0))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_state_of_a_call_that_was_interrupted_after_its_launch(error, monkeypatch):
    captured, state = start()
    value = jax.tree.map(np.asarray, state)

    def interrupt(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(resident_results.ResidentResults, "is_free", interrupt)
        with pytest.raises(error):
            captured(state, 1.0)
    # The memory holds the next state, which the caller never got.
    check_gone(state["w"], state["b"])
    assert_same(captured(value, 1.0)[0]["w"], full(3, 5.0))


@pytest.mark.parametrize("kind", STATES)
def test_two_sets_of_leaves_take_turns(kind: str):
    captured, state = start(kind)
    objects = set()
    for _ in range(6):
        state, _ = captured(state, 1.0)
        objects.add((id(state), *map(id, jax.tree.leaves(state))))
    assert len(objects) == (2 if holders.CAN_COUNT else 6)


def test_where_counts_say_nothing_leaves_are_always_new(monkeypatch):
    monkeypatch.setattr(resident_results, "CAN_COUNT", False)
    captured = tg.capture(step, donate_argnums=0, name="step")
    state, kept = STATES["dict"](), []
    for _ in range(5):
        state, _ = captured(state, 1.0)
        kept.append(state)
    assert len({id(leaf) for each in kept for leaf in jax.tree.leaves(each)}) == 10
    check_gone(*(leaf for each in kept[:-1] for leaf in jax.tree.leaves(each)))
    assert_same(state["w"], full(3, 5.0))


def test_a_planted_fault_is_found(monkeypatch):
    # Sets that are returned again although they are held: the tests above must notice.
    monkeypatch.setattr(resident_results.ResidentResults, "is_free", lambda _: True)
    captured, best = start()
    state, _ = captured(best, 1.0)
    assert best["w"].is_deleted()
    state, _ = captured(state, 1.0)
    assert not best["w"].is_deleted()
