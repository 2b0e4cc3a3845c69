"""Train steps of the usual libraries: the ops under ``jax.jit`` give the bits of ``jax.jit``."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.program import fill
from tests.fakes.jax_programs import assert_same_bits
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.tracing.trace import trace_function

jax.config.update("jax_platforms", "cpu")
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
Y = np.arange(8, dtype=np.int32) % 3


def make_flax_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    nn = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    model = nn.Sequential([nn.Dense(16), nn.gelu, nn.LayerNorm(), nn.Dense(3)])
    optimizer = optax.adam(1e-2)
    params = fill(jax.eval_shape(model.init, jax.random.key(0), X))

    def step(state: Any, key: Any, x: Any, y: Any) -> Any:
        params, moments = state
        noise = 0.1 * jax.random.normal(key, x.shape)

        def loss(params: Any) -> Any:
            logits = model.apply(params, x + noise)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    moments = jax.jit(optimizer.init)(params)
    return step, ((params, moments), jax.random.key(1), X, Y)


def make_equinox_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    equinox = pytest.importorskip("equinox")
    model = equinox.filter_eval_shape(equinox.nn.MLP, 6, 3, 16, 2, key=jax.random.key(0))
    shapes, rest = equinox.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    arrays = fill(shapes)

    def step(arrays: Any, x: Any, y: Any) -> Any:
        def loss(arrays: Any) -> Any:
            logits = jax.vmap(equinox.combine(arrays, rest))(x)
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

        value, grads = jax.value_and_grad(loss)(arrays)
        return jax.tree.map(lambda p, g: p - 0.1 * g, arrays, grads), value

    return step, (arrays, X, Y)


def make_nnx_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    nnx = pytest.importorskip("flax.nnx")
    definition, state = nnx.split(nnx.Linear(6, 3, rngs=nnx.Rngs(0)))

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(nnx.merge(definition, state)(x) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step, (state, X)


@pytest.mark.parametrize("make", [make_flax_step, make_equinox_step, make_nnx_step])
def test_train_step(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    step, args = make()
    wanted, tree = jax.tree.flatten(jax.jit(step)(*args))
    traced = trace_function(step, args, {}, name="step")
    graph, reports = run_passes(traced.graph, DEFAULT_PASSES)
    assert traced.out_tree == tree
    assert reports[-1].ops_after == len(graph.ops)
    got = jax.jit(lambda *arrays: evaluate_graph(graph, *arrays))(*jax.tree.leaves(args))
    assert [jax.typeof(each) for each in got] == [jax.typeof(each) for each in wanted]
    assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    "module",
    [
        "ir.interpreter",
        "ir.printer",
        "ir.verifier",
        "jax_internals",
        "passes.pipeline",
        "tracing.trace",
    ],
)
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"tracegraph.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
