"""PyTorch's own cases of graphs that are about memory, streams and events, for `tg.CUDAGraph`."""

from __future__ import annotations

import threading
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


def test_g03_the_same_code_runs_on_each_device():
    assert tg.current_device() == 0
    x = tg.static_input(jnp.ones(1000))
    stream = tg.Stream()
    g = tg.CUDAGraph()
    with tg.graph(g, pool=tg.graph_pool_handle(), stream=stream, capture_error_mode="relaxed"):
        y = x
        for _ in range(10):
            y = y + 1
    stream.wait_stream(tg.current_stream())
    with tg.stream(stream):
        g.replay()
    tg.current_stream().wait_stream(stream)
    assert float(y.sum()) == 11000


def test_g08_many_captures_of_a_matmul_take_little_memory():
    w = jnp.ones((32, 32))
    before = tg.memory.memory_reserved()
    graphs = [record(lambda: w @ w) for _ in range(20)]
    # Less where other graphs go meanwhile.
    assert tg.memory.memory_reserved() - before < 100 << 20
    g, y = graphs[-1]
    g.replay()
    assert_value(y, np.full((32, 32), 32))


def test_g10_events_around_replays_take_the_time():
    x = tg.static_input((N,))
    g, y = record(lambda: jnp.sort(x))
    start, end = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        g.replay()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert_value(y, fill(0))


@pytest.mark.parametrize("is_shared", [False, True])
def test_g12_graphs_that_are_replayed_at_once_are_both_right(is_shared):
    pool = tg.graph_pool_handle() if is_shared else None
    x = tg.static_input((N,))

    def make(factor: int) -> Any:
        def compute() -> Any:
            y = x
            for _ in range(4):
                y = jnp.sort(y * factor)
            return y

        return record(compute, pool=pool, stream=tg.Stream())

    x.copy_(fill(1))
    graphs, both = {2: make(2), 3: make(3)}, threading.Barrier(2)

    def run(factor: int) -> None:
        g, y = graphs[factor]
        both.wait(60)
        with tg.stream(tg.Stream()):
            for _ in range(20):
                g.replay()
                assert_value(y, fill(factor**4))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, graphs))


def test_g15_record_stream_in_a_block_is_legal_and_memory_comes_back():
    x, side = tg.static_input((N,)), tg.Stream()

    def run() -> Any:
        y = x + 1
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            z = y * 2
        y.record_stream(side)  # pyright: ignore[reportAttributeAccessIssue]
        del y
        tg.current_stream().wait_stream(side)
        return z + 0

    g, z = record(run)
    g.replay()
    assert_value(z, fill(2))
    assert len(find_captured(g).replay.definition.outputs) == 1
    pool = g.pool()
    g.reset()
    again, y = record(run, pool=pool)
    again.replay()
    assert_value(y, fill(2))


def test_g39_what_is_made_on_a_side_stream_is_in_the_pool_of_the_graph():
    x, side = tg.static_input((N,)), tg.Stream()

    def run() -> Any:
        main = tg.current_stream()
        a = x + 1
        side.wait_stream(main)
        with tg.stream(side):
            b = jnp.cumsum(x)
        main.wait_stream(side)
        return a, b

    g, (a, b) = record(run)
    arena = find_captured(g).replay.arena
    assert a.is_in(arena)
    assert b.is_in(arena)
    assert len(g.pools()) == 1
    g.replay()
    assert_value(a, fill(1))
    assert_value(b, fill(0))


def test_g41_events_order_a_replay_with_work_outside():
    x, side, main = tg.static_input((N,)), tg.Stream(), tg.Stream()
    g, y = record(lambda: x * 2)
    filled, done = tg.Event(), tg.Event()
    for step in range(3):
        with tg.stream(side):
            x.copy_(fill(step))
            filled.record()
        with tg.stream(main):
            filled.wait()
            g.replay()
            done.record()
        done.wait()
        assert_value(y + 1, fill(2 * step + 1))
        done.synchronize()
        assert done.query()


def test_a_graph_is_neither_captured_nor_replayed_inside_of_a_captured_function():
    g, y = record(lambda: jnp.ones(N) + 1)
    inner = tg.CUDAGraph()

    def capture_into() -> None:
        with tg.graph(inner):
            pass

    calls = {
        "replay is": g.replay,
        "a capture is": capture_into,
        "instantiate is": g.instantiate,
        "raw_cuda_graph_exec is": g.raw_cuda_graph_exec,
    }
    for words, call in calls.items():
        step = tg.capture(lambda x, call=call: (call(), x + 1)[1])
        with pytest.raises(tg.CaptureError, match=f"{words} called while") as caught:
            step(jnp.ones(3))
        assert caught.value.anchor == "graph-order"
        assert "raw_graph/test_cases.py:" in caught.value.where
        with pytest.raises(tg.CaptureError, match=f"{words} called while"):
            jax.eval_shape(lambda x, call=call: (call(), x)[1], 1.0)
    assert not tg.is_current_stream_capturing()
    g.replay()
    assert_value(y, fill(2))


def test_a_captured_function_that_a_block_calls_is_part_of_the_block():
    step = tg.capture(lambda x: x * 3)
    assert_value(step(jnp.ones(N)), fill(3))
    x = tg.static_input((N,))
    g, y = record(lambda: step(x) + 1)
    captures = step.cache_info().captures
    x.copy_(fill(2))
    g.replay()
    assert_value(y, fill(7))
    assert step.cache_info().captures == captures


def test_many_threads_capture_replay_and_reset_at_once():
    weights = jnp.arange(float(N * N)).reshape(N, N)
    together = threading.Barrier(4)

    def run(number: int) -> None:
        g, x = tg.CUDAGraph(keep_graph=number % 2 == 1), tg.static_input((N,))
        for step in range(3):
            together.wait(60)
            if number == 3:
                # One that fails beside those that do not.
                with pytest.raises(tg.CaptureError), tg.graph(tg.CUDAGraph()):
                    float((x + 1)[0])
            with tg.graph(g):
                y = x @ weights + number
            x.copy_(fill(step))
            g.replay()
            np.testing.assert_allclose(y, fill(step) @ np.asarray(weights) + number)
            g.reset()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
