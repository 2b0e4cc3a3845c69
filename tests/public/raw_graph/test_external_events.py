"""Events in a capture: those that order its streams, and external ones, which are nodes of a graph.

On the host device, and on a CudaDevice over host memory whose streams hold work back. The names of
cases (G10, G41) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.fake_state import FakePass
from tests.oracles.error_lines import line
from tests.raw_graphs import use_device
from tracegraph.lowering import assemble
from tracegraph.runtime.definition.event_nodes import EventNode, HostEvent
from tracegraph.runtime.streams import stream_backend
from tracegraph.runtime.streams.stream import Stream

X = jnp.arange(1.0, 5.0)


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    device = use_device(request.param, monkeypatch)
    streams = None if device is None else device.streams
    monkeypatch.setattr(stream_backend, "_finders", [lambda _: streams])
    return device


def external(**options: Any) -> tg.Event:
    return tg.Event(external=True, **options)


def run_function(function: Callable[[Any], Any]) -> tuple[Callable[[], Any], Any]:
    """Returns what replays a function, and the definition of its graph."""
    captured: Any = tg.capture(function)
    captured(X)
    return lambda: captured(X), captured._latest.replay.definition


def run_block(function: Callable[[Any], Any]) -> tuple[Callable[[], Any], Any]:
    """Returns what replays a block, and the definition of its graph."""
    graph: Any = tg.CUDAGraph()
    with tg.graph(graph):
        made = function(X)

    def replay() -> Any:
        graph.replay()
        return made

    return replay, graph._captured.replay.definition


RUNS = [pytest.param(run_function, id="function"), pytest.param(run_block, id="block")]


def list_events(definition: Any) -> Iterator[tuple[int, bool, tg.Event]]:
    """Yields index, kind and event of each node that is an event."""
    for index, node in enumerate(definition.stages[0].nodes):
        point = getattr(node, "executable", node)
        if isinstance(point, EventNode | HostEvent):
            yield index, point.is_wait, point.event


@pytest.mark.parametrize("run", RUNS)
def test_g10_events_in_a_graph_take_the_time(run: Any) -> None:
    start, end = external(enable_timing=True), external(enable_timing=True)

    def step(x: Any) -> Any:
        start.record()
        y = jnp.tanh(x) * 2
        end.record()
        return y

    replay, definition = run(step)
    for _ in range(2):
        np.testing.assert_allclose(replay(), jnp.tanh(X) * 2, rtol=1e-6)
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) > 0
    assert [event for _, _, event in list_events(definition)] == [start, end]
    assert definition.stages[0].edges == ((0, 1), (1, 2))


@pytest.mark.parametrize("run", RUNS)
def test_g41_external_wait_and_record_are_nodes_between_the_work_of_their_stream(run: Any) -> None:
    ready, half, side = external(), external(), Stream()

    def step(x: Any) -> Any:
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            beside = x * 3
        first = x + 1
        half.record()
        ready.wait()
        second = jnp.sin(first)
        tg.current_stream().wait_stream(side)
        return second + beside

    replay, definition = run(step)
    np.testing.assert_allclose(replay(), jnp.sin(X + 1) + X * 3, rtol=1e-6)
    (record, is_wait, event), (wait, waits, other) = list_events(definition)
    assert (is_wait, event, waits, other) == (False, half, True, ready)
    edges = definition.stages[0].edges
    before = {first for first, second in edges if second == record}
    after = {second for first, second in edges if first == wait}
    assert (record, wait) in edges
    assert len(before) == len(after) == 1
    # What the side stream does is neither before nor between the two.
    starts = {0, 1, 2, 3} - {second for _, second in edges}
    (beside,) = starts - before
    assert all({record, wait}.isdisjoint(edge) for edge in edges if beside in edge)


def test_g41_the_graph_waits_for_work_outside(device: CudaOnHost | None) -> None:
    if device is None:
        pytest.skip("the host device runs all work at once")
    ready, done, outer = external(), external(), Stream()

    @tg.capture
    def step(x: Any) -> Any:
        ready.wait()
        y = x * 2
        done.record()
        return y

    step(X)
    driver = device.driver
    seen: list[str] = []
    driver.is_deferred = True
    driver._enqueue(outer.cuda_stream, lambda: seen.append("work outside"))
    ready.record(outer)
    y = step(X)
    assert not done.query()
    assert seen == []
    done.synchronize()
    assert seen == ["work outside"]
    assert done.query()
    driver.is_deferred = False
    np.testing.assert_array_equal(y, X * 2)


def test_a_wait_that_orders_nothing_is_noticed(
    device: CudaOnHost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: on a GPU the work behind an event does not read its byte."""
    if device is None:
        pytest.skip("the host device orders compiled calls by their streams")
    monkeypatch.setattr(assemble, "_put_behind", lambda step, behind: step)
    with pytest.raises(AssertionError):
        test_g10_events_in_a_graph_take_the_time(run_function)


def test_an_event_node_that_waits_instead_of_recording_is_noticed(
    device: CudaOnHost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the driver is given the other kind of node."""
    if device is None:
        pytest.skip("the host device has no driver")
    monkeypatch.setattr(device.driver, "add_event_wait_node", device.driver.add_event_record_node)
    with pytest.raises(AssertionError):
        test_g41_the_graph_waits_for_work_outside(device)


def test_the_driver_gets_what_the_events_were_made_with(device: CudaOnHost | None) -> None:
    if device is None:
        pytest.skip("the host device has no driver")
    event = external(enable_timing=True, blocking=True)

    def step(x: Any) -> Any:
        event.record()
        return x + 1

    captured = tg.capture(step)
    captured(X)
    calls = [call.arguments for call in device.driver.calls if call.name == "create_event"]
    assert (True, True) in calls
    nodes = [each for graph in device.driver.graphs.values() for each in graph.values()]
    assert [each.action for each in nodes if each.kind == "event"] == [
        FakePass(event.handle, is_wait=False)
    ]


def test_an_event_lives_as_long_as_its_graph() -> None:
    made = []

    def step(x: Any) -> Any:
        event = external()
        event.record()
        made.append(weakref.ref(event))
        return x + 1

    captured = tg.capture(step)
    np.testing.assert_array_equal(captured(X), X + 1)
    gc.collect()
    assert any(each() is not None for each in made)
    np.testing.assert_array_equal(captured(X), X + 1)


def test_state_and_eager_parts_beside_events() -> None:
    ready, done = external(), external()

    def step(state: Any, x: Any) -> Any:
        ready.wait()
        y = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)
        new = state + y
        done.record()
        return new, y

    captured = tg.capture(step, donate_argnums=0, mode="partial")
    state = jnp.zeros(4)
    for count in range(1, 4):
        state, y = captured(state, X)
        np.testing.assert_allclose(state, 2 * count * X)
        np.testing.assert_allclose(y, 2 * X)


def test_a_stream_whose_last_work_is_an_event_has_to_join() -> None:
    side, event = Stream(), external()

    @tg.capture
    def step(x: Any) -> Any:
        side.wait_stream(tg.current_stream())
        event.record(side)
        return x + 1

    with pytest.raises(tg.CaptureError) as raised:
        step(X)
    assert raised.value.anchor == "stream-join"
    assert f":{line() - 6} in step" in raised.value.where
    assert f":{line() - 8} in step" in raised.value.why


def test_events_in_a_loop_are_refused() -> None:
    event = external()

    @tg.capture
    def step(x: Any) -> Any:
        def turn(total: Any, row: Any) -> Any:
            event.record()
            return total + row, None

        return jax.lax.scan(turn, 0.0, x)[0]

    with pytest.raises(tg.CaptureError) as raised:
        step(X)
    assert raised.value.anchor == "stream-in-body"


@pytest.mark.parametrize("run", RUNS)
def test_an_event_of_a_capture_is_none_of_the_device(run: Any) -> None:
    event, other = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
    other.record()

    def step(x: Any) -> Any:
        event.record()
        return x + 1

    run(step)
    for ask in (
        event.query,
        event.synchronize,
        event.wait,
        lambda: event.elapsed_time(other),
        lambda: other.elapsed_time(event),
    ):
        with pytest.raises(tg.CaptureError) as raised:
            ask()
        assert raised.value.anchor == "captured-event"
        assert "external=True" in raised.value.fix
    event.record()
    event.synchronize()
    assert event.query()


def test_a_wait_for_an_event_of_outside_says_how_to_make_it_external() -> None:
    event = tg.Event()
    event.record()

    @tg.capture
    def step(x: Any) -> Any:
        event.wait()
        return x + 1

    with pytest.raises(tg.CaptureError, match="never recorded") as raised:
        step(X)
    assert "tg.Event(external=True)" in raised.value.fix


def test_interprocess_events_are_refused() -> None:
    with pytest.raises(tg.UnsupportedError) as raised:
        tg.Event(interprocess=True, external=True)
    assert raised.value.anchor == "interprocess-event"


def test_no_time_before_it_is_recorded() -> None:
    start = external(enable_timing=True)
    with pytest.raises(tg.ReplayError, match="has no time"):
        start.elapsed_time(start)
