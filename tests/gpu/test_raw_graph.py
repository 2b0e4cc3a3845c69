"""`tg.CUDAGraph` on a GPU: what a block recorded is replayed, with inputs read where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.raw_graphs import assert_value, record

pytestmark = pytest.mark.usefixtures("gpu")
N = 1000


def test_a_block_is_replayed_on_new_inputs():
    x = tg.static_input((N,))
    g, y = record(lambda: x * 2 + 1)
    with pytest.raises(tg.ReplayError, match="has not been replayed"):
        np.asarray(y)
    for step in range(5):
        x.copy_(jnp.full(N, step, jnp.float32))
        g.replay()
        doubled = y * 2
        assert_value(doubled, np.full(N, 4 * step + 2, np.float32))
    assert_value(y, np.full(N, 9, np.float32))


def test_gradients_and_random_numbers_are_those_of_jit():
    weights = [jax.random.normal(jax.random.key(i), (64, 64)) * 0.1 for i in range(3)]
    batch = tg.static_input((32, 64))

    def measure(weights, x):
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x * x)

    def run(x):
        noise = jax.random.normal(jax.random.key(1), (8,))
        return jax.value_and_grad(measure)(weights, x), noise

    g, made = record(lambda: run(batch))
    value = jax.random.normal(jax.random.key(5), (32, 64))
    batch.copy_(value)
    g.replay()
    expected = jax.jit(run)(value)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), made, expected
    )


@pytest.mark.parametrize("shares", [False, True])
def test_a_graph_reads_what_another_writes(shares):
    x = tg.static_input((N,))
    g1, middle = record(lambda: jnp.cumsum(x))
    g2, end = record(lambda: middle[::-1] + 1, pool=g1.pool() if shares else None)
    for step in range(5):
        x.copy_(np.full(N, step, np.float32))
        g1.replay()
        g2.replay()
        assert_value(end, (np.arange(N, dtype=np.float32) + 1)[::-1] * step + 1)


def test_a_failed_block_leaves_all_usable():
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    with pytest.raises(tg.CaptureError, match="reads the value"), tg.graph(g):
        float(x.sum())
    with tg.graph(g):
        y = x + 1
    g.replay()
    assert_value(y, np.ones(N, np.float32))
    g.reset()
    with tg.graph(g):
        z = x + 2
    g.replay()
    assert_value(z, np.full(N, 2, np.float32))
    assert_value(y, np.ones(N, np.float32))
