"""A recurrent layer as users write it: a matrix for all gates of its input, one for its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_cells(weights: Any, xs: Any) -> Any:
    """Returns the states of an LSTM without biases, of all steps.

    Args:
        weights: ``given`` and ``carried``, each with the columns of four gates.
        xs: of steps, rows and columns.
    """

    def step(state: Any, x: Any) -> Any:
        cell, hidden = state
        gates = jnp.split(x @ weights["given"] + hidden @ weights["carried"], 4, axis=-1)
        start, forget, end = (jax.nn.sigmoid(gate) for gate in gates[:3])
        cell = forget * cell + start * jnp.tanh(gates[3])
        hidden = end * jnp.tanh(cell)
        return (cell, hidden), hidden

    zeros = jnp.zeros((xs.shape[1], weights["carried"].shape[0]))
    return lax.scan(step, (zeros, zeros), xs)[1]
