"""Graphed callables on a GPU: the network of the CUDA semantics, residuals in place, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import jit_untried
from tracegraph.graph_pictures.dump import describe_graph

pytestmark = pytest.mark.usefixtures("gpu", "untried")
BATCH, INPUT, HIDDEN, OUTPUT = 64, 256, 128, 64


def linear(weights: Any, x: Any) -> Any:
    return x @ weights["w"] + weights["b"]


def make_weights(seed: int, rows: int, columns: int) -> Any:
    w = jax.random.normal(jax.random.key(seed), (rows, columns)) / np.sqrt(rows)
    return {"w": w, "b": jnp.zeros(columns)}


def make_all_weights() -> list[Any]:
    sizes = [(INPUT, HIDDEN), (HIDDEN, OUTPUT), (HIDDEN, OUTPUT)]
    return [make_weights(seed, *size) for seed, size in enumerate(sizes)]


def train(modules: Any, steps: int) -> tuple[list[int], list[Any]]:
    first, second, third = modules
    weights, ways, losses = make_all_weights(), [], []

    def compute_loss(weights: Any, x: Any, target: Any) -> Any:
        hidden = first(weights[0], x)
        way = 1 if hidden.sum() > 0 else 2
        ways.append(way)
        return jnp.mean(((second if way == 1 else third)(weights[way], hidden) - target) ** 2)

    for step in range(steps):
        x, target = jax.random.normal(jax.random.key(100 + step), (2, BATCH, INPUT))
        loss, gradients = jax.value_and_grad(compute_loss)(weights, x, target[:, :OUTPUT])
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        losses.append(float(loss))
    return ways, [losses, weights]


def test_three_modules_and_a_branch_train_as_with_jit():
    weights = make_all_weights()
    x, hidden = jnp.zeros((BATCH, INPUT)), jnp.zeros((BATCH, HIDDEN))
    samples = ((weights[0], x), (weights[1], hidden), (weights[2], hidden))
    graphed = tg.make_graphed_callables((linear, linear, linear), samples)
    assert len({each.pool() for each in graphed}) == 1
    with jax.default_matmul_precision("highest"):
        ways, found = train(graphed, 10)
        expected_ways, expected = train([jax.jit(linear)] * 3, 10)
    assert ways == expected_ways
    assert set(ways) == {1, 2}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_two_forwards_before_a_backward_and_accumulated_gradients():
    def layer(weights: Any, x: Any) -> Any:
        return jnp.tanh(linear(weights, x))

    weights = make_weights(0, INPUT, HIDDEN)
    xs = list(jax.random.normal(jax.random.key(1), (2, BATCH, INPUT)))
    graphed, twin = tg.make_graphed_callables(layer, (weights, xs[0])), jax.jit(layer)
    pulls = [jax.vjp(lambda w, x=x: graphed(w, x), weights) for x in xs]
    expected = [jax.vjp(lambda w, x=x: twin(w, x), weights) for x in xs]
    gradients = [pull(y)[0] for y, pull in pulls]
    total = jax.tree.map(jnp.add, *gradients)
    wanted = jax.tree.map(jnp.add, *[pull(y)[0] for y, pull in expected])
    for name in ("w", "b"):
        np.testing.assert_allclose(total[name], wanted[name], rtol=1e-2, atol=1e-2)
    assert not np.array_equal(gradients[0]["w"], gradients[1]["w"])
    again = pulls[0][1](pulls[0][0])[0]
    np.testing.assert_array_equal(again["w"], gradients[0]["w"])


def test_the_backward_graph_reads_residuals_in_place():
    """No replay copies an argument: each is read where it is."""
    graphed = tg.make_graphed_callables(jnp.tanh, (jnp.zeros((BATCH, HIDDEN)),))
    (pair,) = graphed._graphs._pairs.values()
    x = jax.random.normal(jax.random.key(0), (BATCH, HIDDEN))
    y, pull = jax.vjp(graphed, x)
    (gradient,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(gradient, 1 - np.tanh(x) ** 2, rtol=1e-3, atol=1e-5)
    for graph in (pair.forward.find(), pair.backward.find()):
        kinds = [node.kind for node in describe_graph(graph.checked, graph.lowered).nodes]
        assert "memcpy" not in kinds, kinds


def test_higher_orders_and_maps_trace_the_function():
    graphed = tg.make_graphed_callables(jnp.tanh, (jnp.zeros(8),))
    x = jnp.linspace(-1, 1, 8)
    for transform in (jax.hessian, jax.jacrev, jax.jacfwd):
        found = transform(lambda x: graphed(x).sum())(x)
        expected = transform(lambda x: jnp.tanh(x).sum())(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_captured_function_under_an_eager_gradient_replays_two_graphs():
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(linear(weights, x)) ** 2)

    weights, x = make_weights(0, INPUT, HIDDEN), jnp.ones((BATCH, INPUT))
    captured, twin = tg.capture(loss), jit_untried(jax.value_and_grad(loss))
    for step in range(4):
        value, gradients = jax.value_and_grad(captured)(weights, x)
        expected, others = twin(weights, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, others)
        assert captured.cache_info()[:2] == (step, 1)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
