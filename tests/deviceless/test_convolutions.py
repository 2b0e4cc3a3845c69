"""Convolutions, as XLA compiles them for an H200, become calls of cuDNN in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.convolutions import LAST, make_convolution
from tests.deviceless import building, pipeline
from tracegraph.lowering.lower import Lowered
from tracegraph.reports.explain_gpu import count_nodes
from tracegraph.runtime.definition.cudnn_calls import (
    Activation,
    Algorithm,
    Convolution,
    Direction,
    Window,
)
from tracegraph.runtime.definition.library_nodes import CudnnNode

F32 = np.float32


def make_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x, w: (function(x, w) ** 2).sum(), argnums=(0, 1))


def ones(*shape: int, dtype: Any = F32) -> Any:
    return np.ones(shape, dtype)


IMAGES, FILTERS = ones(2, 8, 8, 8), ones(3, 3, 8, 16)
PLAIN = make_convolution()
# Function, arguments, and of each call its direction and the sizes of input and filter.
FORWARD, DATA, FILTER = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] = {
    "forward": (PLAIN, (IMAGES, FILTERS), [(FORWARD, (2, 8, 8, 8), (16, 8, 3, 3))]),
    "gradients": (
        jax.grad(lambda x, w: PLAIN(x, w).sum(), argnums=(0, 1)),
        (IMAGES, FILTERS),
        [(DATA, (2, 8, 8, 8), (16, 8, 3, 3)), (FILTER, (2, 8, 8, 8), (16, 8, 3, 3))],
    ),
    "one dimension": (
        make_convolution((2,), ("NWC", "WIO", "NWC")),
        (ones(2, 16, 8), ones(3, 8, 16)),
        # XLA pads the one side more itself.
        [(FORWARD, (2, 8, 17, 1), (16, 8, 3, 1))],
    ),
    "three dimensions": (
        make_convolution((1, 1, 1), ("NDHWC", "DHWIO", "NDHWC")),
        (ones(1, 4, 4, 4, 8, dtype=np.float16), ones(3, 3, 3, 8, 8, dtype=np.float16)),
        [(FORWARD, (1, 8, 4, 4, 4), (8, 8, 3, 3, 3))],
    ),
    "groups": (
        make_convolution(feature_group_count=2),
        (IMAGES, ones(3, 3, 4, 16)),
        [(FORWARD, (2, 8, 8, 8), (16, 4, 3, 3))],
    ),
    "features first": (
        make_convolution(dimension_numbers=("NCHW", "OIHW", "NCHW")),
        (IMAGES, ones(16, 8, 3, 3)),
        [(FORWARD, (2, 8, 8, 8), (16, 8, 3, 3))],
    ),
    "bfloat16": (
        PLAIN,
        (IMAGES.astype(jnp.bfloat16), FILTERS.astype(jnp.bfloat16)),
        [(FORWARD, (2, 8, 8, 8), (16, 8, 3, 3))],
    ),
}


def lower(function: Callable[..., Any], device: Any, *arguments: Any) -> Lowered:
    return pipeline.lower_for_gpu(pipeline.make_capture_request(function, arguments), device)


def list_calls(lowered: Lowered) -> list[Convolution]:
    (stage,) = lowered.definition.stages
    calls = [node.call for node in stage.nodes if isinstance(node, CudnnNode)]
    return [call for call in calls if isinstance(call, Convolution)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_convolution_is_a_call_in_one_graph(name: str, h200: Any) -> None:
    function, arguments, expected = PROGRAMS[name]
    lowered = lower(function, h200, *arguments)
    calls = list_calls(lowered)
    assert [(call.direction, call.x.dims, call.w.dims) for call in calls] == expected
    assert {call.x.dtype for call in calls} == {arguments[0].dtype.name}
    # XLA measures engines on a GPU only.
    assert {call.algorithm for call in calls} == {Algorithm()}
    assert not building.find_faults(lowered.definition)


def test_strides_and_dilation_are_those_of_the_window(h200: Any) -> None:
    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, (2, 2), [(1, 1)] * 2, rhs_dilation=(2, 2), dimension_numbers=LAST
        )

    (call,) = list_calls(lower(convolve, h200, IMAGES, FILTERS))
    assert call.window == Window((1, 1), (2, 2), (2, 2))
    assert call.y.dims == (2, 16, 3, 3)


def test_bias_and_activation_are_part_of_the_call(h200: Any) -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(PLAIN(x, w) + b)

    (call,) = list_calls(lower(layer, h200, IMAGES, FILTERS, ones(16)))
    assert call.window == Window((1, 1), (1, 1), (1, 1))
    assert call.epilogue is not None
    assert call.epilogue.activation is Activation.RELU


def test_step_of_two_layers_with_a_norm_is_one_graph(h200: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        for each in w:
            x = PLAIN(x, each)
            x = (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-5)
            x = jax.nn.relu(x)
        return x.sum()

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))

    lowered = lower(step, h200, [FILTERS, ones(3, 3, 16, 16)], IMAGES)
    directions = sorted(call.direction.value for call in list_calls(lowered))
    assert directions == ["backward data", *["backward filter"] * 2, *["forward"] * 2]
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)
    assert any("cuDNN" in cause for cause in lowered.inexact_causes)
    assert "5 cuDNN calls" in count_nodes(lowered)
