"""A catalogue of behaviour that may surprise: each test says what happens, and is the proof."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

X = jnp.arange(3.0)


def test_closed_over_values_are_baked_in():
    """As with `jax.jit`: what a function closes over has the value of the capture for ever."""
    scale, table, host = 2.0, {"t": jnp.ones(3)}, np.ones(3, np.float32)
    captured = tg.capture(lambda x: x * scale + table["t"] + host)
    captured(X)
    scale, table["t"] = 100.0, jnp.zeros(3)
    host[:] = 50
    assert_same(captured(X), X * 2 + 2)
    captured.reset()
    assert_same(captured(X), X * 100.0 + 50)


def test_a_closed_over_array_may_be_deleted():
    """A graph has its own copy of what it closes over."""
    table = jnp.ones(3)
    captured = tg.capture(lambda x: x + table)
    captured(X)
    table.delete()
    assert_same(captured(X), X + 1)


def test_python_side_effects_happen_while_tracing_only():
    """A capture runs the Python of a function twice: two traces."""
    calls = []
    captured = tg.capture(lambda x: (calls.append(1), x * 2)[1])
    captured(X)
    assert len(calls) == 2
    captured(X)
    assert len(calls) == 2
    calls.clear()
    tg.capture(captured.__wrapped__, verify=False)(X)
    assert len(calls) == 2


def test_past_states_can_be_kept_as_copies_only():
    """A leaf that was passed on is deleted, as under `jax.jit`; copies of it stay what they are."""
    captured = tg.capture(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    state, history = captured({"w": jnp.zeros(2)}), []
    for _ in range(3):
        state = captured(state)
        history.append((state["w"], state["w"].copy(), np.asarray(state["w"]), state["w"].jax()))
    assert [leaf.is_deleted() for leaf, _, _, _ in history] == [True, True, False]
    with pytest.raises(tg.ReplayError, match="it was donated to"):
        float(history[0][0][0])
    for index in (1, 2, 3):
        assert [float(each[index][0]) for each in history] == [2.0, 3.0, 4.0]


def test_the_same_state_passed_twice_is_refused():
    """The first call has taken it; its result can be passed on."""
    captured = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = captured(jnp.zeros(()))
    new = captured(state)
    with pytest.raises(tg.ReplayError, match="it was donated to"):
        captured(state)
    assert float(captured(new)) == 3.0


def test_changing_the_returned_containers_is_safe():
    """Calls return the same few dicts, but none that the user has changed."""
    captured = tg.capture(lambda s: {"a": s["a"] + 1, "b": [s["b"][0] * 2]}, donate_argnums=0)
    state = captured({"a": jnp.zeros(()), "b": [jnp.ones(())]})
    removed = state.pop("b")
    state["c"] = 5
    again = captured({"a": state["a"], "b": removed})
    assert sorted(again) == ["a", "b"]
    assert (float(again["a"]), float(again["b"][0])) == (2.0, 4.0)
    assert captured.cache_info().captures == 1


def test_weak_types_are_signatures_of_their_own():
    """A Python number, a NumPy number and an array of the same dtype need two captures."""
    captured = tg.capture(lambda x: x * 2)
    for value in (1.0, np.float32(1), jnp.float32(1), 2.0):
        captured(value)
    assert captured.cache_info() == (2, 2, 64, 2)


def test_true_and_one_are_different_numbers():
    """bool, int and float arguments have different dtypes."""
    captured = tg.capture(lambda x: x + 1)
    assert [captured(v).dtype.name for v in (True, 1, 1.0)] == ["int32", "int32", "float32"]
    assert captured.cache_info().captures == 3


def test_a_static_argument_captures_once_per_value():
    """A static argument that changes at every call captures at every call."""
    captured = tg.capture(lambda x, n: x * n, static_argnums=1, verify=False)
    for n in range(5):
        captured(X, n)
    assert captured.cache_info() == (0, 5, 64, 5)


def test_time_and_numpy_random_numbers_are_refused():
    """They would be frozen; two traces of one signature must agree."""
    rng = np.random.default_rng(0)
    # The fraction: all seconds since the start may round to one float32 in both traces.
    for draw in (lambda: time.perf_counter() % 1, rng.random):
        with pytest.raises(tg.CaptureError, match="does Python work that changes from one trace"):
            tg.capture(lambda x: x + draw())(X)  # noqa: B023


def test_what_differs_only_now_and_then_is_frozen():
    """Python work that agrees in both traces is not noticed: the value of the capture stays."""
    hour = [9]
    captured = tg.capture(lambda x: x + hour[0])
    captured(X)
    hour[0] = 10
    assert_same(captured(X), X + 9)


def test_random_keys_repeat_if_they_are_not_advanced():
    """A key argument that does not change gives the same numbers at every replay."""
    captured = tg.capture(lambda key: jax.random.normal(key, (2,)))
    key = jax.random.key(0)
    assert_same(captured(key), captured(key))
    assert not np.array_equal(captured(key), captured(jax.random.split(key)[0]))


def test_defaults_are_baked_in():
    """A default that is not passed is a Python value of the capture, not an argument."""
    captured = tg.capture(lambda x, scale=2.0: x * scale)
    assert_same(captured(X), X * 2)
    assert_same(captured(X, 3.0), X * 3)
    assert captured.cache_info().captures == 2


def test_settings_of_jax_are_signatures():
    """As with `jax.jit`: 64-bit types and matmul precision belong to the key of a capture."""
    captured = tg.capture(lambda x: x.astype(int) + jnp.arange(3))
    assert captured(X).dtype == jnp.int32
    with jax.enable_x64(True):
        assert captured(X).dtype == jnp.int64
    assert captured(X).dtype == jnp.int32


def test_numpy_results_are_read_only_and_do_not_follow():
    """`np.asarray` of a result is its value; it neither changes nor can be changed."""
    captured = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = captured(jnp.zeros(2))
    view = np.asarray(state)
    captured(state)
    assert view.tolist() == [1.0, 1.0]
    assert not view.flags.writeable


def test_a_donated_array_is_gone_for_its_other_owners_too():
    """Donation consumes the array, not the name: every reference to it is dead."""
    captured = tg.capture(lambda s: s * 2, donate_argnums=0)
    x = jnp.ones(2)
    other = x
    captured(x)
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.negative(other)


def test_identity_and_equality_of_results():
    """Results are new objects at each call, state leaves too; `==` compares elements."""
    captured = tg.capture(lambda s, x: (s, x * 2), donate_argnums=0)
    state, first = captured(X * 1, X)
    again, second = captured(state, X)
    assert state is not again
    assert first is not second
    assert bool((first == second).all())


def test_large_arrays_closed_over_are_reported_not_refused():
    """Every graph keeps a copy of them."""
    table = jnp.ones((600, 600))
    captured = tg.capture(lambda x: x + table.sum() + table[0, 0])
    report = captured.explain(X)
    assert "closes over" in report
    assert float(captured(X)[0]) == 360001.0


def test_signatures_beyond_the_bound_are_captured_again():
    """64 signatures are kept; a function that sees more sizes than that should pad its input."""
    captured = tg.capture(lambda x: x, verify=False)
    assert captured.cache_info().maxsize == 64
