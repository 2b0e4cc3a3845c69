"""Streams and events: outside a capture, inside one, and what is refused there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.runtime.errors import CaptureError, ConfigError, ReplayError, UnsupportedError
from tracegraph.runtime.streams.external_stream import ExternalStream
from tracegraph.runtime.streams.stream import (
    Event,
    Stream,
    current_stream,
    default_stream,
    is_current_stream_capturing,
    is_tracing,
    set_stream,
    stream,
    synchronize,
)
from tracegraph.runtime.streams.stream_capture import read_trace_memo, tracing

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True)
def _restore_stream() -> Any:
    yield
    set_stream(default_stream())


def test_the_default_stream_is_current_at_first():
    assert current_stream() is default_stream()


def test_streams_nest():
    first, second = Stream(), Stream(priority=-1)
    with stream(first):
        assert current_stream() is first
        with stream(second):
            assert current_stream() is second
        assert current_stream() is first
        with stream(None):
            assert current_stream() is first
    assert current_stream() is default_stream()


def test_a_stream_is_left_when_the_body_raises():
    with pytest.raises(ZeroDivisionError), stream(Stream()):
        raise ZeroDivisionError
    assert current_stream() is default_stream()


def test_set_stream_holds_until_the_next_one():
    first, second = Stream(), Stream()
    set_stream(first)
    assert current_stream() is first
    with stream(second):
        assert current_stream() is second
    assert current_stream() is first


def test_set_stream_inside_with_blocks_ends_with_the_block():
    outer, inner, chosen = Stream(), Stream(), Stream()
    with stream(outer):
        with stream(inner):
            set_stream(chosen)
            assert current_stream() is chosen
        assert current_stream() is outer
    assert current_stream() is default_stream()


def test_each_thread_has_its_own_current_stream():
    seen: list[Stream] = []
    with stream(Stream()):
        thread = threading.Thread(target=lambda: seen.append(current_stream()))
        thread.start()
        thread.join()
    assert seen == [default_stream()]


def test_streams_and_events_are_numbered_apart():
    assert len({Stream().number for _ in range(10)}) == 10
    assert len({Event().number for _ in range(10)}) == 10


def test_texts():
    side, event = Stream(priority=-1), Event(enable_timing=True)
    assert repr(side) == f"Stream(number={side.number}, priority=-1)"
    assert repr(event) == f"Event(number={event.number}, enable_timing=True)"


@pytest.mark.parametrize("priority", [0.5, "high", None, True])
def test_a_priority_is_an_int(priority: Any):
    with pytest.raises(ConfigError) as raised:
        Stream(priority=priority)
    assert raised.value.what == f"`priority` is {priority!r}"
    assert "priority_range()" in raised.value.fix


def test_the_host_has_one_priority():
    assert Stream.priority_range() == Stream.priority_range(jax.devices("cpu")[0]) == (0, 0)


@pytest.mark.parametrize("device", [99, -1, "gpu", True])
def test_a_stream_of_no_device(device: Any):
    for make in (lambda: Stream(device), lambda: Stream.priority_range(device)):
        with pytest.raises(ConfigError) as raised:
            make()
        assert raised.value.what == f"`device` is {device!r}"


def test_an_event_is_of_one_process():
    with pytest.raises(UnsupportedError) as raised:
        Event(interprocess=True)
    assert raised.value.anchor == "interprocess-event"
    assert "`interprocess`" in raised.value.fix


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Stream.cuda_stream", lambda: Stream().cuda_stream),
        ("Stream.cuda_stream", lambda: default_stream().__cuda_stream__()),
        ("ExternalStream", lambda: ExternalStream(0x7000_0000)),
        ("ExternalStream", lambda: ExternalStream(0x7000_0000, jax.devices("cpu")[0])),
    ],
)
def test_the_host_has_no_handles(name: str, use: Callable[[], Any]):
    with pytest.raises(ConfigError) as raised:
        use()
    assert raised.value.what == f"`{name}` is used on the host device"
    assert raised.value.anchor == "stream-handle"


def test_streams_that_take_part_in_a_capture():
    early, late, apart, event = Stream(), Stream(), Stream(), Event()
    assert not is_current_stream_capturing()
    event.record(apart)
    with tracing("step", Stream()):
        assert is_current_stream_capturing()
        main = current_stream()
        early.wait_event(event)
        apart.wait_stream(late)
        assert not (early.is_capturing())
        assert not (late.is_capturing())
        assert not (apart.is_capturing())
        early.wait_stream(main)
        late.wait_stream(early)
        assert main.is_capturing()
        assert early.is_capturing()
        assert late.is_capturing()
        assert not apart.is_capturing()
        with stream(apart):
            assert not is_current_stream_capturing()
        # Recorded again where it is not in the capture, an event no longer brings a stream in.
        event.record(main)
        event.record(apart)
        other = Stream()
        other.wait_event(event)
        assert not other.is_capturing()
        with tracing("inner", Stream()):
            assert not main.is_capturing()
        assert main.is_capturing()
    assert not (main.is_capturing())
    assert not (early.is_capturing())
    assert not (is_current_stream_capturing())


def test_another_thread_does_not_capture():
    seen: list[bool] = []
    with tracing("step", Stream()):
        main = current_stream()
        thread = threading.Thread(target=lambda: seen.append(main.is_capturing()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_failed_callback_does_not_keep_synchronize_from_waiting(monkeypatch):
    def fail() -> None:
        raise RuntimeError("planted")

    class Backend:
        waits = 0

        def synchronize_device(self) -> None:
            self.waits += 1

    backend = Backend()
    monkeypatch.setattr(jax, "effects_barrier", fail)
    monkeypatch.setattr("tracegraph.runtime.streams.stream.find_backend", lambda: backend)
    with pytest.raises(RuntimeError, match="planted"):
        synchronize()
    assert backend.waits == 1


def test_outside_a_capture_work_is_done_in_order():
    side, event = Stream(), Event()
    side.wait_stream(current_stream())
    assert side.record_event(event) is event
    event.wait(side)
    event.wait()
    side.wait_event(event)
    assert side.query()
    assert event.query()
    side.synchronize()
    event.synchronize()
    synchronize()
    with stream(side):
        np.testing.assert_array_equal(jnp.arange(3) * 2, [0, 2, 4])


def test_elapsed_time_is_in_milliseconds():
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    assert start.elapsed_time(end) >= 20
    assert end.elapsed_time(start) == -start.elapsed_time(end)


@pytest.mark.parametrize(
    ("name", "start", "end", "records"),
    [
        ("start", Event(), Event(enable_timing=True), True),
        ("end", Event(enable_timing=True), Event(), True),
        ("start", Event(enable_timing=True), Event(enable_timing=True), False),
    ],
)
def test_elapsed_time_needs_recorded_times(name: str, start: Event, end: Event, records: bool):
    if records:
        start.record()
        end.record()
    with pytest.raises(ReplayError) as raised:
        start.elapsed_time(end)
    assert raised.value.what == f"the {name} event has no time"
    assert raised.value.anchor == "event-time"
    assert "enable_timing=True" in raised.value.fix


def test_tracing_marks_the_thread():
    capturing = Stream()
    assert (is_tracing(), read_trace_memo()) == (False, None)
    with tracing("step", capturing):
        assert (is_tracing(), read_trace_memo()) == (True, {})
        assert current_stream() is capturing
        with tracing("inner", Stream()):
            memo = read_trace_memo()
            assert memo is not None
            memo["kept"] = 1
        assert read_trace_memo() == {}
    assert (is_tracing(), read_trace_memo()) == (False, None)
    assert current_stream() is default_stream()


def test_a_failed_trace_leaves_no_mark():
    with pytest.raises(ZeroDivisionError), tracing("step", Stream()):
        raise ZeroDivisionError
    assert not is_tracing()
    assert current_stream() is default_stream()


def in_capture(action: Callable[[], Any]) -> CaptureError:
    """Returns the error that the action raises while a function is captured."""

    def step(x: Any) -> Any:
        action()
        return x + 1

    captured = tg.capture(step)
    with pytest.raises(CaptureError) as raised:
        captured(jnp.arange(3.0))
    assert not is_tracing()
    return raised.value


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("synchronize", synchronize),
        ("Stream.synchronize", lambda: Stream().synchronize()),
        ("Stream.query", lambda: Stream().query()),
        ("Event.synchronize", lambda: Event().synchronize()),
        ("Event.query", lambda: Event().query()),
        ("Event.elapsed_time", lambda: Event().elapsed_time(Event())),
        ("Stream.cuda_stream", lambda: Stream().cuda_stream),
    ],
)
def test_the_host_cannot_wait_in_a_capture(call: str, action: Callable[[], Any]):
    error = in_capture(action)
    assert error.what == f"{call} is called while `step` is being captured"
    assert error.anchor == "synchronize"


def test_set_stream_is_refused_in_a_capture():
    error = in_capture(lambda: set_stream(Stream()))
    assert error.what == "set_stream is called while a function is being captured"
    assert error.where == "capture of `step`"
    assert "with tg.stream(s):" in error.fix


def test_the_default_stream_is_refused_in_a_capture():
    def use_it() -> None:
        with stream(default_stream()):
            pass

    error = in_capture(use_it)
    assert error.what == "the default stream is used inside a capture"
    assert error.anchor == "default-stream"


def test_the_default_stream_cannot_be_captured():
    with pytest.raises(CaptureError, match="asked for on the default stream"):
        tg.capture(lambda x: x, stream=default_stream())


def test_the_capturing_stream_is_current_in_a_capture():
    capturing, seen = Stream(), []

    def step(x: Any) -> Any:
        seen.append(current_stream())
        return x + 1

    tg.capture(step, stream=capturing, verify=False)(jnp.arange(3.0))
    assert set(seen) == {capturing}


def test_marks_do_nothing_under_jit():
    side, event = Stream(), Event()

    @jax.jit
    def step(x: Any) -> Any:
        side.wait_stream(current_stream())
        with stream(side):
            y = x + 1
            event.record()
        event.wait()
        return y

    np.testing.assert_array_equal(step(jnp.arange(3)), [1, 2, 3])
    assert "tg_" not in str(jax.make_jaxpr(step)(jnp.arange(3)))


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.vmap, jax.jit, jax.remat])
def test_marks_pass_through_transformations(transform: Callable[..., Any]):
    def loss(x: Any) -> Any:
        side = Stream()
        side.wait_stream(current_stream())
        with stream(side):
            y = jnp.sin(x)
        current_stream().wait_stream(side)
        return jnp.sum(y * x)

    x: Any = jnp.arange(3.0)
    got = jax.tree.leaves(tg.capture(transform(loss))(x))
    for one, other in zip(got, jax.tree.leaves(transform(loss)(x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
