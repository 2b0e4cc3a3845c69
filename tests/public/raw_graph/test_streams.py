"""Streams of raw graphs: forks in a block, replays on several streams, memory that streams use.

On the host device and on a CudaDevice over host memory. The names of cases (G9...) are those of
PyTorch's own tests of graphs.
"""

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
from tests.raw_graphs import N, assert_value, fill, record, use_device
from tracegraph.graph_pictures import lines
from tracegraph.lowering.xla.origins import Origins
from tracegraph.runtime.streams import stream_backend


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    device = use_device(request.param, monkeypatch)
    streams = None if device is None else device.streams
    monkeypatch.setattr(stream_backend, "_finders", [lambda _: streams])
    # The kernels of the fake GPU have no instructions of XLA to look a line up in.
    monkeypatch.setattr(lines, "read_origins", lambda _: Origins(None, {}))
    return device


def read_edges(graph: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns how many nodes a graph has, and its edges."""
    data = graph.get_graph_data()
    return len(data.nodes), tuple(sorted((edge.first, edge.second) for edge in data.edges))


def test_g9_independent_branches_of_a_block_have_no_edge_between_them() -> None:
    x, side, other = tg.static_input(fill(2)), tg.Stream(), tg.Stream(priority=-1)

    def branch() -> Any:
        main = tg.current_stream()
        for stream in (side, other):
            stream.wait_stream(main)
        with tg.stream(side):
            left = jnp.tanh(x) * 3
        with tg.stream(other):
            right = jnp.sin(x) + 1
        middle = x * 5
        for stream in (side, other):
            main.wait_stream(stream)
        return left + right + middle

    g, total = record(branch)
    count, edges = read_edges(g)
    assert count == 4
    assert edges == ((0, 3), (1, 3), (2, 3))
    g.replay()
    np.testing.assert_allclose(total, jnp.tanh(2.0) * 3 + jnp.sin(2.0) + 11, rtol=1e-6)


def test_the_same_block_on_one_stream_is_one_node() -> None:
    x = tg.static_input(fill(2))
    g, _ = record(lambda: jnp.tanh(x) * 3 + jnp.sin(x) + 1)
    assert read_edges(g) == (1, ())


def forget_fork(x: Any, side: tg.Stream) -> Any:
    made = x + 1
    with tg.stream(side):
        used = made * 2
    tg.current_stream().wait_stream(side)
    return used


def forget_join(x: Any, side: tg.Stream) -> Any:
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        return x * 2


def forget_wait(x: Any, side: tg.Stream) -> Any:
    side.wait_stream(tg.current_stream())
    made = x + 1
    with tg.stream(side):
        used = made * 2
    tg.current_stream().wait_stream(side)
    return used


@pytest.mark.parametrize(
    ("function", "anchor", "where", "why"),
    [
        (forget_fork, "stream-wait", 3, 1),
        (forget_join, "stream-join", 3, 1),
        (forget_wait, "stream-wait", 4, 2),
    ],
)
@pytest.mark.parametrize("door", ["function", "block"])
def test_missing_forks_joins_and_waits_name_both_lines(
    function: Any, anchor: str, where: int, why: int, door: str
) -> None:
    side, first = tg.Stream(), function.__code__.co_firstlineno
    captured: Any = tg.capture(lambda x: function(x, side))
    enter = captured if door == "function" else lambda x: record(lambda: function(x, side))
    with pytest.raises(tg.CaptureError) as raised:
        enter(fill(1))
    error = raised.value
    assert error.anchor == anchor
    assert f"raw_graph/test_streams.py:{first + where} in {function.__name__}" in error.where
    assert f"raw_graph/test_streams.py:{first + why} in {function.__name__}" in error.why
    assert ".wait_stream(" in error.fix


def test_g12_graphs_of_one_pool_are_replayed_at_once_on_two_streams() -> None:
    first, second = tg.static_input(fill(0)), tg.static_input(fill(0))
    g, y = record(lambda: (first + 3) * 2 - first)
    h, z = record(lambda: (second + 5) * 3 - second, pool=g.pool())
    start = threading.Barrier(2)

    def run(graph: tg.CUDAGraph) -> None:
        start.wait(timeout=300)
        with tg.stream(tg.Stream()):
            for _ in range(20):
                graph.replay()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, graph) for graph in (g, h)]:
            done.result(timeout=300)
    tg.synchronize()
    assert_value(y, np.full(N, 6.0))
    assert_value(z, np.full(N, 15.0))


def test_g15_streams_are_recorded_for_arrays_before_in_and_after_a_block() -> None:
    side, x = tg.Stream(), tg.static_input(fill(1))
    before = tg.capture(lambda v: v * 2)(fill(4))
    if isinstance(before, tg.Array):
        before.record_stream(side)
    g = tg.CUDAGraph()
    with tg.graph(g):
        middle = x * 2
        middle.record_stream(side)
        x.record_stream(side)
        del before
        address = tg.memory.caching_allocator_alloc(1 << 12)
        tg.memory.caching_allocator_delete(address)
        end = middle + 1
        del middle
    g.replay()
    assert_value(end, np.full(N, 3.0))
    end.record_stream(side)
    g.reset()
    assert_value(end, np.full(N, 3.0))


def test_g25_graphs_of_one_pool_that_are_captured_on_two_streams_draw_like_jit() -> None:
    key_data = tg.static_input(jax.random.key_data(jax.random.key(1234)))

    def draw(index: int) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), index)
        return jax.random.normal(key, (N,))

    g, first = record(lambda: draw(0), stream=tg.Stream())
    h, second = record(lambda: draw(1), stream=tg.Stream(), pool=g.pool())
    for seed in (1234, 5):
        key_data.copy_(jax.random.key_data(jax.random.key(seed)))
        g.replay()
        h.replay()
        for index, made in enumerate((first, second)):
            key = jax.random.fold_in(jax.random.key(seed), index)
            np.testing.assert_array_equal(made, jax.random.normal(key, (N,)))


def test_g39_work_of_every_stream_is_in_the_memory_of_the_graph() -> None:
    x, side = tg.static_input(fill(1)), tg.Stream()

    def branch() -> Any:
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            left = x * 2
        right = x * 3
        tg.current_stream().wait_stream(side)
        return left, right

    g: Any
    g, made = record(branch)
    g.replay()
    segments = [each for each in tg.memory.memory_snapshot() if each["segment_pool_id"] == g.pool()]
    ranges = [(each["address"], each["address"] + each["total_size"]) for each in segments]
    for array, value in zip(made, (2.0, 3.0), strict=True):
        assert_value(array, np.full(N, value))
        assert any(start <= array.data_ptr() < end for start, end in ranges)


def test_a_jitted_function_with_streams_is_captured_again_and_again() -> None:
    side = tg.Stream()

    @jax.jit
    def branch(x: Any) -> Any:
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            left = x * 2
        with tg.stream(main):
            right = x * 3
        main.wait_stream(side)
        return left + right

    x = tg.static_input(fill(1))
    for _ in range(2):
        g, y = record(lambda: branch(x) + 1)
        g.replay()
        assert_value(y, np.full(N, 6.0))
        captured: Any = tg.capture(lambda v: branch(v) + 2)
        assert_value(captured(fill(1)), np.full(N, 7.0))


def test_is_capturing_follows_forks_in_a_block() -> None:
    side, apart = tg.Stream(), tg.Stream()
    g, x = tg.CUDAGraph(), tg.static_input(fill(1))
    with tg.graph(g):
        seen = [side.is_capturing()]
        side.wait_stream(tg.current_stream())
        seen += [side.is_capturing(), apart.is_capturing(), tg.is_current_stream_capturing()]
        with tg.stream(side):
            y = x + 1
        tg.current_stream().wait_stream(side)
    assert seen == [False, True, False, True]
    assert not side.is_capturing()
    g.replay()
    assert_value(y, np.full(N, 2.0))


def fork_and_join(x: Any) -> Any:
    """Works on a stream of its own, beside the one that it is called on."""
    main = tg.current_stream()
    BESIDE.wait_stream(main)
    with tg.stream(BESIDE):
        y = jnp.cos(x)
    main.wait_stream(BESIDE)
    return y * 2


BESIDE = tg.Stream()


@pytest.mark.parametrize("inner", [tg.capture, jax.jit])
def test_an_inner_function_with_streams_is_called_on_two_streams(inner: Any) -> None:
    function, side = inner(fork_and_join), tg.Stream()

    def block(x: Any) -> Any:
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            left = function(x)
        right = function(x + 1)
        main.wait_stream(side)
        return left + right

    x = tg.static_input(fill(1))
    if inner is jax.jit:
        # JAX traces it once: its waits are those of the stream that it was called on first.
        with pytest.raises(tg.CaptureError, match="without a wait"):
            record(lambda: block(x))
        return
    g, y = record(lambda: block(x))
    g.replay()
    np.testing.assert_allclose(y, fork_and_join(1.0) + fork_and_join(2.0), rtol=1e-6)
    captured: Any = tg.capture(block)
    np.testing.assert_allclose(captured(fill(1)), y, rtol=1e-6)
