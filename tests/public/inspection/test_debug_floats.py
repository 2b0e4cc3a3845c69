"""`jax_debug_nans` and `jax_debug_infs`: the error of `jax.jit`, on every call."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line
from tracegraph.jax_internals import InvalidFloatSignal
from tracegraph.replaying.float_checks import check_results

X = np.array([1.0, 2.0], np.float32)
FILE = "tests/public/inspection/test_debug_floats.py"


def step(x):
    y = x * 2
    return jnp.log(y) + 1


AT = line() - 3


def step_and_print(x):
    jax.debug.callback(lambda v: None, x.sum())
    return step(x)


@pytest.fixture(autouse=True)
def _check_nans():
    with jax.debug_nans(True):
        yield


def read_error(call, *args):
    with pytest.raises(FloatingPointError) as caught:
        call(*args)
    assert type(caught.value) is FloatingPointError
    return caught.value


@pytest.mark.parametrize("mode", ["whole", "partial"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_call_raises_what_jit_raises(mode, is_captured):
    function = step if mode == "whole" else step_and_print
    captured = tg.capture(function, mode=mode)
    if is_captured:
        captured(X)
    error = read_error(captured, -X)
    assert str(error) == str(read_error(jax.jit(step), -X))
    assert str(error) == "invalid value (nan) encountered in log"
    assert error.__notes__[-1] == f"  where: {FILE}:{AT} in step"
    assert np.array_equal(captured(X), step(X))
    error = read_error(captured, -X)
    assert str(error) == "invalid value (nan) encountered in log"


def test_infinite_values_and_a_graph_that_is_called_itself():
    captured = tg.capture(step)
    with jax.debug_infs(True):
        graph = captured.lower(X).instantiate()
        assert str(read_error(graph, X * 0)) == "invalid value (inf) encountered in log"
        assert str(read_error(captured, X * 0)) == "invalid value (inf) encountered in log"
        assert np.array_equal(graph(X), step(X))


def test_the_setting_may_change_between_calls():
    captured = tg.capture(step)
    with jax.debug_nans(False):
        assert np.isnan(captured(-X)).all()
    read_error(captured, -X)
    with jax.debug_nans(False):
        assert np.isnan(captured(-X)).all()
    assert captured.cache_info().currsize == 1


def test_donated_state_keeps_its_value_as_under_jit():
    captured = tg.capture(lambda s, x: (s + jnp.log(x), x * 2), donate_argnums=0)
    first = jnp.ones(2)
    state, _ = captured(first, X)
    wanted = np.array(state)
    assert str(read_error(captured, state, -X)) == "invalid value (nan) encountered in log"
    assert np.array_equal(state, wanted)
    assert np.array_equal(first, [1, 1])
    assert np.array_equal(captured(state, X)[0], wanted + np.log(X))


@pytest.mark.parametrize("value", [np.nan, complex(0, np.nan), np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int32"])
def test_results_that_jax_does_not_check_are_checked(value, dtype):
    if isinstance(value, complex) and dtype != "complex64":
        value = value.imag
    array = np.asarray(0 if dtype == "int32" else value, jnp.dtype(dtype))
    build = check_results(lambda: {"a": np.zeros(2), "b": array}, "step")
    is_invalid = dtype != "int32" and bool(np.isnan(value))
    expected = pytest.raises(InvalidFloatSignal) if is_invalid else contextlib.nullcontext()
    with expected:
        assert build()["b"] is array
    with jax.debug_nans(False):
        assert build()["b"] is array
    is_infinite = dtype != "int32" and bool(np.isinf(value))
    expected = pytest.raises(InvalidFloatSignal) if is_infinite else contextlib.nullcontext()
    with jax.debug_nans(False), jax.debug_infs(True), expected:
        build()
