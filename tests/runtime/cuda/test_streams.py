"""Streams and events of users on the driver: order, waits, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes.cuda_on_host import STREAM, CudaOnHost, make_device
from tracegraph.runtime.errors import CudaError, ReplayError
from tracegraph.runtime.streams import stream_backend
from tracegraph.runtime.streams.stream import (
    Event,
    Stream,
    current_stream,
    default_stream,
    stream,
    synchronize,
)
from tracegraph.runtime.streams.stream_backend import register_backend


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnHost]:
    device = make_device(monkeypatch, is_deferred=True)
    before = list(stream_backend._finders)
    register_backend(lambda _: device.streams)
    yield device
    stream_backend._finders[:] = before


def fill(device: CudaOnHost, array: np.ndarray, value: int, on: Stream) -> None:
    order = device.context.order
    with order.use_context():
        device.driver.fill_async(array.ctypes.data, value, 1, array.nbytes, order.find_stream(on))


def test_the_default_stream_is_that_of_jax(device: CudaOnHost) -> None:
    assert device.context.order.find_stream(default_stream()) == STREAM
    assert device.driver.count_calls("create_stream") == 0


def test_a_stream_of_the_user_is_made_once_with_its_priority(device: CudaOnHost) -> None:
    side, find = Stream(priority=-1), device.context.order.find_stream
    assert find(side) == find(side) != STREAM
    assert find(Stream()) != find(side)
    made = [call.arguments for call in device.driver.calls if call.name == "create_stream"]
    assert made == [(-1,), (0,)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_another(device: CudaOnHost, waits: bool) -> None:
    one, other, array = Stream(), Stream(), np.zeros(4, np.uint8)
    fill(device, array, 1, one)
    if waits:
        other.wait_stream(one)
    fill(device, array, 2, other)
    other.synchronize()
    assert array[0] == 2
    one.synchronize()
    assert array[0] == (2 if waits else 1)


def test_queries(device: CudaOnHost) -> None:
    array, event = np.zeros(4, np.uint8), Event()
    assert event.query()
    fill(device, array, 1, default_stream())
    current_stream().record_event(event)
    assert not event.query()
    assert not default_stream().query()
    event.synchronize()
    assert array[0] == 1
    assert event.query()
    assert default_stream().query()


def test_an_event_that_was_never_recorded_is_over(device: CudaOnHost) -> None:
    event = Event()
    event.wait(Stream())
    event.synchronize()
    assert event.query()
    assert device.driver.count_calls("create_event") == 0


def test_an_event_is_recorded_again(device: CudaOnHost) -> None:
    array, event = np.zeros(4, np.uint8), Event(blocking=True)
    event.record()
    handle = event.handle
    assert event.query()
    fill(device, array, 1, default_stream())
    event.record()
    assert event.handle == handle
    assert not event.query()
    assert device.driver.count_calls("create_event") == 1


def test_an_event_goes_with_its_last_holder(device: CudaOnHost) -> None:
    event = Event(enable_timing=True)
    event.record()
    handle = event.handle
    assert device.driver.live_handles()[handle] == "event"
    del event
    gc.collect()
    assert handle not in device.driver.live_handles()


def test_the_time_between_two_events(device: CudaOnHost) -> None:
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record()
    end.record()
    # What the fake driver says.
    assert start.elapsed_time(end) == 1.0
    assert [c.arguments for c in device.driver.calls if c.name == "elapsed_ms"] == [
        (start.handle, end.handle)
    ]


def test_the_time_waits_for_both_events(device: CudaOnHost) -> None:
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record(Stream())
    end.record()
    start.elapsed_time(end)
    waited = [c.arguments for c in device.driver.calls if c.name == "synchronize_event"]
    assert waited == [(start.handle,), (end.handle,)]


def test_an_event_of_the_host_is_over_on_a_gpu(device: CudaOnHost) -> None:
    event = Event(enable_timing=True)
    register_backend(lambda _: None)
    event.record()
    register_backend(lambda _: device.streams)
    event.wait(Stream())
    assert event.query()
    later = Event(enable_timing=True)
    later.record()
    with pytest.raises(ReplayError, match="recorded on two devices"):
        event.elapsed_time(later)


def test_an_event_that_changes_its_device_gets_a_handle_there(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, event = make_device(monkeypatch), Event()
    event.record()
    first = event.handle
    other.context.order.primary = other.driver.retain_primary_context(1)
    register_backend(lambda _: other.streams)
    event.record()
    assert device.driver.live_handles()[first] == "event"
    assert other.driver.live_handles()[event.handle] == "event"
    del event
    gc.collect()
    assert first not in device.driver.live_handles()


def test_priorities_are_those_of_the_gpu(device: CudaOnHost) -> None:
    assert Stream.priority_range() == (0, -5)


def test_the_protocol_gives_the_handle(device: CudaOnHost) -> None:
    side = Stream()
    assert default_stream().cuda_stream == STREAM
    assert side.__cuda_stream__() == (0, side.cuda_stream)
    assert side.cuda_stream == device.context.order.find_stream(side)


def test_a_refused_event_is_not_there(device: CudaOnHost) -> None:
    event = Event()
    device.driver.fail_on = "create_event"
    with pytest.raises(CudaError, match="create_event"):
        event.record()
    assert event.handle == 0
    event.record()
    assert event.handle in device.driver.live_handles()


def test_synchronize_waits_for_every_stream(device: CudaOnHost) -> None:
    arrays = np.zeros((3, 4), np.uint8)
    for array in arrays:
        fill(device, array, 1, Stream())
    synchronize()
    assert arrays.all()


def test_a_thread_without_a_context(device: CudaOnHost) -> None:
    seen = []

    def work() -> None:
        with stream(Stream()) as _:
            current_stream().wait_stream(default_stream())
            seen.append(current_stream().query())
        Event().record(Stream())
        synchronize()
        seen.append(device.driver.get_current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 2
    assert seen[1] == 0


def test_work_beside_jax_is_between_its_earlier_and_later_work(device: CudaOnHost) -> None:
    order, side, found = device.context.order, Stream(), []
    array = np.zeros(4, np.uint8)
    fill(device, array, 1, default_stream())
    device.driver._enqueue(STREAM, lambda: found.append(int(array[0])))
    with order.use_context(), order.beside(order.find_stream(side)):
        fill(device, array, 2, side)
    device.driver._enqueue(STREAM, lambda: found.append(int(array[0])))
    fill(device, array, 3, default_stream())
    device.driver.finish(order.find_stream(side))
    assert array[0] == 2
    device.driver.finish(STREAM)
    assert found == [1, 2]
    assert array[0] == 3


@pytest.mark.parametrize("name", ["create_event", "record_event", "wait_event"])
def test_nothing_leaks_when_a_fork_fails(device: CudaOnHost, name: str) -> None:
    order = device.context.order
    side = order.find_stream(Stream())
    before = device.driver.live_handles()
    device.driver.fail_on = name
    with pytest.raises(CudaError, match=name), order.use_context(), order.beside(side):
        pytest.fail("the body must not run")
    assert device.driver.live_handles() == before
