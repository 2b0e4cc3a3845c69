"""`tg.CUDAGraph` and `with tg.graph(g)`, on the host device and on a CudaDevice over host memory.

The names of cases (G1...) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
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


def test_g1_the_stream_is_capturing_between_begin_and_end_only():
    assert not tg.is_current_stream_capturing()
    g = tg.CUDAGraph()
    assert not tg.is_current_stream_capturing()
    with tg.stream(tg.Stream()):
        g.capture_begin()
        assert tg.is_current_stream_capturing()
        y = jnp.ones(N) + 1
        g.capture_end()
    assert not tg.is_current_stream_capturing()
    g.replay()
    assert_value(y, fill(2))


def test_g2_ten_additions_are_replayed():
    x = tg.static_input(jnp.ones(1000))

    def add() -> Any:
        y = x
        for _ in range(10):
            y = y + 1
        return y

    g, y = record(add)
    g.replay()
    assert float(y.sum()) == 11000
    x.copy_(jnp.full(1000, 2.0))
    assert float(y.sum()) == 11000
    g.replay()
    assert float(y.sum()) == 12000


def test_g4_reset_and_recapture():
    x = tg.static_input((N,))
    g, first = record(lambda: x + 1)
    g.replay()
    g.reset()
    assert_value(first, fill(1))
    with tg.graph(g):
        second = x + 22
    g.replay()
    assert_value(second, fill(22))
    assert_value(first, fill(1))
    g.reset()
    g.reset()


def test_g6_an_empty_capture_warns_and_replays_nothing():
    g = tg.CUDAGraph()
    with pytest.warns(UserWarning, match="the CUDA graph is empty.*test_raw_graph.py"), tg.graph(g):
        pass
    g.replay()


@pytest.mark.parametrize("sharing", ["none", "pool", "handle"])
def test_g11_a_graph_reads_what_another_writes(sharing):
    handle = tg.graph_pool_handle()
    x = tg.static_input((N,))
    g1, middle = record(lambda: x + 1, pool=handle if sharing == "handle" else None)
    pools = {"none": None, "pool": g1.pool(), "handle": handle}
    g2, end = record(lambda: middle * 10, pool=pools[sharing])
    for step in range(5):
        x.copy_(fill(step))
        g1.replay()
        g2.replay()
        assert_value(end, fill(10 * (step + 1)))
        assert_value(middle, fill(step + 1))
    assert (g1.pool() == g2.pool()) == (sharing != "none")


def test_g13_graphs_of_one_pool_may_be_replayed_in_any_order():
    x, pool = tg.static_input((N,)), tg.graph_pool_handle()
    g0, (c, d) = record(lambda: (x + 1, x + 2), pool=pool)
    g1, e = record(lambda: c + 3, pool=pool)
    g2, f = record(lambda: d + 4, pool=pool)
    for order in ((g0, g1, g2), (g0, g2, g1)):
        x.copy_(x + 1)
        for g in order:
            g.replay()
        base = float(x[0])
        assert_value(e, fill(base + 4))
        assert_value(f, fill(base + 6))


def test_g14_results_are_there_after_the_graph_is_gone():
    x = tg.static_input((N,))
    g, y = record(lambda: jnp.sin(x) + 1)
    g.replay()
    reference = weakref.ref(g)
    del g
    assert reference() is None
    assert_value(y, fill(1))


def test_g23_several_threads_capture_at_once():
    both = threading.Barrier(3)

    def capture(number: int) -> Any:
        x = tg.static_input((N,))
        g = tg.CUDAGraph()
        with tg.graph(g, capture_error_mode="thread_local"):
            both.wait(60)
            y = x + number
            assert tg.is_current_stream_capturing()
            both.wait(60)
        x.copy_(fill(10))
        g.replay()
        return np.asarray(y)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(capture, range(3)))
    for number, result in enumerate(results):
        assert_value(result, fill(10 + number))


def test_g34_another_thread_computes_while_one_captures():
    g, x = tg.CUDAGraph(), tg.static_input((N,))
    with tg.graph(g, capture_error_mode="relaxed"), ThreadPoolExecutor(1) as pool:
        y = x + 1
        other = pool.submit(lambda: np.asarray(jnp.ones(3) * 2)).result(60)
    assert_value(other, np.full(3, 2.0))
    g.replay()
    assert_value(y, fill(1))


def test_eager_ops_jitted_and_captured_functions_are_recorded():
    x, w = tg.static_input((N,)), jnp.arange(float(N * N)).reshape(N, N)
    jitted = jax.jit(lambda x: jax.nn.softmax(x @ w))
    captured = tg.capture(lambda x: jnp.cumsum(x) * w[0])

    def run(x: Any) -> Any:
        y = jitted(x)
        g = jax.grad(lambda x: (jitted(x) * x).sum())(y)
        m = jax.vmap(lambda row: row @ y)(w)
        s = jax.lax.scan(lambda c, v: (c + v, c * v), 0.0, y)
        c = jax.lax.cond(y.sum() > 0, lambda: y, lambda: -y)
        n = jax.lax.fori_loop(0, (y > -1).sum(), lambda i, c: c + i, 0)
        i = y.at[1].set(x[0])[jnp.array(1)]
        return captured(y), g, m, s, c, n, i, y[y.argmax()], {"t": jnp.split(y, 2)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g, made = record(lambda: run(x))
    assert captured.cache_info().captures == 0
    value = jnp.array([0.5, -1.0, 2.0, 0.25])
    x.copy_(value)
    g.replay()
    expected = run(value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), made, expected)
    assert jax.tree.map(jax.typeof, made) == jax.tree.map(jax.typeof, expected)


def test_plain_arrays_of_outside_are_inputs_by_reference():
    w = jnp.ones((N, N))
    x = tg.static_input((N,))
    g, y = record(lambda: x @ w + np.ones(N, np.float32))
    g.replay()
    assert_value(y, fill(1))
    w.delete()
    with pytest.raises(tg.ReplayError, match="an array that the graph reads was deleted"):
        g.replay()


def test_typed_keys_pass_in_through_and_out():
    key = jax.random.key(7)

    def draw() -> Any:
        first, second = jax.random.split(key)
        return second, jax.random.normal(first, (N,))

    g, (second, drawn) = record(draw)
    with pytest.raises(tg.ReplayError, match="has not been replayed"):
        jax.random.normal(second, (N,))
    g.replay()
    first, expected = jax.random.split(key)
    assert_value(drawn, jax.random.normal(first, (N,)))
    assert_value(jax.random.key_data(second), jax.random.key_data(expected))
    g2, again = record(lambda: jax.random.normal(second, (N,)))
    g2.replay()
    assert_value(again, jax.random.normal(expected, (N,)))


def test_values_can_be_used_by_jax_after_a_replay():
    g, made = record(lambda: jnp.arange(N) + 1)
    y: Any = made
    g.replay()
    before = y + 0
    assert_value(jax.jit(lambda v: v * 2)(y), [2, 4, 6, 8])
    assert y.data_ptr() == y.data_ptr()
    assert isinstance(y, jax.Array)
    g.replay()
    assert_value(before, [1, 2, 3, 4])


def test_streams_fork_and_join_in_the_block():
    side, x = tg.Stream(), tg.static_input((N,))

    def run(joins: bool) -> Any:
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            y = x * 2
        if joins:
            main.wait_stream(side)
        return y + 1

    g, y = record(functools.partial(run, True))
    x.copy_(fill(3))
    g.replay()
    assert_value(y, fill(7))
    with pytest.raises(tg.CaptureError) as caught:
        record(functools.partial(run, False))
    assert caught.value.anchor in ("stream-wait", "stream-join")


def test_memory_goes_with_the_last_name_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        x = tg.static_input((N,))
        g, y = record(lambda: jnp.tanh(x) + 1)
        g.replay()
        arena = weakref.ref(find_captured(g).replay.arena)
        np.asarray(y)
        del g
        assert arena() is not None
        del y
        assert arena() is None
    finally:
        gc.enable()


def test_arrays_that_are_dropped_in_the_block_take_no_memory():
    x = tg.static_input((N,))

    def run() -> Any:
        unused = jnp.sin(x)
        del unused
        return jnp.cos(x) + 1

    g, y = record(run)
    assert len(find_captured(g).replay.definition.outputs) == 1
    g.replay()
    assert_value(y, fill(2))


def test_a_replay_makes_no_arrays_and_copies_no_input(device):
    x, w = tg.static_input((N,)), jnp.ones((N, N))
    g, y = record(lambda: x @ w)
    g.replay()
    writes = device.driver.count_calls("copy_async") if device is not None else 0
    for _ in range(5):
        g.replay()
    if device is not None:
        assert device.driver.count_calls("copy_async") == writes
    assert not find_captured(g).replay.pending
    assert_value(y, fill(0))
