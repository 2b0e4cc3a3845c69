"""Streams and events on the driver: handles, other libraries' streams, times, blocking calls."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed, find_captured
from tests.gpu.subprocesses import run_python
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.driver.driver import load_driver
from tracegraph.runtime.cuda.graphs.stages import BlockingStage

pytestmark = pytest.mark.usefixtures("gpu")
SIZE = 50_000


def work(x):
    return jnp.cumsum(jnp.tanh(x))


def test_priorities_are_those_of_the_driver(gpu):
    least, greatest = tg.Stream.priority_range()
    assert least >= 0 > greatest
    assert tg.Stream.priority_range(gpu) == (least, greatest)
    driver = load_driver()._api
    for asked, given in ((greatest, greatest), (greatest - 100, greatest), (0, 0)):
        handle = tg.Stream(priority=asked).cuda_stream
        assert driver.cuStreamGetPriority(handle) == (0, given)


def test_handles_go_out_and_come_back():
    side, captured = tg.Stream(), tg.capture(work)
    assert side.__cuda_stream__() == (0, side.cuda_stream)
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    for outer in (tg.ExternalStream(side), tg.ExternalStream(side.cuda_stream)):
        outer.wait_stream(tg.default_stream())
        with tg.stream(outer):
            result = captured(x)
        event = outer.record_event()
        tg.current_stream().wait_event(event)
        outer.synchronize()
        assert outer.query()
        assert event.query()
        assert_replayed(captured, result, (x,))


def test_the_stream_of_jax_is_a_stream_like_others():
    outer = tg.ExternalStream(tg.default_stream())
    outer.wait_stream(tg.default_stream())
    captured, x = tg.capture(work), np.ones(SIZE, np.float32)
    with tg.stream(outer):
        result = captured(x)
    assert_replayed(captured, result, (x,))


@pytest.mark.parametrize("handle", [0, 1, 2, 3, 8, 0xDEAD_BEEF_0000, 1 << 63])
def test_wrong_handles_are_refused_and_the_context_lives_on(handle):
    with pytest.raises(tg.ConfigError, match="is not a stream"):
        tg.ExternalStream(handle)
    assert tg.default_stream().query() in (True, False)
    assert float(jnp.ones(4).sum()) == 4.0


def test_the_example_of_timing():
    start, end = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
    captured, x = tg.capture(lambda x: x @ x @ x), jnp.ones((1024, 1024))
    captured(x)
    start.record()
    for _ in range(10):
        captured(x)
    end.record()
    tg.synchronize()
    assert start.query()
    assert end.query()
    # Twenty matmuls of 2 GFLOP take longer than any GPU needs for nothing.
    assert start.elapsed_time(end) > 0.01
    assert end.elapsed_time(start) == pytest.approx(-start.elapsed_time(end))


def test_times_across_streams_wait_for_both():
    start, end, side = tg.Event(enable_timing=True), tg.Event(enable_timing=True), tg.Stream()
    captured, x = tg.capture(work), jnp.ones(SIZE)
    with tg.stream(side):
        captured(x)
        start.record()
    end.record()
    assert isinstance(start.elapsed_time(end), float)


def test_a_blocking_event():
    event = tg.Event(blocking=True)
    tg.capture(work)(jnp.ones(SIZE))
    event.record()
    event.synchronize()
    assert event.query()
    assert tg.default_stream().query()


def test_blocking_launches(monkeypatch):
    monkeypatch.setenv("TRACEGRAPH_LAUNCH_BLOCKING", "1")
    captured, x = tg.capture(lambda x: x @ x @ x), jnp.ones((2048, 2048))
    captured(x)
    for stream in (None, tg.Stream()):
        with tg.stream(stream):
            result = captured(x)
        assert tg.default_stream().query()
    assert_replayed(captured, result, (x,))
    (stage,) = find_captured(captured).replay.stages
    assert type(stage) is BlockingStage


WRONG = """
import os
import jax.numpy as jnp
import tracegraph as tg

good, wrong = tg.capture(lambda x: x + 1, name="good"), tg.capture(lambda x: x * 2, name="wrong")
x = jnp.ones(50_000)
good(x), wrong(x)
replay = wrong._latest.replay
graph = replay.stages[0].stage.graph
# There is no memory at this address; the array stays the same, so that no call mends it.
graph.make_patcher(replay.definition.inputs[0])(0x10_0000)
for function in (good, wrong, good):
    try:
        function(x)
    except tg.CudaError as error:
        print(error.what, error.where, sep="\\n", flush=True)
# The context is lost, and JAX would wait for it.
os._exit(0)
"""


def test_the_first_wrong_call_raises():
    result = run_python(["-c", WRONG], variables={"TRACEGRAPH_LAUNCH_BLOCKING": "1"})
    lines = result.stdout.splitlines()
    assert lines[0].startswith("CUDA_ERROR_ILLEGAL_ADDRESS from cuStreamSynchronize"), result
    assert lines[1].startswith("call of `wrong`: "), result
    assert lines[3].startswith("work before the call of `good`: "), result


def test_a_stream_that_another_library_made(gpu):
    driver, order = load_driver(), find_cuda_device(gpu).context.order
    with order.use_context():
        other = driver.create_stream(0)
    outer, captured = tg.ExternalStream(other), tg.capture(work)
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    with tg.stream(outer):
        result = captured(x)
    tg.default_stream().wait_stream(outer)
    outer.synchronize()
    assert_replayed(captured, result, (x,))
    del outer
    driver.destroy_stream(other)
