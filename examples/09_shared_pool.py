"""Let several graphs share one private pool, and see what that saves.

A graph owns the memory that it writes. What it needs only during a replay is scratch, and graphs of
one pool take turns with it: the largest is captured first, and the others add next to nothing. No
result is in scratch, so the graphs may be replayed in any order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

WIDTH, BATCHES = 64, (2048, 1024, 512)


def predict(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns one number per row; what passes between the two streams is scratch."""
    main, side = tg.current_stream(), tg.Stream()
    hidden = jax.nn.gelu(x @ weights[0])
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.tanh(hidden @ weights[1])
    right = jnp.sin(hidden @ weights[2])
    main.wait_stream(side)
    return (left * right).sum(axis=1)


def measure_reserved() -> int:
    """Returns the bytes of all pools, without what is only cached."""
    tg.memory.empty_cache()
    return tg.memory.memory_reserved()


def main() -> None:
    """Captures the same functions apart and together, and replays those that share."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    inputs = [jnp.linspace(-1.0, 1.0, batch * WIDTH).reshape(batch, WIDTH) for batch in BATCHES]

    def capture_all(pool: tg.PoolId | None) -> tuple[list[tg.GraphedFunction], int]:
        """Returns one captured function per batch size, and the bytes that they took."""
        before = measure_reserved()
        functions = [tg.capture(predict, pool=pool, name=f"batch_{b}") for b in BATCHES]
        for function, x in zip(functions, inputs, strict=True):
            function(weights, x)
        return functions, measure_reserved() - before

    apart, apart_bytes = capture_all(None)
    shared, shared_bytes = capture_all(tg.graph_pool_handle())
    print(f"three functions, a pool each: {apart_bytes:>9,} bytes")
    print(f"three functions, one pool:    {shared_bytes:>9,} bytes")

    # A raw graph joins the pool, too.
    static_x, g = tg.static_input(inputs[2]), tg.CUDAGraph()
    before = measure_reserved()
    with tg.graph(g, pool=shared[0].pool()):
        best = predict(weights, static_x).max()
    print(f"a raw graph in that pool:     {measure_reserved() - before:>9,} bytes more")

    results = [shared[i](weights, inputs[i]) for i in (2, 0, 1)]  # in any order
    g.replay()
    for i, result in zip((2, 0, 1), results, strict=True):
        np.testing.assert_allclose(result, apart[i](weights, inputs[i]), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(best, results[0].max(), rtol=1e-3)
    assert all(function.pool() == g.pool() for function in shared)
    assert shared_bytes < apart_bytes


if __name__ == "__main__":
    main()
