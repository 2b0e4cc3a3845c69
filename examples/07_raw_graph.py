"""Record a with-block and replay it by hand, as with PyTorch's CUDA graphs.

The block is recorded and not run. What it reads are static inputs, filled by `copy_`; what it makes
are static outputs, which show what the latest replay wrote.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

WIDTH, BATCH = 32, 16


@jax.jit
def predict(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the output of a small network."""
    for w in weights[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ weights[-1]


def main() -> None:
    """Captures forward and backward, and feeds three batches."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * 0.2 for key in keys]
    batch, target = tg.static_input((BATCH, WIDTH)), tg.static_input((BATCH, WIDTH))

    def measure(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((predict(weights, x) - y) ** 2)

    g = tg.CUDAGraph()
    with tg.graph(g):
        loss, gradients = jax.value_and_grad(measure)(weights, batch, target)
        norm = jnp.sqrt(sum(jnp.vdot(each, each) for each in gradients))
    print(g)

    step = jax.jit(jax.value_and_grad(measure))
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))
        batch.copy_(x)
        target.copy_(jnp.roll(x, 1, axis=1))
        g.replay()
        print(f"batch {seed}: loss {loss:.4f}, norm of the gradient {norm:.4f}")
        expected, _ = step(weights, x, jnp.roll(x, 1, axis=1))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)

    kept = jnp.copy(loss)  # static outputs show the latest replay only
    batch.copy_(jnp.zeros((BATCH, WIDTH)))
    g.replay()
    assert float(kept) != float(loss)


if __name__ == "__main__":
    main()
