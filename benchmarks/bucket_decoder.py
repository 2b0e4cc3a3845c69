"""The decode step of `buckets.py` and `cold_start.py`: a small decoder with a memory per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Weights = dict[str, jax.Array]


def make_weights(width: int, layers: int) -> Weights:
    """Returns the weights of a small decoder."""
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    return {f"w{i}": jax.random.normal(key, (width, width)) / width for i, key in enumerate(keys)}


def decode(weights: Weights, hidden: jax.Array, memory: jax.Array) -> jax.Array:
    """Returns the next hidden state of each row, which attends to its own memory."""
    for index in range(0, len(weights), 2):
        scores = jax.nn.softmax(jnp.einsum("bw,btw->bt", hidden, memory))
        hidden = hidden + jnp.einsum("bt,btw->bw", scores, memory) @ weights[f"w{index}"]
        hidden = jnp.tanh(hidden @ weights[f"w{index + 1}"]) + hidden
    return hidden


def make_arguments(size: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of a call and their memory."""
    hidden = jnp.ones((size, width)) / width
    return hidden, jnp.ones((size, 8, width)) / width
