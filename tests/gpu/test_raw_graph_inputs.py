"""Static inputs of raw graphs on a GPU: replays see what was written, wherever and whenever."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import jit_untried

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


def compute_long(value: float, *, size: int = 3000) -> jax.Array:
    """Returns an array that a program makes which is still running when the call returns."""
    square = jnp.sin(jnp.arange(size * size) + value).reshape(size, size) / size
    for _ in range(30):
        square = square @ square
    return jnp.full(N, value, jnp.float32) + 0 * square[0, 0]


@pytest.mark.parametrize("is_beside", [False, True], ids=["default stream", "side stream"])
def test_a_value_that_is_still_computed_is_what_the_graph_reads(is_beside: bool) -> None:
    compute = jit_untried(compute_long)
    compute(0.0).block_until_ready()
    x, stream = tg.static_input(fill(0)), tg.Stream() if is_beside else tg.default_stream()
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = x * 2
    for _ in range(2):
        # Once it is written where it is.
        x.copy_(fill(-1))
        g.replay()
    address = x.data_ptr()
    results = []
    for step in range(6):
        poison = fill(np.nan)
        source = compute(float(step))
        x.copy_(poison)
        x.copy_(source)
        del source, poison
        with tg.stream(stream):
            g.replay()
        # Takes the memory of both, behind what reads it.
        fill(np.nan)
        results.append(jnp.asarray(y) + 0)
    assert x.data_ptr() == address
    for step, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), np.full(N, 2 * step, np.float32))


def test_replays_in_flight_keep_the_value_of_before() -> None:
    a, x = tg.static_input(jnp.full((2000, 2000), 1e-3)), tg.static_input(fill(1))
    g = tg.CUDAGraph()
    with tg.graph(g):
        square = a
        for _ in range(30):
            square = square @ a
        y = x * 2 + 0 * square[0, 0]
    x.copy_(fill(1))
    results = []
    for step in range(5):
        g.replay()
        # The graph reads `x` last, long after this call.
        x.copy_(np.full(N, step + 2, np.float32))
        results.append(jnp.asarray(y) + 0)
    for step, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), np.full(N, 2 * (step + 1), np.float32))


def make_source(kind: str, value: float, values: np.ndarray[Any, Any]) -> Any:
    """Returns an array of a kind; ``values`` has two columns of that value."""
    if kind == "jax":
        return fill(value)
    if kind == "late":
        return jit_untried(compute_long)(value)
    if kind == "strided":
        return values[:, 0]
    if kind == "pinned":
        return tg.memory.pin_memory(values[:, 0].copy())
    if kind == "host":
        return jax.device_put(values[:, 0].copy(), jax.devices("cpu")[0])
    return values[:, 0].copy()


@pytest.mark.parametrize("kind", ["jax", "late", "numpy", "strided", "pinned", "host"])
def test_every_source_reaches_graph_and_reader(kind: str) -> None:
    x = tg.static_input(fill(0))
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = x + 1
    for step in range(4):
        values = np.full((N, 2), step, np.float32)
        source = make_source(kind, float(step), values)
        x.copy_(source)
        if isinstance(source, np.ndarray):
            # Its bytes were copied at once.
            source[:] = np.nan
        g.replay()
        np.testing.assert_array_equal(np.asarray(y), np.full(N, step + 1, np.float32))
        np.testing.assert_array_equal(np.asarray(x), np.full(N, step, np.float32))


def test_a_read_behind_a_copy_is_of_that_copy_and_stays() -> None:
    compute, x = jit_untried(compute_long), tg.static_input(fill(0))
    x.copy_(fill(-1))
    read = []
    for step in range(6):
        source = compute(float(step))
        x.copy_(source)
        # On the device, on the host, and kept.
        read.append((x + 1, np.asarray(x), x.jax()))
        x.copy_(fill(-1))
    for step, (device, host, kept) in enumerate(read):
        np.testing.assert_array_equal(np.asarray(device), np.full(N, step + 1, np.float32))
        np.testing.assert_array_equal(host, np.full(N, step, np.float32))
        np.testing.assert_array_equal(np.asarray(kept), np.full(N, step, np.float32))
