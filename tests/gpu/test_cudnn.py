"""Attention of cuDNN in graphs on a GPU: forward and gradients, with the bits of XLA's programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.library_nodes import CudnnNode

pytestmark = pytest.mark.usefixtures("gpu")

RNG = np.random.default_rng(6)
# Batch, sequence, heads, features.
SHAPE = (2, 256, 4, 64)


def draw(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def attend_causally(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, is_causal=True)


def attend_with_bias(q: Any, k: Any, v: Any) -> Any:
    bias = jnp.linspace(-1, 1, 256 * 256).reshape(1, 1, 256, 256).astype(q.dtype)
    return attend(q, k, v, bias=jnp.broadcast_to(bias, (1, 4, 256, 256)))


FUNCTIONS: dict[str, Any] = {
    "plain": attend,
    "causal": attend_causally,
    "bias": attend_with_bias,
}


def list_graphs(captured: Any, *arguments: Any) -> list[CompiledGraph]:
    """Returns the compiled graphs of cuDNN in a function that is one CUDA graph."""
    stages = captured.lower(*arguments).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True]
    nodes = [node for stage in stages for node in list_nested(stage.nodes)]
    calls = [node.call for node in nodes if isinstance(node, CudnnNode)]
    return [call for call in calls if isinstance(call, CompiledGraph)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_equals_xla(name: str, dtype: Any) -> None:
    function = FUNCTIONS[name]
    captured: Any = tg.capture(lambda q, k, v: function(q * 2, k, v) + 1)
    for _ in range(3):
        arguments = tuple(draw(*SHAPE, dtype=dtype) for _ in range(3))
        assert_replayed(captured, captured(*arguments), arguments)
    assert captured.cache_info().misses == 1
    assert len(list_graphs(captured, *[draw(*SHAPE, dtype=dtype)] * 3)) == 1


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_gradients_equal_xla(name: str) -> None:
    function = FUNCTIONS[name]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (function(q, k, v).astype(np.float32) ** 2).mean()

    captured: Any = tg.capture(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    for _ in range(3):
        arguments = tuple(draw(*SHAPE) for _ in range(3))
        assert_replayed(captured, captured(*arguments), arguments)
    assert len(list_graphs(captured, *[draw(*SHAPE)] * 3)) == 2


def test_lengths_of_sequences_are_read_at_each_call() -> None:
    def function(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return attend(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    captured: Any = tg.capture(function)
    for lengths in ([256, 100], [1, 256], [37, 64]):
        arguments = (*(draw(*SHAPE) for _ in range(3)), jnp.asarray(lengths, jnp.int32))
        assert_replayed(captured, captured(*arguments), arguments)
    assert captured.cache_info().misses == 1


def test_layers_in_a_scan_equal_xla() -> None:
    def run(x: Any, weights: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            q, k, v = jnp.split((carry @ w).reshape(2, 256, 12, 64), 3, axis=2)
            return carry + attend_causally(q, k, v).reshape(carry.shape), None

        return jax.lax.scan(layer, x, weights)[0]

    captured: Any = tg.capture(run)
    for _ in range(3):
        arguments = (draw(2, 256, 256), draw(3, 256, 768) * 0.02)
        assert_replayed(captured, captured(*arguments), arguments)


def test_memory_goes_with_the_graph() -> None:
    captured: Any = tg.capture(attend)
    captured(*(draw(*SHAPE) for _ in range(3)))
    before = tg.memory.memory_allocated()
    captured.clear_cache()
    assert tg.memory.memory_allocated() < before
