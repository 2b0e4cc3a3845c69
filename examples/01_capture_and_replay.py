"""Capture a function once; from then on each call replays it.

The first call traces, checks, compiles and plans the function. Every later call with arguments of
the same shapes and dtypes copies them to fixed addresses, launches the graph and returns results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg


def smooth(signal: jax.Array, width: jax.Array) -> jax.Array:
    """Averages each sample with its two neighbours, weighted by ``width``."""
    left, right = jnp.roll(signal, 1), jnp.roll(signal, -1)
    return (left * width + signal + right * width) / (1.0 + 2.0 * width)


def main() -> None:
    """Calls one captured function often, with two signatures."""
    captured = tg.capture(smooth)
    reference = jax.jit(smooth)
    results, wanted = [], []
    for seed in range(10):
        signal = jax.random.normal(jax.random.key(seed), (256,))
        results.append(captured(signal, jnp.float32(0.5)))
        wanted.append(reference(signal, jnp.float32(0.5)))

    # All results are still there: what a call returned keeps its value.
    for result, value in zip(results, wanted, strict=True):
        assert np.array_equal(result, value)
    # A result is a jax.Array, and can be used wherever one can.
    assert isinstance(results[0], jax.Array)
    print(f"sum of the first result: {jnp.sum(results[0]):.4f}")

    # Another shape is another signature, and gets a graph of its own.
    captured(jnp.ones(128), jnp.float32(0.5))
    counts = captured.cache_info()
    print(counts)
    assert (counts.captures, counts.hits, counts.misses) == (2, 9, 2)


if __name__ == "__main__":
    main()
