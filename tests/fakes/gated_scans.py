"""The gradient of a scan whose cells join their weights, as an LSTM's of flax do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, BATCH = 32, 16


def run_gates(weights: Any, rows: Any) -> Any:
    """Returns a number that depends on a state after all rows."""

    def turn(carry: Any, row: Any) -> Any:
        state, memory = carry
        gates = row @ jnp.concatenate(weights["in"], 1) + state @ jnp.concatenate(weights["own"], 1)
        keep, add, value, show = jnp.split(gates, 4, 1)
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(add) * jnp.tanh(value)
        return (jax.nn.sigmoid(show) * jnp.tanh(memory), memory), None

    start = jnp.zeros((BATCH, WIDTH), jnp.float32)
    return (lax.scan(turn, (start, start), rows)[0][0] ** 2).sum()


differentiate_gates = jax.grad(run_gates)


def make_gates(length: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns weights of two times four parts, and rows for so many iterations."""
    generator = np.random.default_rng(seed)

    def draw(*sizes: int) -> Any:
        return generator.normal(scale=0.3, size=sizes).astype(np.float32)

    parts = {name: [draw(WIDTH, WIDTH) for _ in range(4)] for name in ("in", "own")}
    return parts, draw(length, BATCH, WIDTH)
