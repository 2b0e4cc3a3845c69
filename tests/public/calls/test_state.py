"""Donated state: resident leaves, at the same addresses, equal to `jax.jit` bit for bit."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

A2 = jnp.arange(2.0) + 1


def full(size, value):
    return jnp.full(size, value, jnp.float32)


def step(state, x):
    w = state["w"] * 0.9 + x
    return {"w": w, "n": state["n"] + 1}, w.sum()


def make_state():
    return {"w": jnp.arange(4.0), "n": jnp.int32(0)}


def follow(function: Callable[..., Any], state, inputs):
    """Runs the captured and the compiled function side by side; all results must agree."""
    captured = tg.capture(function, donate_argnums=0)
    wanted = jax.tree.map(jnp.copy, state)
    compiled = jax.jit(function)
    for each in inputs:
        state, result = captured(state, each)
        wanted, expected = compiled(wanted, each)
        assert_same((state, result), (wanted, expected))
    assert captured.cache_info().captures == 1
    return captured, state


def test_leaves_take_turns_at_the_same_addresses():
    captured, state = follow(step, make_state(), [1.0, 2.0])
    addresses = [leaf.data_ptr() for leaf in jax.tree.leaves(state)]
    objects = set()
    for _ in range(100):
        new, _ = captured(state, 0.5)
        assert new["w"] is not state["w"]
        assert state["w"].is_deleted()
        assert state["n"].is_deleted()
        assert [leaf.data_ptr() for leaf in jax.tree.leaves(new)] == addresses
        state = new
        objects.add((id(state), id(state["w"]), id(state["n"])))
    assert int(state["n"]) == 102
    assert len(objects) == 2


def test_donated_arrays_are_consumed_and_numpy_ones_are_not():
    captured = tg.capture(step, donate_argnums=0)
    plain = {"w": jnp.arange(4.0), "n": np.int32(0)}
    captured(plain, 1.0)
    assert plain["w"].is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.negative(plain["w"])
    plain["w"] = np.arange(4.0, dtype=np.float32)
    again, _ = captured(plain, 1.0)
    assert_same(again, jax.jit(step)(make_state(), 1.0)[0])
    assert np.array_equal(plain["w"], np.arange(4.0))


def test_an_old_leaf_keeps_its_value_when_the_state_starts_anew():
    captured, old = follow(step, make_state(), [1.0, 2.0])
    value = np.asarray(old["w"])
    new, _ = captured(make_state(), 1.0)
    assert np.array_equal(old["w"], value)
    assert_same(new, jax.jit(step)(make_state(), 1.0)[0])
    assert new["w"] is not old["w"]
    captured(new, 5.0)
    assert np.array_equal(old["w"], value)


def test_state_changed_in_place_between_calls_is_seen():
    captured, state = follow(step, make_state(), [1.0, 2.0])
    state["w"] = jnp.zeros(4)
    state, total = captured(state, 1.0)
    assert_same((state["w"], total), (jnp.ones(4), jnp.float32(4)))
    state["w"], state["n"] = np.ones(4, np.float32), state["n"] * 0
    state, total = captured(state, 0.0)
    assert (float(total), int(state["n"])) == (np.float32(0.9) * 4, 1)


def test_copied_and_stored_states_are_restored():
    captured, state = follow(step, make_state(), [1.0])
    copies = [
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        jax.tree.map(np.asarray, state),
        jax.tree.map(jnp.copy, state),
        jax.device_get(state),
    ]
    wanted = jax.jit(step)(jax.tree.map(jnp.asarray, copies[2]), 7.0)
    for _ in range(3):
        state, _ = captured(state, 3.0)
    for saved in copies:
        assert_same(captured(saved, 7.0), wanted)
    assert captured.cache_info().captures == 1


def test_swapped_state():
    follow(lambda s, x: ((s[1], s[0] + x), s[0] - s[1]), (jnp.zeros(3), jnp.ones(3)), range(5))
    swap = tg.capture(lambda a, b: (b, a), donate_argnums=(0, 1))
    a, b = swap(jnp.zeros(2), jnp.ones(2))
    for _ in range(3):
        a, b = swap(a, b)
    assert_same((a, b), (jnp.zeros(2), jnp.ones(2)))


def test_leaves_exchanged_by_the_caller():
    captured, state = follow(
        lambda s, x: ({"a": s["a"] + x, "b": s["b"] * 2}, x), {"a": A2 * 1, "b": A2 * 5}, [1.0, 1.0]
    )
    a, b = np.asarray(state["a"]), np.asarray(state["b"])
    state["a"], state["b"] = state["b"], state["a"]
    state, _ = captured(state, 1.0)
    assert np.array_equal(state["a"], b + 1)
    assert np.array_equal(state["b"], a * 2)


def test_state_returned_in_another_tree():
    captured = tg.capture(lambda s: [s["b"] + 1, {"x": s["a"] * 2}], donate_argnums=0)
    first, second = captured({"a": A2 * 1, "b": A2 * 1})
    for _ in range(3):
        first, second = captured({"a": second["x"], "b": first})
    assert_same((first, second["x"]), (A2 + 4, A2 * 16))
    assert captured.cache_info().captures == 1


def test_partly_donated_unused_and_passed_through():
    def function(state, unused, kept):
        return state["a"], state["b"] + kept, kept

    captured = tg.capture(function, donate_argnums=(0, 1))
    kept = jnp.ones(2)
    a, b = jnp.zeros(2), jnp.zeros(2)
    for count in range(1, 4):
        unused = jnp.ones(7)
        a, b, same = captured({"a": a, "b": b}, unused, kept)
        assert unused.is_deleted()
        assert not kept.is_deleted()
        assert_same((a, b, same), (jnp.zeros(2), full(2, count), kept))


def test_donated_and_returned_twice():
    captured = tg.capture(lambda x: (x, x, x + 1), donate_argnums=0)
    first = second = x = jnp.zeros(2)
    for _ in range(3):
        first, second, x = captured(x)
    assert_same((first, second, x), (full(2, 2.0), full(2, 2.0), full(2, 3.0)))


def test_a_donated_array_that_is_also_closed_over():
    table = jnp.arange(3.0)
    captured = tg.capture(lambda x: x + table, donate_argnums=0)
    result = captured(table)
    for count in range(2, 5):
        result = captured(result)
        assert_same(result, jnp.arange(3.0) * (count + 1))


def test_donated_by_name_and_as_keyword():
    captured = tg.capture(lambda x, state: (state * 2, x), donate_argnames="state")
    state = jnp.ones(2)
    for _ in range(3):
        state, _ = captured(1.0, state=state)
    leaf = captured(2.0, state=state)[0]
    assert state.is_deleted()
    assert_same(leaf, full(2, 16.0))
    assert_same(captured(1.0, jnp.ones(2))[0], full(2, 2.0))


def test_state_goes_from_one_graph_to_another():
    first = tg.capture(step, donate_argnums=0)
    second = tg.capture(lambda s: {"w": -s["w"], "n": s["n"]}, donate_argnums=0)
    state, _ = first(make_state(), 1.0)
    given = state
    state = second(state)
    assert given["w"].is_deleted()
    with pytest.raises(tg.ReplayError, match="has been deleted: it was donated to `<lambda>`") as e:
        first(given, 1.0)
    assert "argument 0 `state['n']` and 1 more; it was `s['n']` of that call" in e.value.where
    for _ in range(3):
        state = second(first(state, 1.0)[0])
    wanted = jax.jit(step)(make_state(), 1.0)[0]
    for _ in range(3):
        wanted, _ = jax.jit(step)({"w": -wanted["w"], "n": wanted["n"]}, 1.0)
    assert_same(state, {"w": -wanted["w"], "n": wanted["n"]})


def test_another_function_reads_the_state():
    evaluate = tg.capture(lambda s: s["w"].max())
    captured, state = follow(step, make_state(), [1.0])
    for x in (1.0, -2.0, 3.0):
        state, _ = captured(state, x)
        assert float(evaluate(state)) == float(np.asarray(state["w"]).max())
    assert evaluate.cache_info() == (2, 1, 64, 1)


def test_leaves_in_jax_programs_are_values():
    captured, state = follow(step, make_state(), [1.0])
    kept = state["w"] + 0
    frozen = jax.jit(lambda w: w)(state["w"])
    host = np.asarray(state["w"])
    value = host.copy()
    new, _ = captured(state, 100.0)
    for each in (kept, frozen, host):
        assert np.array_equal(each, value)
    assert not np.array_equal(new["w"], value)


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_a_leaf_whose_weak_type_comes_or_goes_has_the_type_of_jit(mode):
    def step(s):
        return {"a": jnp.where(s["a"] > 0, 1.0, 2.0), "b": s["b"] + jnp.float32(1), "c": s["c"] * 2}

    def make():
        return {"a": jnp.float32(3), "b": jnp.asarray(3.0), "c": jnp.asarray(3.0)}

    captured, jitted = tg.capture(step, donate_argnums=0, mode=mode), jax.jit(step)
    got, wanted = make(), make()
    for _ in range(3):
        got, wanted = captured(got), jitted(wanted)
        weak = {key: jax.typeof(leaf).weak_type for key, leaf in got.items()}
        assert weak == {"a": True, "b": False, "c": True}
        assert jax.tree.map(float, got) == jax.tree.map(float, wanted)
    # Once for the types of the first state, once for those that stay.
    assert captured.cache_info().captures == 2
