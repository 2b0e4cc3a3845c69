"""Static inputs of raw graphs on a GPU: replays see what was written, wherever and whenever."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")

N = 1000


def fill(value: float) -> jax.Array:
    return jnp.full(N, value, jnp.float32)


def test_replays_see_every_write_and_keep_the_rest() -> None:
    inputs = [tg.static_input(fill(i)) for i in range(3)]
    fixed, side = fill(100), tg.Stream()
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = fixed + inputs[0] + 10 * inputs[1] + inputs[2] * 0.5
    values, random = [0.0, 1.0, 2.0], np.random.default_rng(0)
    for step in range(30):
        for i in random.choice(3, size=step % 3, replace=False):
            values[i] = float(step + i)
            # A value that is still being computed, or one of the host.
            inputs[i].copy_(fill(values[i]) if step % 2 else np.full(N, values[i], np.float32))
        with tg.stream(side if step % 5 == 0 else tg.default_stream()):
            g.replay()
        wanted = 100 + values[0] + 10 * values[1] + values[2] * 0.5
        np.testing.assert_array_equal(np.asarray(y), np.full(N, wanted, np.float32))


def test_the_source_of_a_copy_may_go_at_once() -> None:
    x = tg.static_input(fill(0))
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = x * 2
    for step in range(20):
        source = fill(step)
        x.copy_(source)
        source.delete()
        g.replay()
        # Takes the memory of the source.
        fill(-1.0).block_until_ready()
    np.testing.assert_array_equal(np.asarray(y), np.full(N, 38, np.float32))


def test_an_array_that_is_gone_is_refused_before_the_launch() -> None:
    x, fixed = tg.static_input(fill(1)), fill(2)
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = x + fixed
    g.replay()
    x.jax().delete()
    with pytest.raises(tg.ReplayError, match="deleted"):
        g.replay()
    x.copy_(fill(5))
    g.replay()
    np.testing.assert_array_equal(np.asarray(y), np.full(N, 7, np.float32))
    fixed.delete()
    with pytest.raises(tg.ReplayError, match="deleted"):
        g.replay()
