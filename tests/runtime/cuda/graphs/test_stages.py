"""Stages on a device: launches on streams and in threads, eager calls between two graphs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import (
    STREAM,
    CudaOnHost,
    floats,
    kernel,
    make_cuda_replay,
    place,
)
from tests.fakes.definitions import make_call, make_definition, make_stage
from tests.fakes.failed_arrays import make_failed_array
from tracegraph.runtime.cuda.graphs.stages import CudaStage, EagerStage
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.replay import Replay
from tracegraph.runtime.streams.stream import Stream, default_stream, stream

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))


KEPT: list[Any] = []


def make_eager(function: Callable[..., Any], reads: str, writes: str) -> Stage:
    """Returns a stage of one eager call.

    What it returns is ready and kept: on a GPU, JAX frees memory in the order of its stream.
    """
    node = make_call("eager", function, reads, writes)

    def run(*arrays: Any) -> Any:
        KEPT.append(jax.block_until_ready(node.executable(*arrays)))
        return KEPT[-1]

    return make_stage(dataclasses.replace(node, executable=run), is_captured=False)


def make_mixed() -> Any:
    """Returns graph, eager call, graph: y = 2x, z = y - 3, w = z + x."""
    return make_definition(
        make_stage(kernel("double", "x", "y")),
        make_eager(lambda y: y - 3, "y", "z"),
        make_stage(kernel("add", "z x", "w")),
        outputs="w z",
    )


def call(replay: Replay, value: Any) -> Any:
    replay.settle()
    replay.load([(0, value)])
    replay.launch()
    return replay.make_taker(0)()


def read_launches(device: CudaOnHost) -> list[int]:
    return [call.arguments[1] for call in device.driver.calls if call.name == "launch"]


def test_a_graph_is_launched_on_the_stream_of_jax(late: CudaOnHost) -> None:
    result = call(make_cuda_replay(late, DOUBLE), floats([1] * 4))
    np.testing.assert_array_equal(result, [2] * 4)
    assert read_launches(late) == [STREAM]
    # Of the staging memory, and of the read.
    assert late.driver.count_calls("create_event") == 2


def test_a_graph_on_a_side_stream_forks_and_joins(late: CudaOnHost) -> None:
    replay, side = make_cuda_replay(late, DOUBLE), Stream()
    before = late.driver.live_handles()
    for value in (1, 2):
        with stream(side):
            result = call(replay, floats([value] * 4))
        # Only JAX's stream is waited for, and the input came by it.
        np.testing.assert_array_equal(result, [2 * value] * 4)
    handle = late.context.order.find_stream(side)
    assert read_launches(late) == [handle, handle]
    assert late.driver.count_calls("make_launcher") == 2
    left = set(late.driver.live_handles().items()) - set(before.items())
    assert {kind for _, kind in left} <= {"stream", "host memory", "event"}


def test_the_default_stream_by_name_is_no_side_stream(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    with stream(Stream()), stream(default_stream()):
        call(replay, floats([1] * 4))
    assert read_launches(device) == [STREAM]


def test_threads_get_the_context_once(device: CudaOnHost) -> None:
    replay, seen = make_cuda_replay(device, DOUBLE), []
    replay.inputs[0].make_writer()(place([4] * 4))

    def work() -> None:
        for _ in range(3):
            replay.launch()
        seen.append(device.driver.get_current())

    before = device.driver.count_calls("set_current")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [device.context.order.primary]
    assert device.driver.count_calls("set_current") == before + 1


def test_graphs_of_two_gpus_are_launched_in_the_contexts_of_each(device: CudaOnHost) -> None:
    driver, first = device.driver, device.context.order
    second = JaxOrder(driver, STREAM, driver.retain_primary_context(1))
    replay, seen = make_cuda_replay(device, DOUBLE), []
    for _ in range(2):
        replay.launch()
        seen.append(driver.get_current())
        # As a replay on the other GPU does.
        second.enter_thread()
        seen.append(driver.get_current())
    assert seen == [first.primary, second.primary] * 2


@pytest.mark.parametrize("name", ["late", "device"])
def test_an_eager_call_stands_between_two_graphs(name: str, request: pytest.FixtureRequest) -> None:
    replay = make_cuda_replay(request.getfixturevalue(name), make_mixed())
    kinds = [type(stage) for stage in replay.stages]
    assert kinds == [CudaStage, EagerStage, CudaStage]
    for value in (1, 5):
        w = call(replay, floats([value] * 4))
        np.testing.assert_array_equal(w, [3 * value - 3] * 4)
        np.testing.assert_array_equal(replay.make_taker(1)(), [2 * value - 3] * 4)


def test_an_eager_call_first_and_of_several_results(device: CudaOnHost) -> None:
    definition = make_definition(
        make_eager(lambda x: (x + 1, x - 1), "x", "y z"),
        make_stage(kernel("add", "y z", "w")),
        outputs="w y",
    )
    replay = make_cuda_replay(device, definition)
    np.testing.assert_array_equal(call(replay, floats([4] * 4)), [8] * 4)
    np.testing.assert_array_equal(replay.make_taker(1)(), [5] * 4)
    assert replay.find_lock_free_call() is None


def test_eager_calls_alone(device: CudaOnHost) -> None:
    definition = make_definition(make_eager(lambda x: x + 1, "x", "y"))
    replay = make_cuda_replay(device, definition)
    np.testing.assert_array_equal(call(replay, floats([4] * 4)), [5] * 4)
    assert read_launches(device) == []


def test_an_eager_call_that_raises_leaves_the_next_call_right(device: CudaOnHost) -> None:
    is_broken = [True]

    def function(y: Any) -> Any:
        if is_broken:
            raise KeyError("planted")
        return y - 3

    first, _, last = make_mixed().stages
    broken = make_stage(CallNode("eager", function, ("y",), ("z",)), is_captured=False)
    replay = make_cuda_replay(device, make_definition(first, broken, last, outputs="w z"))
    with pytest.raises(KeyError, match="planted"):
        call(replay, floats([1] * 4))
    is_broken.clear()
    np.testing.assert_array_equal(call(replay, floats([5] * 4)), [12] * 4)


def test_what_an_eager_call_has_not_made_is_never_read(device: CudaOnHost) -> None:
    is_broken = [True]

    def function(y: Any) -> Any:
        return make_failed_array() if is_broken else y - 3

    first, _, last = make_mixed().stages
    broken = make_stage(CallNode("eager", function, ("y",), ("z",)), is_captured=False)
    replay = make_cuda_replay(device, make_definition(first, broken, last, outputs="w z"))
    for turn in (1, 2):
        copies = device.driver.count_calls("copy_async")
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            call(replay, place([1] * 4))
        # The first graph alone. The input is copied, and what the call is given; no result.
        assert len(read_launches(device)) == turn
        assert device.driver.count_calls("copy_async") - copies == 2
    is_broken.clear()
    np.testing.assert_array_equal(call(replay, floats([5] * 4)), [12] * 4)


@pytest.mark.parametrize("name", ["record_event", "wait_event", "launch", "create_stream"])
def test_a_failed_launch_on_a_side_stream(device: CudaOnHost, name: str) -> None:
    replay, side = make_cuda_replay(device, DOUBLE), Stream()
    replay.inputs[0].make_writer()(x := place([4] * 4))
    before = device.driver.live_handles()
    device.driver.fail_on = name
    with stream(side):
        with pytest.raises(CudaError, match=name):
            replay.launch()
        left = set(device.driver.live_handles()) - set(before)
        assert {device.driver.live_handles()[handle] for handle in left} <= {"stream"}
        replay.launch()
    np.testing.assert_array_equal(replay.make_taker(0)(), 2 * x)


def test_a_result_of_another_graph_is_an_argument_of_an_eager_call(device: CudaOnHost) -> None:
    first, second = make_cuda_replay(device, DOUBLE), make_cuda_replay(device, make_mixed())
    result = call(first, floats([2] * 4))
    np.testing.assert_array_equal(call(second, result.jax()), [9] * 4)
    np.testing.assert_array_equal(jax.jit(lambda a: a + 1)(result), [5] * 4)
