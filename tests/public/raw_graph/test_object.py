"""`tg.CUDAGraph` as an object: kept templates, handles, records, what goes with it.

The names of cases (G9, G35...) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, find_captured, record, use_device


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def keep(block: Any, **options: Any) -> tuple[tg.CUDAGraph, Any]:
    g = tg.CUDAGraph(keep_graph=True)
    with tg.graph(g, **options):
        made = block()
    return g, made


def test_g35_what_needs_a_kept_graph_is_refused_without_one():
    g, _ = record(lambda: jnp.ones(N) + 1)
    for call in (g.instantiate, g.raw_cuda_graph):
        with pytest.raises(tg.CaptureError, match="keeps no graph") as caught:
            call()
        assert "raw_graph/test_object.py:" in caught.value.where
        assert caught.value.fix


def test_g36_the_nodes_of_a_kept_graph_can_be_listed(device):
    x = tg.static_input((N,))
    g, y = keep(lambda: jnp.sin(x) * 2)
    if device is None:
        with pytest.raises(tg.ConfigError, match="the CUDA driver does not have") as caught:
            g.raw_cuda_graph()
        assert "host device" in caught.value.why
    else:
        nodes = device.driver.count_nodes(g.raw_cuda_graph())
        assert nodes == find_captured(g).lowered.definition.node_count > 0
    g.replay()
    assert_value(y, fill(0))


@pytest.mark.parametrize("keep_graph", [False, True])
def test_g37_the_executable_handle_is_there_once_the_graph_is_executable(device, keep_graph):
    x, g = tg.static_input((N,)), tg.CUDAGraph(keep_graph=keep_graph)
    with tg.graph(g):
        y = x + 1
    if keep_graph:
        with pytest.raises(tg.ReplayError, match="before the graph is executable"):
            g.raw_cuda_graph_exec()
        g.instantiate()
    if device is None:
        with pytest.raises(tg.ConfigError, match="the CUDA driver does not have"):
            g.raw_cuda_graph_exec()
    else:
        first = g.raw_cuda_graph_exec()
        g.replay()
        assert g.raw_cuda_graph_exec() == first
    g.replay()
    assert_value(y, fill(1))


def test_an_empty_graph_has_no_handle():
    g = tg.CUDAGraph(keep_graph=True)
    with pytest.warns(UserWarning, match="is empty"), tg.graph(g):
        pass
    for call in (g.raw_cuda_graph, g.raw_cuda_graph_exec):
        with pytest.raises(tg.ConfigError, match="does not have") as caught:
            call()
        assert "made nothing" in caught.value.why
    g.instantiate()
    g.replay()
    assert not g.get_graph_data().nodes


def test_g38_a_kept_graph_is_instantiated_again_and_captured_anew():
    x, g = tg.static_input((N,)), tg.CUDAGraph(keep_graph=True)
    with tg.graph(g):
        x.copy_(x + 1)
    g.instantiate()
    g.replay()
    assert_value(x, fill(1))
    g.instantiate()
    assert_value(x, fill(1))
    for step in (2, 3):
        g.replay()
        assert_value(x, fill(step))
    g.reset()
    y = tg.static_input((N,))
    with tg.graph(g):
        y.copy_(y + 2)
    for step in (2, 4, 6):
        g.replay()
        assert_value(y, fill(step))
    assert_value(x, fill(3))


def test_the_first_replay_makes_a_kept_graph_executable():
    x = tg.static_input((N,))
    made = []
    g, y = keep(lambda: x + 1)
    g.register_post_instantiate_hook(made.append)
    with pytest.raises(tg.ReplayError, match="has not been replayed yet"):
        np.asarray(y)
    x.copy_(fill(4))
    for _ in range(3):
        g.replay()
        assert_value(y, fill(5))
    assert made == [g]


def test_what_is_instantiated_again_shows_the_old_value_until_its_replay():
    x = tg.static_input((N,))
    g, y = keep(lambda: x * 2)
    reader, z = record(lambda: y + 1)
    x.copy_(fill(3))
    g.replay()
    reader.replay()
    assert_value(z, fill(7))
    x.copy_(fill(4))
    old = weakref.ref(find_captured(g).replay.arena)
    g.instantiate()
    assert_value(y, fill(6))
    reader.replay()
    assert_value(z, fill(7))
    g.replay()
    reader.replay()
    assert_value(y, fill(8))
    assert_value(z, fill(9))
    gc.collect()
    assert old() is None


def test_a_kept_graph_holds_no_value_of_a_static_input():
    x = tg.static_input((N,))
    g, y = keep(lambda: x * 2)
    value = weakref.ref(x.jax())
    x.copy_(fill(3))
    gc.collect()
    assert value() is None
    g.instantiate()
    g.replay()
    assert_value(y, fill(6))


def test_debug_mode_keeps_the_graph():
    g = tg.CUDAGraph()
    g.enable_debug_mode()
    with tg.graph(g):
        y = jnp.ones(N) + 1
    g.instantiate()
    g.replay()
    assert_value(y, fill(2))
    with pytest.raises(tg.CaptureError, match="holds a graph already"):
        g.enable_debug_mode()


def test_pools_are_the_private_pool():
    pool = tg.graph_pool_handle()
    g, _ = record(lambda: jnp.ones(N) + 1, pool=pool)
    assert g.pools() == [pool] == [g.pool()]
    g.reset()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.pools()


def test_what_asks_a_graph_before_its_capture_is_refused(tmp_path):
    g = tg.CUDAGraph(keep_graph=True)
    calls = (
        g.instantiate,
        g.raw_cuda_graph,
        g.raw_cuda_graph_exec,
        g.get_graph_data,
        g.pools,
        lambda: g.debug_dump(tmp_path / "graph.dot"),
    )
    for call in calls:
        with pytest.raises(tg.ReplayError, match="holds no graph") as caught:
            call()
        assert "raw_graph/test_object.py:" in caught.value.where
    with tg.graph(g):
        y = jnp.ones(N) + 1
        for call in calls[:3]:
            with pytest.raises(tg.CaptureError, match="before the capture has ended"):
                call()
    other = tg.CUDAGraph()
    with tg.graph(other):
        z = jnp.ones(N) * 3
        with pytest.raises(tg.CaptureError, match="instantiate is called while"):
            g.instantiate()
    g.replay()
    other.replay()
    assert_value(y, fill(2))
    assert_value(z, fill(3))


def test_objects_are_held_until_the_reset_or_the_end():
    class Thing:
        pass

    g, _ = record(lambda: jnp.ones(N) + 1)
    kept, early, late = Thing(), Thing(), Thing()
    references = [weakref.ref(each) for each in (kept, early, late)]
    g.retain_object(kept)
    handle = g.retain_object(early, synchronize_before_release=True)
    del kept, early
    handle.remove()
    handle.remove()
    assert [each() is None for each in references] == [False, True, False]
    g.reset()
    assert references[0]() is None
    g.retain_object(late)
    del late
    assert references[2]() is not None
    del g
    assert references[2]() is None


def test_callbacks_are_called_once_at_the_end_in_order_and_errors_are_logged(caplog):
    calls = []

    def fail() -> None:
        calls.append("fail")
        raise ValueError("mine")

    g, _ = record(lambda: jnp.ones(N) + 1)
    g.replay()
    g.register_destroy_callback(lambda: calls.append("first"), synchronize_before_release=True)
    g.register_destroy_callback(fail)
    g.register_destroy_callback(lambda: calls.append("removed")).remove()
    g.register_destroy_callback(lambda: calls.append("last"))
    with caplog.at_level(logging.WARNING, "tracegraph"):
        g.reset()
    assert calls == ["first", "fail", "last"]
    assert "a callback at the end of a graph failed" in caplog.text
    g.reset()
    assert calls == ["first", "fail", "last"]
    with pytest.raises(tg.ConfigError, match="which cannot be called"):
        tg.CUDAGraph().register_destroy_callback(3)  # pyright: ignore[reportArgumentType]


def test_callbacks_are_called_when_the_graph_goes():
    calls = []
    g, _ = record(lambda: jnp.ones(N) + 1)
    g.register_destroy_callback(lambda: calls.append("first"))
    g.reset()
    g.register_destroy_callback(lambda: calls.append("second"))
    with tg.graph(g):
        z = jnp.ones(N) * 3
    g.replay()
    assert calls == ["first"]
    del g
    assert calls == ["first", "second"]
    assert_value(z, fill(3))


def test_a_failed_instantiation_leaves_the_kept_graph_usable(monkeypatch):
    x = tg.static_input((N,))
    g, y = keep(lambda: x + 1)
    error = tg.VerificationError(
        "planted", where="here", why="so", fix="none", anchor="verification"
    )
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise error

        patch.setattr("tracegraph.capturing.pipeline.verify_capture", fail)
        for call in (g.instantiate, g.replay):
            with pytest.raises(tg.VerificationError):
                call()
    g.replay()
    assert_value(y, fill(1))
    with monkeypatch.context() as patch:
        patch.setattr("tracegraph.capturing.pipeline.verify_capture", fail)
        with pytest.raises(tg.VerificationError):
            g.instantiate()
    x.copy_(fill(5))
    g.replay()
    assert_value(y, fill(6))


def test_kept_graphs_are_captured_and_first_replayed_by_several_threads():
    both = threading.Barrier(4)
    x = tg.static_input((N,))
    shared, total = keep(lambda: x + 100)

    def run(number: int) -> Any:
        mine, g = tg.static_input((N,)), tg.CUDAGraph(keep_graph=True)
        both.wait(60)
        with tg.graph(g):
            both.wait(60)
            y = mine + number
            both.wait(60)
        both.wait(60)
        mine.copy_(fill(10))
        shared.replay()
        g.replay()
        shared.replay()
        return np.asarray(y), np.asarray(total)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    for number, (mine, everyone) in enumerate(results):
        assert_value(mine, fill(10 + number))
        assert_value(everyone, fill(100))


def test_a_kept_graph_goes_with_its_last_name_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        x = tg.static_input((N,))
        g, y = keep(lambda: x + 1)
        g.register_replay_start_hook(lambda graph: None)
        g.replay()
        arena, block = weakref.ref(find_captured(g).replay.arena), weakref.ref(g._block)
        del g
        assert block() is None
        assert arena() is not None
        del y
        assert arena() is None
    finally:
        gc.enable()
