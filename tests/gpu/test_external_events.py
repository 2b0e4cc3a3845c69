"""External events on the driver: nodes of a graph, times inside of it, work outside."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import find_captured
from tests.gpu.stream_gates import StreamGates
from tracegraph.runtime.cuda.driver.driver import load_driver

pytestmark = pytest.mark.usefixtures("gpu", "untried")
X = np.linspace(-1, 1, 50_000, dtype=np.float32)
PATIENCE_S = 120.0


def external(**options: Any) -> tg.Event:
    return tg.Event(external=True, **options)


def await_event(event: tg.Event) -> bool:
    """Polls, since the host must not wait for a stream that only it can let go on."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if event.query():
            return True
        time.sleep(0.001)
    return False


def capture_with_events(first: tg.Event, second: tg.Event) -> Any:
    @tg.capture
    def step(x: Any) -> Any:
        y = jnp.cumsum(jnp.tanh(x))
        first.record()
        if second.enable_timing:
            z = jnp.sort(y)
            second.record()
        else:
            second.wait()
            z = jnp.sort(y)
        return z

    return step


def test_g10_events_in_a_graph_take_the_time() -> None:
    first, second = external(enable_timing=True), external(enable_timing=True)
    around = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
    step = capture_with_events(first, second)
    result = step(X)
    for _ in range(3):
        around[0].record()
        result = step(X)
        around[1].record()
        around[1].synchronize()
        assert second.query()
        inside = first.elapsed_time(second)
        assert 0 < inside <= around[0].elapsed_time(around[1])
    np.testing.assert_allclose(result, np.sort(np.cumsum(np.tanh(X))), rtol=1e-3, atol=1e-2)


def test_the_driver_has_event_nodes_between_the_others() -> None:
    first, second = external(), external()
    step = capture_with_events(first, second)
    step(X)
    (stage,) = find_captured(step).replay.stages
    graph, _ = stage.graph.handles
    kinds = load_driver().list_node_kinds(graph)
    assert {"EVENT_RECORD", "WAIT_EVENT"} <= kinds
    data = step.get_graph_data(X)
    (record,) = [node for node in data.nodes if node.kind == "event record"]
    (wait,) = [node for node in data.nodes if node.kind == "event wait"]
    edges = {(edge.first, edge.second) for edge in data.edges}
    assert (record.index, wait.index) in edges
    assert any(second == record.index for _, second in edges)
    assert any(first == wait.index for first, _ in edges)


def test_g41_external_wait_and_record() -> None:
    torch: Any = pytest.importorskip("torch")
    half, ready, done = external(), external(), tg.Event()
    step = capture_with_events(half, ready)
    expected = np.asarray(step(X))
    tg.synchronize()
    gates = StreamGates(torch)
    outer = tg.ExternalStream(gates.streams[1].cuda_stream)
    gates.block(1)
    try:
        ready.record(outer)
        result = step(X)
        done.record()
        assert await_event(half), "the first half waits for the event of the second"
        assert not done.query()
        assert not ready.query()
    finally:
        gates.open_all()
    done.synchronize()
    assert ready.query()
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_the_host_waits_for_the_half_of_a_replay_that_has_just_been_launched() -> None:
    half, x = external(), tg.static_input(jnp.zeros(()))
    g = tg.CUDAGraph()
    with tg.graph(g):
        # Long enough that a wait for an event of the replay before would end too early.
        square = jnp.sin(jnp.arange(2000 * 2000) + x).reshape(2000, 2000) / 2000
        for _ in range(30):
            square = square @ square
        first = x + 0 * square[0, 0]
        half.record()
        second = first + 0 * jnp.tanh(square @ square)[0, 0]
    g.replay()
    tg.synchronize()
    address = first.data_ptr()
    driver, seen = load_driver(), np.zeros((), np.float32)
    reader = driver.create_stream(0)
    for step in range(1, 6):
        x.copy_(jnp.float32(step))
        g.replay()
        # At once: the event has to be of this replay, whether or not the GPU has begun it.
        half.synchronize()
        driver.copy_async(seen.ctypes.data, address, seen.nbytes, reader)
        driver.synchronize_stream(reader)
        assert seen == step
        np.testing.assert_array_equal(np.asarray(second), np.float32(step))
    driver.destroy_stream(reader)


def test_g41_a_raw_graph_waits_too() -> None:
    torch: Any = pytest.importorskip("torch")
    ready, done, behind = external(), external(), tg.Event()
    x = tg.static_input(jnp.asarray(X))
    g = tg.CUDAGraph()
    with tg.graph(g):
        ready.wait()
        y = x * 2
        done.record()
    g.replay()
    tg.synchronize()
    gates = StreamGates(torch)
    gates.block(1)
    try:
        ready.record(tg.ExternalStream(gates.streams[1].cuda_stream))
        g.replay()
        behind.record()
        assert not behind.query()
    finally:
        gates.open_all()
    behind.synchronize()
    assert done.query()
    np.testing.assert_array_equal(np.asarray(y), X * 2)


def test_backward_on_two_streams_equals_jit() -> None:
    side = tg.Stream()

    def loss(w: Any) -> Any:
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            left = jnp.tanh(w @ w)
        right = jnp.sin(w @ w)
        tg.current_stream().wait_stream(side)
        return jnp.sum(left * right)

    w = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    got = tg.capture(jax.value_and_grad(loss))(w)
    expected = jax.jit(jax.value_and_grad(loss))(w)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)
