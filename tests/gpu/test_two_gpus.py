"""Two GPUs in one process: graphs on each, streams and events across them, what is refused."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.raw_graphs import record
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.driver.driver import load_driver

N = 1000
VALUES = np.linspace(-1, 1, N, dtype=np.float32)
# Portable, and mapped for the device.
HOST_FLAGS = 3
REPLAYS = 20


@pytest.fixture(autouse=True)
def pair(two_gpus: list[Any]) -> list[Any]:
    """The two GPUs."""
    return two_gpus


def work(x: Any) -> Any:
    return jnp.cumsum(jnp.tanh(x)) + 1


def record_on(index: int) -> tuple[Any, tg.CUDAGraph, Any]:
    """Returns a static input on a GPU, a graph that reads it, and what the graph writes."""
    with tg.device(index):
        x = tg.static_input((N,))
        g, y = record(lambda: work(x))
    return x, g, y


def read_expected(values: Any, device: Any) -> Any:
    return np.asarray(jax.jit(work)(jax.device_put(values, device)))


@contextlib.contextmanager
def held_stream(index: int) -> Iterator[tuple[tg.Stream, Callable[[], None]]]:
    """Yields a stream of a GPU that stands still, and what lets it go on."""
    order, driver = find_cuda_device(jax.local_devices()[index]).context.order, load_driver()
    library, host, word = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()

    def call(name: str, *arguments: Any) -> None:
        status = getattr(library, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    stream = tg.Stream(device=index)
    handle = ctypes.c_void_p(stream.cuda_stream)
    with order.use_context():
        call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(64), ctypes.c_uint(HOST_FLAGS))
        assert host.value is not None
        ctypes.memset(host, 0, 64)
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(word), host, ctypes.c_uint(0))
        call("cuStreamWaitValue32_v2", handle, word, ctypes.c_uint32(1), ctypes.c_uint(0))
    flag = ctypes.c_uint32.from_address(host.value)

    def release() -> None:
        flag.value = 1

    try:
        yield stream, release
    finally:
        release()
        stream.synchronize()
        with order.use_context():
            driver.synchronize_context()
            call("cuMemFreeHost", host)


def test_raw_graphs_on_each_gpu_are_replayed_in_turns(pair):
    sides = [record_on(index) for index in (0, 1)]
    for (x, _, y), device in zip(sides, pair, strict=True):
        assert x.devices() == y.devices() == {device}
    for step in range(4):
        values = VALUES * (step + 1)
        for index, (x, g, _) in enumerate(sides):
            # A value of the host, of this GPU and of the other one.
            x.copy_(values if step == 0 else jax.device_put(values, pair[(index + step) % 2]))
            # Where a graph runs does not depend on the current device.
            with tg.device((index + step) % 2):
                g.replay()
        for (_, _, y), device in zip(sides, pair, strict=True):
            np.testing.assert_allclose(y, read_expected(values, device), rtol=1e-5)


def test_a_captured_function_and_its_state_on_each_gpu(pair):
    @tg.capture(donate_argnums=0)
    def step(w: Any, x: Any) -> Any:
        w = w - 0.1 * jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
        return w, jnp.sum(w)

    states: list[Any] = [None, None]
    for index in (0, 1, 1, 0, 0, 1):
        with tg.device(index):
            x = jnp.asarray(VALUES)
            w = jnp.ones(N) if states[index] is None else states[index]
            states[index], total = step(w, x)
            assert states[index].devices() == total.devices() == {pair[index]}
    expected = np.ones(N, np.float32)
    for _ in range(3):
        expected = expected - 0.1 * 2 * expected * VALUES**2
    for state in states:
        np.testing.assert_allclose(state, expected, rtol=1e-5)
    assert step.cache_info().captures == 2


def test_graphed_callables_on_each_gpu(pair):
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(w * x)

    graphed = tg.make_graphed_callables(layer, (jnp.ones(N), jnp.ones(N)))
    for index in (0, 1, 0, 1):
        with tg.device(index):
            w, x = jnp.full(N, 0.5 + index, jnp.float32), jnp.asarray(VALUES)
            value, gradient = jax.value_and_grad(lambda w, x=x: graphed(w, x).sum())(w)
            wanted = jax.value_and_grad(lambda w, x=x: layer(w, x).sum())(w)
        assert value.devices() == gradient.devices() == {pair[index]}
        np.testing.assert_allclose(value, wanted[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient, wanted[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(tg.CaptureError) as raised:
        graphed(jnp.ones(N), jax.device_put(VALUES, pair[1]))
    assert raised.value.anchor == "other-device"


def test_two_threads_capture_and_replay_on_a_gpu_each(pair):
    together = threading.Barrier(2)

    def run(index: int) -> tuple[Any, Any]:
        together.wait(60)
        x, g, y = record_on(index)
        for step in range(REPLAYS):
            x.copy_(VALUES * step)
            g.replay()
        return np.asarray(y), read_expected(VALUES * (REPLAYS - 1), pair[index])

    with ThreadPoolExecutor(2) as pool:
        for found, wanted in pool.map(run, (0, 1)):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_memory_of_graphs_is_counted_on_the_gpu_of_each():
    before = [tg.memory.memory_allocated(index) for index in (0, 1)]
    kept = record_on(1)
    after = [tg.memory.memory_allocated(index) for index in (0, 1)]
    # What other tests have dropped may go at any time.
    assert after[0] <= before[0]
    assert after[1] > before[1]
    del kept


def test_peers_are_as_the_driver_says(pair):
    api = load_driver()._api
    for first, second in ((0, 1), (1, 0)):
        ordinals = [pair[index].local_hardware_id for index in (first, second)]
        handles = [api.cuDeviceGet(ordinal)[1] for ordinal in ordinals]
        error, wanted = api.cuDeviceCanAccessPeer(*handles)
        assert int(error) == 0
        assert tg.can_device_access_peer(first, second) is bool(wanted)
        assert tg.can_device_access_peer(pair[first], pair[second]) is bool(wanted)
    assert not tg.can_device_access_peer(0, 0)
    assert not tg.can_device_access_peer(1, 1)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_a_stream_waits_for_an_event_of_the_other_gpu(first, second, pair):
    event, far = tg.Event(), tg.Stream(device=second)
    with tg.device(second):
        # Compiled before: nothing may wait for the GPU that is held.
        jax.block_until_ready(work(jnp.asarray(VALUES)))
    with held_stream(first) as (near, release):
        near.record_event(event)
        far.wait_event(event)
        with tg.device(second):
            tg.default_stream().wait_stream(far)
            late = work(jnp.asarray(VALUES))
        assert not event.query()
        assert not far.query()
        assert not late.is_ready()
        release()
        far.synchronize()
        assert event.query()
        assert far.query()
    np.testing.assert_allclose(late, read_expected(VALUES, pair[second]), rtol=1e-5)


def test_a_replay_waits_for_an_event_of_the_other_gpu(pair):
    x, g, y = record_on(1)
    g.replay()
    x.copy_(VALUES)
    with held_stream(0) as (near, release):
        event = near.record_event()
        with tg.device(1):
            event.wait()
            g.replay()
            end = tg.default_stream().record_event()
        assert not end.query()
        release()
        end.synchronize()
    np.testing.assert_allclose(y, read_expected(VALUES, pair[1]), rtol=1e-5)


def test_an_event_inside_of_a_graph_lets_the_other_gpu_go_on(pair):
    made = tg.Event(external=True)

    @tg.capture
    def make(x: Any) -> Any:
        y = work(x)
        made.record()
        return y

    with tg.device(0):
        make(VALUES)
    with tg.device(1):
        made.wait()
        found = work(jnp.asarray(VALUES))
        jax.block_until_ready(found)
    assert made.query()
    np.testing.assert_allclose(found, read_expected(VALUES, pair[1]), rtol=1e-5)


def test_an_event_moves_to_the_gpu_where_it_is_recorded():
    event = tg.Event(enable_timing=True)
    for index in (0, 1, 0):
        stream = tg.Stream(device=index)
        stream.record_event(event)
        event.synchronize()
        assert event.query()
        tg.Stream(device=1 - index).wait_event(event)
    with tg.device(1):
        other = tg.Event(enable_timing=True)
        other.record()
    with pytest.raises(tg.ReplayError):
        event.elapsed_time(other)


def test_streams_belong_to_their_gpu(pair):
    driver = load_driver()
    for index in (0, 1):
        stream = tg.Stream(device=pair[index], priority=-1)
        order = find_cuda_device(pair[index]).context.order
        assert driver.find_context(stream.cuda_stream) == order.primary
        with tg.device(index):
            stream.wait_stream(tg.default_stream())
        stream.synchronize()
        assert stream.query()
    _, g, _ = record_on(0)
    g.replay()
    with pytest.raises(tg.ConfigError) as raised, tg.stream(tg.Stream(device=1)):
        g.replay()
    assert raised.value.anchor == "stream-handle"
    # The graph can still be replayed.
    side = tg.Stream(device=0)
    with tg.stream(side):
        g.replay()
    side.synchronize()


@pytest.mark.parametrize("kind", ["array", "input", "key"])
def test_ops_across_gpus_are_refused_with_the_line(kind, pair):
    with tg.device(1):
        far = {
            "array": jax.device_put(VALUES, pair[1]),
            "input": tg.static_input((N,)),
            "key": jax.device_put(jax.random.key(0), pair[1]),
        }[kind]
    here, g = tg.static_input((N,)), tg.CUDAGraph()

    def mix() -> Any:
        return here + (jax.random.normal(far, (N,)) if kind == "key" else far)

    with pytest.raises(tg.CaptureError) as raised, tg.graph(g):
        mix()
    assert raised.value.anchor == "other-device"
    assert f":{mix.__code__.co_firstlineno + 1} in mix" in raised.value.where
    assert "with tg.device" in raised.value.fix
    # Nothing is left of the capture.
    with tg.graph(g):
        y = here + 1
    g.replay()
    np.testing.assert_array_equal(y, np.ones(N, np.float32))


def test_a_captured_function_refuses_arguments_of_two_gpus(pair):
    add = tg.capture(lambda x, y: x + y)
    x, y = (jax.device_put(VALUES, device) for device in pair)
    with pytest.raises(tg.CaptureError) as raised:
        add(x, y)
    assert raised.value.anchor == "other-device"
    with tg.device(1):
        np.testing.assert_array_equal(add(y, y), 2 * VALUES)


def test_comm_moves_what_graphs_wrote(pair):
    """A result, a static output and resident state are copied as they are when it is called."""
    x, g, y = record_on(0)
    x.copy_(VALUES)
    g.replay()
    count = tg.capture(lambda w: w + 1, donate_argnums=0)
    state = count(count(jnp.zeros(N)))
    copies = tg.comm.broadcast(y)
    assert [copy.devices() for copy in copies[:2]] == [{each} for each in pair]
    (rows,) = tg.comm.broadcast_coalesced([y, state], [1])
    total = tg.comm.reduce_add([y, copies[1]], destination=1)
    (both,) = tg.comm.reduce_add_coalesced([[y], [copies[1]]], destination=1)
    pieces = tg.comm.scatter(y, [1, 0], chunk_sizes=[N - 10, 10])
    with tg.device(1):
        joined = tg.comm.gather(pieces)
    # Later replays change none of them.
    x.copy_(VALUES * 0)
    g.replay()
    count(state)
    wanted = read_expected(VALUES, pair[0])
    for found, expected in (
        (copies[0], wanted),
        (copies[1], wanted),
        (rows[0], wanted),
        (rows[1], np.full(N, 2, np.float32)),
        (total, 2 * wanted),
        (both, 2 * wanted),
        (joined, wanted),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for found in (copies[1], *rows, total, both, pieces[0], joined):
        assert found.devices() == {pair[1]}
    assert pieces[1].devices() == {pair[0]}
