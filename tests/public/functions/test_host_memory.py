"""Host memory: arguments may be there, values inside move to and fro, results are on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.offloading import DEVICE, HOST, TRAINS, add_there, make_arguments
from tests.oracles.tree_equality import assert_same

VALUES = np.arange(4, dtype=np.float32)


def put_on_host(values: Any) -> jax.Array:
    """Returns an array in page-locked host memory."""
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(jnp.asarray(values), sharding)


def double(x: Any) -> Any:
    return jax.device_put(x, DEVICE) * 2


def compare(function: Any, *args: Any, **options: Any) -> Any:
    """Calls a function three times, captured, and as `jax.jit` does; returns the captured one."""
    captured: Any = tg.capture(function, **options)
    wanted = jax.jit(function)(*args)
    for _ in range(3):
        found = captured(*args)
        np.testing.assert_array_equal(found, wanted)
        assert found.sharding.memory_kind == wanted.sharding.memory_kind
    return captured


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_an_argument_may_be_in_host_memory(mode: str) -> None:
    captured = compare(double, put_on_host(VALUES), mode=mode)
    np.testing.assert_array_equal(captured(put_on_host(VALUES + 1)), 2 * (VALUES + 1))
    assert captured.cache_info().captures == 1


def test_where_an_argument_is_belongs_to_the_signature() -> None:
    captured = compare(double, put_on_host(VALUES))
    np.testing.assert_array_equal(captured(jnp.asarray(VALUES)), 2 * VALUES)
    np.testing.assert_array_equal(captured(put_on_host(VALUES)), 2 * VALUES)
    assert captured.cache_info().captures == 2
    assert "x: f32[4], in host memory, 16 bytes" in captured.explain(put_on_host(VALUES))


def test_types_in_host_memory_are_printed_as_such() -> None:
    text = str(tg.capture(double).trace(put_on_host(VALUES)))
    assert "graph double(%0: f32<host>[4]):" in text
    assert "%1: f32[4] = device_put" in text


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_values_in_host_memory_are_added_there(mode: str) -> None:
    def add(x: Any, y: Any) -> Any:
        return jax.device_put(x + jax.device_put(y, HOST), DEVICE) * 2

    compare(add, put_on_host(VALUES), jnp.ones(4), mode=mode)
    compare(add_there, jnp.asarray(VALUES), jnp.ones(4), mode=mode)


def test_jax_refuses_two_kinds_of_memory_in_one_op() -> None:
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        tg.capture(lambda x, y: x + y)(put_on_host(VALUES), jnp.ones(4))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jax.device_put(x * 2, HOST), "result of"),
        (lambda x: {"a": x, "b": (x, jax.device_put(x * 2, HOST))}, "result['b'][1] of"),
    ],
)
@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_a_result_in_host_memory_is_refused(function: Any, name: str, mode: Any) -> None:
    captured: Any = tg.capture(function, mode=mode, name="step")
    with pytest.raises(tg.CaptureError, match="is in host memory") as raised:
        captured(jnp.ones(4))
    assert f"{name} `step` is in host memory" in str(raised.value)
    assert "test_host_memory.py" in raised.value.where
    assert raised.value.anchor == "host-memory"


def test_an_argument_that_stays_in_host_memory_is_refused_as_a_result() -> None:
    with pytest.raises(tg.CaptureError, match="is in host memory"):
        tg.capture(lambda x: (x, 1))(put_on_host(VALUES))


def test_donated_host_memory_is_given_up() -> None:
    captured = tg.capture(double, donate_argnums=0)
    x = put_on_host(VALUES)
    # The result is in other memory, so it is not computed in place.
    assert captured.trace(x).graph.aliases == ()
    np.testing.assert_array_equal(captured(x), 2 * VALUES)
    np.testing.assert_array_equal(captured(put_on_host(VALUES + 1)), 2 * VALUES + 2)
    assert x.is_deleted()


@pytest.mark.parametrize("train", TRAINS)
def test_activations_are_kept_in_host_memory(train: Any) -> None:
    weights, x = make_arguments(3, 8)
    captured: Any = tg.capture(train, donate_argnums=0)
    for _ in range(3):
        expected = jax.jit(train)(weights, x)
        found = captured(weights, x)
        assert_same(found, expected)
        weights = expected[0]


def test_a_lazy_capture_takes_host_arguments() -> None:
    captured: Any = tg.capture(double, warm=False)
    x = put_on_host(VALUES)
    np.testing.assert_array_equal(captured(x), 2 * VALUES)
    assert captured.wait_until_captured()
    np.testing.assert_array_equal(captured(x), 2 * VALUES)
    assert captured.cache_info().hits == 1


def test_a_gradient_is_where_that_of_jit_is() -> None:
    captured: Any = tg.capture(double)
    wanted = jax.grad(lambda x: jax.jit(double)(x).sum())(put_on_host(VALUES))
    for _ in range(2):
        found = jax.grad(lambda x: captured(x).sum())(put_on_host(VALUES))
        np.testing.assert_array_equal(found, wanted)
        assert found.sharding.memory_kind == wanted.sharding.memory_kind == "pinned_host"
    assert captured.cache_info().hits == 1


def test_other_transformations_take_host_arguments() -> None:
    x = put_on_host(VALUES)
    captured: Any = tg.capture(double)
    nested: Any = tg.capture(lambda y: captured(y) + 1)
    for found in (jax.jit(captured)(x), jax.vmap(captured)(x), nested(x) - 1):
        np.testing.assert_array_equal(found, 2 * VALUES)


def test_static_inputs_and_replacements_take_host_arguments() -> None:
    x = put_on_host(VALUES)
    static = tg.static_input(x)
    np.testing.assert_array_equal(static, VALUES)
    assert static.sharding.memory_kind == "device"
    compare(double, x, numerics="equivalent")


def test_a_host_argument_cannot_be_saved(tmp_path: Any) -> None:
    captured = compare(double, put_on_host(VALUES))
    with pytest.raises(tg.SavedFileError, match="an argument is in host memory"):
        captured.save(tmp_path / "step.tg")
