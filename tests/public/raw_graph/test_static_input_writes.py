"""`copy_` into a static input on a GPU: one copy on JAX's stream, into the memory that graphs read.

On a CudaDevice over host memory, whose driver does the work of a stream as late as is allowed.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import STREAM, CudaOnHost, place
from tests.fakes.failed_arrays import make_failed_array
from tests.raw_graphs import N, assert_value, fill, record, use_device
from tracegraph.runtime.cuda import buffer

SOURCES = {
    "jax": lambda value: fill(value),
    "numpy": lambda value: np.full(N, value, np.float32),
    "strided": lambda value: np.full(3 * N, value, np.float32)[::3],
    "big endian": lambda value: np.full(N, value, ">f4").astype("=f4"),
    "device": lambda value: jax.device_put(fill(value), jax.local_devices()[-1]),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    found = use_device("cuda", monkeypatch)
    assert found is not None
    return found


def list_calls(device: CudaOnHost, first: int) -> list[str]:
    """Returns the names of the driver's calls since one, but those that a fake launch makes."""
    return [call.name for call in device.driver.calls[first:]]


def open_loop(device: CudaOnHost) -> tuple[Any, tg.CUDAGraph, Any]:
    """Returns an input, a graph that reads it, and what the graph makes, after two rounds."""
    x = tg.static_input((N,))
    g, y = record(lambda: x * 2)
    for value in (1, 2):
        x.copy_(fill(value))
        g.replay()
    device.driver.finish(STREAM)
    return x, g, y


@pytest.mark.parametrize("source", SOURCES)
def test_an_input_is_written_where_it_is(device: CudaOnHost, source: str) -> None:
    x, g, y = open_loop(device)
    address = x.data_ptr()
    for value in range(3, 6):
        x.copy_(SOURCES[source](value))
        g.replay()
        assert x.data_ptr() == address
        assert_value(y, fill(2 * value))
    assert_value(x, fill(5))


def test_a_copy_and_a_replay_are_two_calls_of_the_driver_in_their_order(
    device: CudaOnHost,
) -> None:
    x, g, _ = open_loop(device)
    source, first = fill(3), len(device.driver.calls)
    x.copy_(source)
    written = len(device.driver.calls)
    g.replay()
    calls = list_calls(device, first)
    assert calls == ["copy_async", "launch"]
    (copy,) = [each for each in device.driver.calls[first:written] if each.name == "copy_async"]
    assert copy.arguments[:3] == (x.data_ptr(), source.unsafe_buffer_pointer(), 4 * N)
    # Nothing was written: nothing is loaded.
    first = len(device.driver.calls)
    g.replay()
    assert list_calls(device, first) == ["launch"]


def test_replays_before_and_after_a_write_read_their_own_value(device: CudaOnHost) -> None:
    x, g, y = open_loop(device)
    kept = tg.static_input((N,))
    saver, _ = record(lambda: kept.copy_(y))
    saver.replay()
    device.driver.finish(STREAM)
    # JAX frees in the order of its stream; here they are held.
    sources = fill(3), fill(4)
    device.driver.is_deferred = True
    x.copy_(sources[0])
    g.replay()
    saver.replay()
    x.copy_(sources[1])
    g.replay()
    assert device.driver._queues[STREAM], "nothing was left for the stream"
    device.driver.finish(STREAM)
    assert_value(kept, fill(6))
    assert_value(y, fill(8))


def test_a_read_sees_a_copy_that_is_on_its_way(device: CudaOnHost) -> None:
    x, _, _ = open_loop(device)
    address, sources = x.data_ptr(), (fill(3), fill(4))
    device.driver.is_deferred = True
    x.copy_(sources[0])
    assert not x.is_ready()
    value = x.jax()
    assert_value(value, fill(3))
    x.copy_(sources[1])
    assert x.data_ptr() == address
    x.block_until_ready()
    assert x.is_ready()
    assert_value(x, fill(4))
    assert_value(value, fill(3))


def test_a_value_that_was_read_is_never_written_over(device: CudaOnHost) -> None:
    x, g, y = open_loop(device)
    read = [x.jax()]
    for value in (3, 4, 5):
        x.copy_(fill(value))
        g.replay()
        assert_value(y, fill(2 * value))
        read.append(x.jax())
    for array, value in zip(read, (2, 3, 4, 5), strict=True):
        assert_value(array, fill(value))


def test_a_graph_that_took_a_copy_gets_each_write(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tg.static_input((N,))
    other, z = record(lambda: x + 1)
    # No address is good enough for a kernel: the graph copies its input.
    monkeypatch.setattr(buffer, "ALIGNMENT", 1 << 60)
    g, y = record(lambda: x * 2)
    for value in (1, 2, 3, 4):
        x.copy_(fill(value))
        for _ in range(2):
            g.replay()
            assert_value(y, fill(2 * value))
        other.replay()
        assert_value(z, fill(value + 1))


def test_a_captured_function_reads_what_was_written(device: CudaOnHost) -> None:
    x = tg.static_input(place([1, 2, 3, 4]))
    double = tg.capture(lambda x: x * 2)
    for value in (1, 2, 3):
        x.copy_(fill(value))
        assert_value(double(x), fill(2 * value))
        assert_value(double([x][0]), fill(2 * value))


def test_the_source_may_go_at_once(device: CudaOnHost) -> None:
    x, g, y = open_loop(device)
    source = np.full(N, 3, np.float32)
    device.driver.is_deferred = True
    x.copy_(source)
    source[:] = 9
    g.replay()
    device.driver.finish(STREAM)
    assert_value(y, fill(6))


def test_a_source_that_was_never_made_leaves_the_input_as_it_was(device: CudaOnHost) -> None:
    x, g, y = open_loop(device)
    failed = make_failed_array((N,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        x.copy_(failed)
    g.replay()
    assert_value(y, fill(4))
    x.copy_(fill(3))
    g.replay()
    assert_value(y, fill(6))


def test_an_input_that_was_never_made_can_be_written(device: CudaOnHost) -> None:
    x = tg.static_input((N,))
    buffer = x.find_input()
    buffer.value = make_failed_array((N,))
    x.copy_(fill(3))
    assert_value(x, fill(3))


def test_elements_of_less_than_a_byte_take_the_way_of_xla(device: CudaOnHost) -> None:
    x = tg.static_input(jnp.arange(N).astype(jnp.int4))
    first = len(device.driver.calls)
    x.copy_(jnp.full(N, 3, jnp.int4))
    assert "copy_async" not in list_calls(device, first)
    assert_value(x.astype(np.int8), np.full(N, 3))


@pytest.mark.parametrize("wrong", [np.zeros(N), jnp.zeros((N, 1)), 2.0, [1.0] * N])
def test_another_shape_or_dtype_is_refused_before_any_call(device: CudaOnHost, wrong: Any) -> None:
    x, _, _ = open_loop(device)
    first = len(device.driver.calls)
    with pytest.raises(tg.ReplayError, match="static input"):
        x.copy_(wrong)
    assert not list_calls(device, first)
    assert_value(x, fill(2))


def test_graphs_that_are_gone_are_told_nothing(device: CudaOnHost) -> None:
    x, g, _ = open_loop(device)
    static = x.find_input()
    for _ in range(3):
        record(lambda: x + 1)[0].replay()
    gc.collect()
    other, y = record(lambda: x + 2)
    other.replay()
    assert len([each for each in static._readers if each() is not None]) == 2
    x.copy_(fill(7))
    g.replay()
    other.replay()
    assert_value(y, fill(9))


@pytest.mark.parametrize("trace", [jax.jit, tg.capture, jax.grad])
def test_what_a_trace_computes_is_refused(device: CudaOnHost, trace: Any) -> None:
    x, g, y = open_loop(device)

    def write(value: jax.Array) -> jax.Array:
        x.copy_(value)
        return value.sum()

    with pytest.raises(tg.CaptureError, match=r"copy_.*float32\[4\]") as caught:
        trace(write)(fill(3))
    assert "test_static_input_writes.py:" in str(caught.value)
    assert_value(x, fill(2))
    x.copy_(fill(4))
    g.replay()
    assert_value(y, fill(8))
