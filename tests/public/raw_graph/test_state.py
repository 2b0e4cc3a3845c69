"""Blocks of `tg.graph` that write static inputs with `copy_`.

The names of cases (G38) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, find_captured, record, use_device


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def add(x: Any, value: float) -> Any:
    x.copy_(x + value)
    return x * 10


def test_g38_an_input_is_updated_in_place_and_the_graph_captured_anew():
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    with tg.graph(g):
        x.copy_(x + 1)
    assert_value(x, fill(0))
    for step in range(3):
        g.replay()
        assert_value(x, fill(step + 1))
    g.reset()
    y = tg.static_input((N,))
    with tg.graph(g):
        y.copy_(y + 2)
    for step in range(3):
        g.replay()
        assert_value(y, fill(2 * step + 2))
    assert_value(x, fill(3))


def test_what_is_read_behind_the_copy_is_the_new_value():
    x, y = tg.static_input((N,)), tg.static_input((N,))

    def run() -> Any:
        before = x * 10
        x.copy_(x + 1)
        x.copy_(x + 1)
        y.copy_(x)
        return before, x * 10

    g, (before, behind) = record(run)
    for step in range(3):
        g.replay()
        assert_value(before, fill(20 * step))
        assert_value(behind, fill(20 * step + 20))
        assert_value(x, fill(2 * step + 2))
        assert_value(y, fill(2 * step + 2))


def test_values_that_were_read_stay_and_the_input_can_be_filled_again():
    x = tg.static_input((N,))
    first = x.jax()
    g, y = record(lambda: add(x, 1))
    g.replay()
    second, computed = x.jax(), x + 0
    x.copy_(np.full(N, 100, np.float32))
    third = x.jax()
    g.replay()
    for value, expected in ((first, 0), (second, 1), (computed, 1), (third, 100), (x, 101)):
        assert_value(value, fill(expected))
    assert_value(y, fill(1010))


def test_plain_numpy_and_foreign_arrays_can_be_the_source():
    x, y, z = (tg.static_input((N,)) for _ in range(3))
    plain = fill(3)

    def run() -> None:
        x.copy_(plain)
        y.copy_(np.full(N, 4, np.float32))
        z.copy_(y)

    g, _ = record(run)
    g.replay()
    g.replay()
    for array, expected in ((x, 3), (y, 4), (z, 4), (plain, 3)):
        assert_value(array, fill(expected))
    with pytest.raises(tg.ReplayError, match="wanted float32"), tg.graph(tg.CUDAGraph()):
        x.copy_(jnp.zeros(N + 1))


def test_two_graphs_write_one_input_and_a_third_reads_it():
    x = tg.static_input((N,))
    one, _ = record(lambda: add(x, 1))
    ten, _ = record(lambda: add(x, 10))
    reader, y = record(lambda: x * 2)
    total = 0
    for graph, value in ((one, 1), (one, 1), (ten, 10), (one, 1), (ten, 10), (ten, 10)):
        graph.replay()
        reader.replay()
        total += value
        assert_value(x, fill(total))
        assert_value(y, fill(2 * total))
    one.reset()
    del ten
    assert_value(x, fill(total))
    step = tg.capture(lambda x: x + 1)
    assert_value(step(x), fill(total + 1))


def test_state_stays_where_it_is_and_is_not_copied(device):
    state = [tg.static_input((N,)) for _ in range(8)]

    def run() -> None:
        for each in state:
            each.copy_(each + 1)

    g, _ = record(run)
    for _ in range(3):
        g.replay()
    addresses = [each.data_ptr() for each in state]
    copies = device.driver.count_calls("copy_async") if device is not None else 0
    for _ in range(10):
        g.replay()
    assert [each.data_ptr() for each in state] == addresses
    if device is not None:
        assert device.driver.count_calls("copy_async") == copies
    for each in state:
        assert_value(each, fill(13))


def test_a_train_step_equals_that_of_jit():
    def measure(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - x) ** 2)

    @jax.jit
    def update(w: Any, x: Any) -> Any:
        loss, slopes = jax.value_and_grad(measure)(w, x)
        return jax.tree.map(lambda w, s: w - 0.1 * s, w, slopes), loss

    keys = jax.random.split(jax.random.key(0), 2)
    plain = {"a": jax.random.normal(keys[0], (N, N)), "b": jax.random.normal(keys[1], (N, N))}
    static, x = jax.tree.map(tg.static_input, plain), tg.static_input((2, N))

    def run() -> Any:
        new, loss = update(static, x)
        jax.tree.map(lambda old, new: old.copy_(new), static, new)
        return loss

    g, loss = record(run)
    for seed in range(4):
        batch = jax.random.normal(jax.random.key(seed), (2, N))
        x.copy_(batch)
        g.replay()
        plain, expected = update(plain, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), static, plain)


def test_a_failed_block_writes_nothing():
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    with pytest.raises(tg.CaptureError, match="reads the value"), tg.graph(g):
        float(add(x, 1)[0])
    assert_value(x, fill(0))
    x.copy_(fill(5))
    with tg.graph(g):
        y = add(x, 1)
    g.replay()
    assert_value(x, fill(6))
    assert_value(y, fill(60))


def test_memory_goes_with_the_last_name_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        held = [tg.static_input((N,))]
        g, _ = record(lambda: add(held[0], 1))
        g.replay()
        g.replay()
        arena = weakref.ref(find_captured(g).replay.arena)
        del g, _
        assert arena() is not None
        held[0].jax()
        held.clear()
        assert arena() is None
    finally:
        gc.enable()
