"""Donated state on a GPU: updated in place, consumed as under `jax.jit`, equal bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.deviceless.programs import PROGRAMS
from tests.gpu.reference import assert_replayed, copy_arguments, find_captured, run_reference

pytestmark = pytest.mark.usefixtures("gpu", "untried")
STEPS = {"donated_update": 100, "mlp": 100, "gpt_2x128": 100, "gpt_12x128": 10}


def find_program(name):
    return next(program for program in PROGRAMS if program.name == name)


def split_state(name, result):
    """Returns the new state and the rest of a step's result; an update returns the state alone."""
    return (result, ()) if name == "donated_update" else result


def find_pointers(state):
    return [leaf.data_ptr() for leaf in jax.tree.leaves(state)]


def assert_equal_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2)


@pytest.mark.parametrize("name", STEPS)
def test_a_train_loop_equals_its_executables(name):
    """The state is passed from step to step on both sides, so that one wrong bit stays wrong."""
    program = find_program(name)
    rng = np.random.default_rng(0)
    state, *batch = program.make_arguments(rng)
    captured = tg.capture(program.function, donate_argnums=0)
    wanted = copy_arguments((state,))[0]
    pointers, atomics = [], []
    for _ in range(STEPS[name]):
        state, loss = split_state(name, captured(state, *batch))
        wanted, wanted_loss = split_state(name, run_reference(captured, wanted, *batch))
        # The gradient of an embedding is a sum of floats in an order that is left to chance.
        atomics = [r.float_atomics for r in find_captured(captured).lowered.regions]
        compare = assert_close if any(atomics) else assert_equal_bits
        compare(loss, wanted_loss)
        pointers = pointers or find_pointers(state)
        assert find_pointers(state) == pointers
        _, *batch = program.make_arguments(rng)
    # Such a state drifts apart from step to step, so that of all of it only the loss is compared.
    if not any(atomics):
        assert_equal_bits(state, wanted)
    assert captured.cache_info().captures == 1


def step(state, x):
    return {"w": state["w"] * 0.9 + x, "n": state["n"] + 1}, state["w"].sum()


def make_state():
    return {"w": jnp.arange(1000.0), "n": jnp.int32(0)}


def test_leaves_take_turns():
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured(make_state(), 1.0)
    objects = set()
    for _ in range(100):
        new, _ = captured(state, 0.5)
        assert state["w"].is_deleted()
        assert state["n"].is_deleted()
        state = new
        objects.add((id(state), id(state["w"]), id(state["n"])))
    assert int(state["n"]) == 101
    assert len(objects) == 2


def test_donated_arrays_are_consumed_and_numpy_ones_are_not():
    captured = tg.capture(step, donate_argnums=0)
    plain = {"w": jnp.arange(1000.0), "n": np.int32(0)}
    captured(plain, 1.0)
    assert plain["w"].is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.negative(plain["w"])
    with pytest.raises(tg.CaptureError, match="deleted"):
        captured(plain, 1.0)
    host = {"w": np.arange(1000, dtype=np.float32), "n": np.int32(0)}
    again, _ = captured(host, 1.0)
    assert np.array_equal(host["w"], np.arange(1000))
    assert int(again["n"]) == 1


def test_a_consumed_leaf_raises():
    first = tg.capture(step, donate_argnums=0)
    second = tg.capture(lambda s: {"w": -s["w"], "n": s["n"]}, donate_argnums=0)
    state, _ = first(make_state(), 1.0)
    given = state
    moved = second(state)
    assert given["w"].is_deleted()
    with pytest.raises(tg.ReplayError, match="deleted: it was donated to"):
        np.asarray(given["w"])
    with pytest.raises(tg.ReplayError, match="deleted: it was donated to"):
        first(given, 1.0)
    assert float(moved["w"][999]) < 0


def test_an_old_leaf_keeps_its_value_when_the_state_starts_anew():
    captured = tg.capture(step, donate_argnums=0)
    old, _ = captured(make_state(), 1.0)
    value = np.array(old["w"])
    new, _ = captured(make_state(), 2.0)
    captured(new, 3.0)
    assert np.array_equal(old["w"], value)
    assert new["w"] is not old["w"]


def test_an_updated_leaf_in_jax_programs_is_a_value():
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured(make_state(), 1.0)
    kept, frozen, host = state["w"] + 0, jax.jit(lambda w: w)(state["w"]), np.array(state["w"])
    new, _ = captured(state, 100.0)
    assert np.array_equal(kept, host)
    assert np.array_equal(frozen, host)
    assert not np.array_equal(new["w"], host)


def test_swapped_and_exchanged_state():
    swap = tg.capture(lambda a, b: (b, a), donate_argnums=(0, 1))
    a, b = swap(jnp.zeros(200), jnp.ones(200))
    for _ in range(3):
        a, b = swap(a, b)
    assert (float(a[0]), float(b[0])) == (0.0, 1.0)
    captured = tg.capture(lambda s: {"a": s["a"] + 1, "b": s["b"] * 2}, donate_argnums=0)
    state = captured({"a": jnp.ones(200), "b": jnp.full(200, 5.0)})
    state["a"], state["b"] = state["b"], state["a"]
    state = captured(state)
    assert (float(state["a"][0]), float(state["b"][0])) == (11.0, 4.0)


def test_state_written_by_the_user():
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured(make_state(), 1.0)
    pointers = find_pointers(state)
    state["w"].copy_(np.full(1000, 2.0, np.float32))
    state, total = captured(state, 0.0)
    assert float(total) == 2000.0
    assert find_pointers(state) == pointers


def test_a_state_from_disk_and_a_state_from_jax_are_alike():
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured(make_state(), 1.0)
    saved = jax.tree.map(np.array, state)
    for given in (jax.tree.map(np.copy, saved), jax.tree.map(jnp.asarray, saved)):
        assert_replayed(captured, captured(given, 7.0), (saved, 7.0))
