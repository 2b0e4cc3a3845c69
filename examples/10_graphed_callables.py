"""Graph the safe parts of a network, run the rest eagerly, differentiate through all of it.

The network takes one of two ways, decided in Python by a value that the first module computes, so
it cannot be captured whole. Each module gets a forward and a backward graph instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

BATCH, INPUT, HIDDEN, OUTPUT, STEPS = 64, 128, 64, 32, 10
RATE = 0.1

Weights = dict[str, jax.Array]


def linear(weights: Weights, x: jax.Array) -> jax.Array:
    """Returns what a linear layer computes."""
    return x @ weights["w"] + weights["b"]


def make_weights(seed: int, rows: int, columns: int) -> Weights:
    """Returns random weights of a layer."""
    w = jax.random.normal(jax.random.key(seed), (rows, columns)) / np.sqrt(rows)
    return {"w": w, "b": jnp.zeros(columns)}


def train(modules: Any, ways: list[int]) -> list[float]:
    """Trains the network with SGD, and returns its losses; notes the way of each step."""
    first, second, third = modules
    sizes = [(INPUT, HIDDEN), (HIDDEN, OUTPUT), (HIDDEN, OUTPUT)]
    weights = [make_weights(seed, *size) for seed, size in enumerate(sizes)]

    def compute_loss(weights: list[Weights], x: jax.Array, target: jax.Array) -> jax.Array:
        hidden = first(weights[0], x)  # a graph
        way = 1 if hidden.sum() > 0 else 2  # Python reads a value
        ways.append(way)
        output = (second if way == 1 else third)(weights[way], hidden)  # a graph
        return jnp.mean((output - target) ** 2)  # eager

    losses = []
    for step in range(STEPS):
        x, target = jax.random.normal(jax.random.key(100 + step), (2, BATCH, INPUT))
        # The backward parts of the two modules that were used are graphs, too.
        loss, gradients = jax.value_and_grad(compute_loss)(weights, x, target[:, :OUTPUT])
        weights = jax.tree.map(lambda w, gradient: w - RATE * gradient, weights, gradients)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Trains with graphs and with `jax.jit`, and compares the losses."""
    x, hidden = jnp.zeros((BATCH, INPUT)), jnp.zeros((BATCH, HIDDEN))
    graphed = tg.make_graphed_callables(
        (linear, linear, linear),  # in the order of use
        (
            (make_weights(0, INPUT, HIDDEN), x),
            (make_weights(1, HIDDEN, OUTPUT), hidden),
            (make_weights(2, HIDDEN, OUTPUT), hidden),
        ),
    )
    ways: list[int] = []
    losses = train(graphed, ways)
    print(f"ways: {ways}")
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert set(ways) == {1, 2}
    np.testing.assert_allclose(losses, train([jax.jit(linear)] * 3, []), rtol=1e-6)
    print("equal to jax.jit of each module")


if __name__ == "__main__":
    main()
