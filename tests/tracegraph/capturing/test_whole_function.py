"""A region that is all of a function is bound as one call of its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.capturing.partition import partition_graph
from tracegraph.lowering.request import Region
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.runtime.streams.stream import Stream, stream
from tracegraph.tracing.trace import LostTraceError, trace_count, trace_function

X = np.arange(4, dtype=np.float32)
# From this size on an array is not embedded.
TABLE = np.ones(2**18, dtype=np.float32)


def find_region(function: Callable[..., Any], *args: Any, **options: Any) -> Region:
    """Returns the only region of a function, partitioned with its trace."""
    traced = trace_function(function, args, {}, name="step")
    graph, _ = run_passes(traced.graph, DEFAULT_PASSES)
    names = [f"i{index}" for index in range(len(graph.inputs))]
    request = partition_graph(graph, input_names=names, donated=(), bind=traced.bind, **options)
    (region,) = request.regions
    return region


def list_calls(region: Region, *arrays: Any) -> list[str]:
    """Returns the primitives that a region binds."""
    closed = jax.make_jaxpr(region.function)(*arrays)
    return [equation.primitive.name for equation in closed.jaxpr.eqns]


def update(state: dict[str, Any], x: Any) -> Any:
    return {"w": jnp.sin(state["w"]) * x, "n": state["n"]}, x.sum(), 2.0


def test_it_is_bound_as_one_call_and_not_traced_again():
    state = {"w": X, "n": np.int32(3)}
    region = find_region(update, state, X)
    before = trace_count()
    assert [spec.name for spec in region.inputs] == ["i1", "i2"]
    assert list_calls(region, X, X) == ["jit"]
    values = region.function(X, X)
    assert trace_count() == before
    for value, want in zip(values, [np.sin(X) * X, X.sum(), np.float32(2)], strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_typed_key_is_its_data():
    key = jax.random.key(3)
    region = find_region(lambda key, x: (jax.random.split(key)[0], x + 1), key, X)
    data = jax.random.key_data(key)
    found, plus = region.function(data, X)
    assert np.array_equal(found, jax.random.key_data(jax.random.split(key)[0]))
    assert np.array_equal(plus, X + 1)
    assert list_calls(region, data, X).count("jit") == 1


def test_an_unused_key_and_an_unused_number_are_stood_in_for():
    region = find_region(lambda key, n, x: (x + 1, key, n), jax.random.key(3), 7, X)
    assert [spec.name for spec in region.inputs] == ["i2"]
    (result,) = region.function(X)
    assert np.array_equal(result, X + 1)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        pytest.param(lambda x: jnp.sin(x) + jnp.sum(TABLE), {}, id="constant"),
        pytest.param(lambda x: jnp.sin(x) + x, {"is_marked": True}, id="marked"),
    ],
)
def test_what_is_not_the_whole_function_is_bound_op_by_op(
    function: Callable[..., Any], options: dict[str, Any]
):
    region = find_region(function, X, **options)
    arrays = [X] * len(region.inputs)
    assert "jit" not in list_calls(region, *arrays)
    assert {"sin", "add"} <= set(list_calls(region, *arrays))


def test_a_function_on_two_streams_is_bound_op_by_op():
    side = Stream()

    def function(x: jax.Array) -> jax.Array:
        capturing = Stream()
        side.wait_stream(capturing)
        with stream(side):
            y = jnp.sin(x)
        capturing.wait_stream(side)
        return y + x

    traced = trace_function(function, (X,), {}, name="step")
    graph, _ = run_passes(traced.graph, DEFAULT_PASSES)
    request = partition_graph(graph, input_names=["x"], donated=(), bind=traced.bind)
    for region in request.regions:
        assert "jit" not in list_calls(region, *[X] * len(region.inputs))


def test_a_lost_trace_is_bound_op_by_op():
    region = find_region(lambda x: jnp.sin(x) + x, X)
    before = trace_count()
    jax.clear_caches()
    assert "sin" in list_calls(region, X)
    with jax.default_matmul_precision("float32"):
        np.testing.assert_allclose(region.function(X)[0], np.sin(X) + X, rtol=1e-6)
    assert trace_count() == before


def test_a_trace_never_runs_the_function_again():
    traced = trace_function(lambda x: x + 1, (X,), {}, name="step")
    assert np.array_equal(traced.bind(X)[0], X + 1)
    with pytest.raises(LostTraceError):
        traced.bind(X[:2])


def test_python_runs_twice_in_a_capture_also_with_other_settings():
    count: list[int] = []

    def function(x: Any) -> jax.Array:
        count.append(1)
        return jnp.sin(x) * 2

    captured = tg.capture(function, verify=False)
    captured(X)
    with jax.default_matmul_precision("float32"):
        captured(X)
    assert len(count) == 4
