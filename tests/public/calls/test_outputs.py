"""What comes out: fresh results keep their values for ever, static ones are the buffers."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

X = jnp.arange(4.0)


def numbers(count):
    return [jnp.float32(i) for i in range(count)]


@pytest.mark.parametrize("read", [False, True])
def test_results_keep_their_values_over_many_calls(read):
    captured = tg.capture(lambda x: (x * 2, {"x": x, "sum": X + x}))
    kept = []
    for x in numbers(20):
        kept.append(captured(x))
        if read:
            kept[-1][0].block_until_ready()
    for x, result in zip(numbers(20), kept, strict=True):
        assert_same(result, (x * 2, {"x": x, "sum": X + x}))


def test_a_result_that_is_an_argument_is_a_value_of_its_own():
    captured = tg.capture(lambda x, y: (x, y))
    host = np.ones(3, np.float32)
    first, _ = captured(host, 1.0)
    host[:] = 7
    second, _ = captured(host, 2.0)
    assert np.array_equal(first, np.ones(3))
    assert np.array_equal(second, np.full(3, 7))
    plain = jnp.ones(3)
    third, _ = captured(plain, 1.0)
    plain.delete()
    captured(X[:3], 1.0)
    assert np.array_equal(third, np.ones(3))


def test_results_are_read_late_from_other_places():
    captured = tg.capture(lambda x: x * 2)
    results = [captured(x) for x in numbers(5)]
    assert float(sum(results)) == 20.0
    assert [int(each) for each in results] == [0, 2, 4, 6, 8]
    assert_same(jnp.stack(results), jnp.stack(numbers(5)) * 2)
    assert_same(jax.jit(lambda values: values[3])(results), jnp.float32(6))
    assert_same(jax.grad(lambda x: x**2)(results[2]), jnp.float32(8))


def test_a_result_is_an_argument_of_the_next_call():
    captured = tg.capture(lambda a, b: (b + 1, a))
    a, b = jnp.float32(0), jnp.float32(10)
    history = []
    for _ in range(6):
        a, b = captured(a, b)
        history.append((a, b))
    assert [(int(a), int(b)) for a, b in history] == [
        (11, 0),
        (1, 11),
        (12, 1),
        (2, 12),
        (13, 2),
        (3, 13),
    ]


def test_the_same_result_as_both_arguments():
    captured = tg.capture(lambda a, b: a + b)
    value = jnp.float32(1)
    for _ in range(5):
        value = captured(value, value)
    assert float(value) == 32.0


def test_results_that_are_dropped_live_until_the_next_call_at_most():
    captured = tg.capture(lambda x: (x + 1, x * 2))
    kept, dropped = captured(X)
    reference = weakref.ref(dropped)
    del dropped
    captured(X * 5)
    gc.collect()
    assert reference() is None
    assert_same(kept, X + 1)


def test_deleted_results_stay_deleted():
    captured = tg.capture(lambda x: x * 2)
    result = captured(X)
    result.delete()
    captured(X + 1)
    assert result.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(result)
    with pytest.raises(tg.CaptureError, match="argument 0 `x` has been deleted"):
        captured(result)
    assert_same(captured(X), X * 2)


def test_empty_and_missing_results():
    assert tg.capture(lambda x: None)(X) is None
    assert tg.capture(lambda x: ())(X) == ()
    assert tg.capture(lambda x: {"a": None, "b": []})(X) == {"a": None, "b": []}
    captured = tg.capture(lambda x: (x[:0], None, x > 1))
    for _ in range(2):
        assert_same(captured(X), (X[:0], None, X > 1))


def test_weak_types_and_dtypes_of_results():
    captured = tg.capture(lambda x: (x, x * 1.0, 1, x > 0, jnp.float16(x)))
    for x in (2.0, 2):
        assert_same(captured(x), jax.jit(captured.__wrapped__)(x))


def test_static_results_are_the_buffer_itself():
    captured = tg.capture(lambda x: x * 2, outputs="static")
    first = captured(X)
    address = first.data_ptr()
    assert_same(first, X * 2)
    second = captured(X + 1)
    assert second.data_ptr() == address
    assert_same(second, (X + 1) * 2)
    with pytest.raises(tg.StaleOutputError) as caught:
        np.asarray(first)
    error = caught.value
    assert error.what.startswith("static output `")
    assert error.what.endswith("` was overwritten by a later replay")
    assert "calls/test_outputs.py:" in error.where
    assert "in test_static_results_are_the_buffer_itself" in error.where
    assert "made by replay" in error.where
    assert 'outputs="static" returns the static buffer itself' in error.why
    assert ".copy()" in error.fix
    assert_same(second, (X + 1) * 2)


def test_a_stale_result_is_refused_as_an_argument_and_a_present_one_is_not():
    captured = tg.capture(lambda x: x + 1, outputs="static")
    first = captured(X)
    second = captured(first)
    assert_same(second, X + 2)
    with pytest.raises(tg.StaleOutputError):
        captured(first)
    with pytest.raises(tg.StaleOutputError):
        jnp.negative(first)
    assert_same(captured(X), X + 1)


def test_copies_of_static_results_stay():
    captured = tg.capture(lambda x: x * 2, outputs="static")
    kept = [captured(x).copy() for x in numbers(4)]
    assert [float(each) for each in kept] == [0.0, 2.0, 4.0, 6.0]


def test_static_results_beside_resident_state():
    captured = tg.capture(
        lambda s, x: ({"w": s["w"] + x}, s["w"].sum()), donate_argnums=0, outputs="static"
    )
    state, first = captured({"w": jnp.zeros(2)}, 1.0)
    state, second = captured(state, 1.0)
    assert_same((state["w"], second), (jnp.ones(2) * 2, jnp.float32(2)))
    with pytest.raises(tg.StaleOutputError):
        float(first)


def test_results_are_not_writable():
    fresh = tg.capture(lambda x: x * 2)(X)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(fresh)[0] = 1
    with pytest.raises(TypeError):
        fresh[0] = 1


def test_a_failed_replay_makes_static_results_stale():
    is_broken = []

    def check(y):
        if is_broken:
            raise ValueError("broken on purpose")
        return np.asarray(y)

    def function(x):
        y = x * 2
        return y, jax.pure_callback(check, jax.typeof(y), y) + 1

    captured = tg.capture(function, mode="partial", outputs="static")
    captured(jnp.float32(1))
    y, z = captured(jnp.float32(1))
    is_broken.append(True)
    with pytest.raises(Exception, match="broken on purpose"):
        captured(jnp.float32(100))
    for each in (y, z):
        with pytest.raises(tg.StaleOutputError):
            float(each)
    is_broken.clear()
    assert [float(each) for each in captured(jnp.float32(3))] == [6.0, 7.0]
