"""Convolutions in graphs on a GPU: forward and both gradients, with the bits of XLA's programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.convolutions import make_convolution
from tests.gpu.reference import assert_replayed, copy_arguments
from tracegraph.runtime.definition.cudnn_calls import Convolution, Direction
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.library_nodes import CudnnNode

pytestmark = pytest.mark.usefixtures("gpu")

RNG = np.random.default_rng(5)


def draw(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(RNG.normal(size=shape), dtype)


PLAIN = make_convolution()
IMAGES, FILTERS = (4, 16, 16, 16), (3, 3, 16, 32)
# Function, shapes of input and filter, dtype.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], Any]] = {
    "float32": (PLAIN, IMAGES, FILTERS, np.float32),
    "float16": (PLAIN, IMAGES, FILTERS, np.float16),
    "bfloat16": (PLAIN, IMAGES, FILTERS, jnp.bfloat16),
    "groups": (make_convolution(feature_group_count=4), IMAGES, (3, 3, 4, 32), np.float32),
    "depthwise": (make_convolution(feature_group_count=16), IMAGES, (3, 3, 1, 16), np.float32),
    "strides": (make_convolution((2, 2)), IMAGES, FILTERS, np.float32),
    "dilation": (make_convolution(rhs_dilation=(2, 2)), IMAGES, FILTERS, np.float32),
    "features first": (
        make_convolution(dimension_numbers=("NCHW", "OIHW", "NCHW")),
        *((4, 16, 16, 16), (32, 16, 3, 3), np.float32),
    ),
    "one dimension": (
        make_convolution((1,), ("NWC", "WIO", "NWC")),
        *((4, 64, 16), (3, 16, 32), np.float32),
    ),
    "three dimensions": (
        make_convolution((1, 1, 1), ("NDHWC", "DHWIO", "NDHWC")),
        *((2, 8, 8, 8, 16), (3, 3, 3, 16, 16), np.float32),
    ),
}


def list_calls(captured: Any, *arguments: Any) -> list[Convolution]:
    """Returns the convolutions of a function that is one graph."""
    stages = captured.lower(*arguments).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True]
    nodes = [node for stage in stages for node in list_nested(stage.nodes)]
    calls = [node.call for node in nodes if isinstance(node, CudnnNode)]
    return [call for call in calls if isinstance(call, Convolution)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_forward_equals_xla(name: str) -> None:
    function, x_shape, w_shape, dtype = PROGRAMS[name]
    captured: Any = tg.capture(lambda x, w: function(x, w) * 2)
    for _ in range(3):
        arguments = (draw(*x_shape, dtype=dtype), draw(*w_shape, dtype=dtype))
        assert_replayed(captured, captured(*arguments), arguments)
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_equal_xla(name: str) -> None:
    function, x_shape, w_shape, dtype = PROGRAMS[name]

    def loss(x: Any, w: Any) -> Any:
        return (function(x, w).astype(np.float32) ** 2).mean()

    captured: Any = tg.capture(jax.grad(loss, argnums=(0, 1)))
    for _ in range(3):
        arguments = (draw(*x_shape, dtype=dtype), draw(*w_shape, dtype=dtype))
        assert_replayed(captured, captured(*arguments), arguments)


def test_calls_have_the_engines_that_xla_measured() -> None:
    captured: Any = tg.capture(jax.grad(lambda x, w: (PLAIN(x, w) ** 2).sum(), argnums=(0, 1)))
    arguments = (draw(*IMAGES), draw(*FILTERS))
    captured(*arguments)
    calls = list_calls(captured, *arguments)
    # XLA may write a kernel of its own for one of them.
    assert calls
    assert all(call.algorithm.engine is not None for call in calls), calls
    assert {call.direction for call in calls} <= set(Direction)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.elu, jax.nn.relu6, lambda x: x])
def test_bias_and_activation_equal_xla(activation: Any) -> None:
    captured: Any = tg.capture(lambda x, w, b: activation(PLAIN(x, w) + b))
    for _ in range(3):
        arguments = (draw(*IMAGES), draw(*FILTERS), draw(32))
        assert_replayed(captured, captured(*arguments), arguments)


def test_side_input_equals_xla() -> None:
    captured: Any = tg.capture(lambda x, w, b, z: jax.nn.relu(PLAIN(x, w) + b + z))
    for _ in range(3):
        arguments = (draw(*IMAGES), draw(*FILTERS), draw(32), draw(4, 16, 16, 32))
        assert_replayed(captured, captured(*arguments), arguments)


def test_convolution_in_a_loop_equals_xla() -> None:
    def repeat(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(PLAIN(c, w)), None), x, None, 5)[0]

    captured: Any = tg.capture(repeat)
    for _ in range(3):
        arguments = (draw(*IMAGES), draw(3, 3, 16, 16))
        assert_replayed(captured, captured(*arguments), arguments)


def normalize(x: Any, scale: Any, shift: Any) -> Any:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def block(weights: Any, x: Any) -> Any:
    y = PLAIN(x, weights["first"])
    y = jax.nn.relu(normalize(y, weights["scale"], weights["shift"]))
    y = PLAIN(y, weights["second"])
    return jax.nn.relu(normalize(y, weights["scale"], weights["shift"]) + x)


def test_train_step_of_a_residual_block_equals_xla() -> None:
    def loss(weights: Any, x: Any, labels: Any) -> Any:
        logits = block(weights, x).mean((1, 2)) @ weights["dense"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean()

    def step(state: Any, x: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["weights"], x, labels)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
        weights = jax.tree.map(lambda w, v: w - 0.1 * v, state["weights"], velocity)
        return {"weights": weights, "velocity": velocity}, value

    weights = {
        "first": draw(3, 3, 16, 16) * 0.1,
        "second": draw(3, 3, 16, 16) * 0.1,
        "scale": jnp.ones(16),
        "shift": jnp.zeros(16),
        "dense": draw(16, 10),
    }
    state: Any = {"weights": weights, "velocity": jax.tree.map(jnp.zeros_like, weights)}
    captured: Any = tg.capture(step, donate_argnums=0)
    labels = jnp.asarray(RNG.integers(10, size=4))
    for _ in range(5):
        x = draw(*IMAGES)
        before = copy_arguments((state, x, labels))
        state, value = captured(state, x, labels)
        assert_replayed(captured, (state, value), before)
    assert captured.cache_info().misses == 1


def test_plans_and_memory_go_with_the_graph() -> None:
    captured: Any = tg.capture(PLAIN)
    captured(draw(*IMAGES), draw(*FILTERS))
    assert captured.pool_bytes > 0
    before = tg.memory.memory_allocated()
    captured.clear_cache()
    assert tg.memory.memory_allocated() < before


def test_graphs_on_two_streams_do_not_disturb_each_other() -> None:
    arguments = (draw(*IMAGES), draw(*FILTERS))
    captured: Any = [tg.capture(lambda x, w, k=k: PLAIN(x, w) * k) for k in (2.0, 3.0)]
    wanted = [np.asarray(each(*arguments)) for each in captured]
    streams = [tg.Stream() for _ in captured]
    for _ in range(10):
        results = []
        for each, stream in zip(captured, streams, strict=True):
            with tg.stream(stream):
                results.append(each(*arguments))
        tg.synchronize()
        for result, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, expected)
