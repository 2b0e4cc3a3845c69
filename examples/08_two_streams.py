"""Two independent chains on two streams: in a captured function, and in a raw graph.

Streams declare what may run side by side. The graph has two branches, which a GPU runs at once; the
edges show it. A wait that is missing is an error that names both lines.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

WIDTH, LENGTH = 64, 10
side = tg.Stream()


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the end of a chain of matmuls."""
    for _ in range(LENGTH):
        x = jnp.tanh(x @ w)
    return x


@tg.capture
def run_chains(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Runs one chain on `side`, one on the capturing stream, and adds the ends."""
    main = tg.current_stream()
    side.wait_stream(main)  # fork
    with tg.stream(side):
        left = multiply(x, w)
    right = multiply(x, v)
    main.wait_stream(side)  # join
    return left + right


@tg.capture
def forget_to_join(x: jax.Array, w: jax.Array) -> jax.Array:
    """Reads what `side` makes, without a wait."""
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        left = multiply(x, w)
    return left + x


def main() -> None:
    """Captures both forms, and shows the edges and the error of a missing wait."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, v = (jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys)
    y = run_chains(x, w, v)
    np.testing.assert_allclose(y, multiply(x, w) + multiply(x, v), rtol=1e-3, atol=1e-3)

    data = run_chains.get_graph_data(x, w, v)
    print(data)
    waiting = {edge.second for edge in data.edges}
    starts = [node.index for node in data.nodes if node.index not in waiting]
    print(f"{len(starts)} branches start without a wait: nodes {starts}")
    assert len(starts) >= 2

    g, batch = tg.CUDAGraph(), tg.static_input(x)
    with tg.graph(g):
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            left = multiply(batch, w)
        right = multiply(batch, v)
        tg.current_stream().wait_stream(side)
        total = left + right
    g.replay()
    np.testing.assert_allclose(total, y, rtol=1e-3, atol=1e-3)

    try:
        forget_to_join(x, w)
    except tg.CaptureError as error:
        print(error)


if __name__ == "__main__":
    main()
