"""CudaTimer: a walk over a graph leaves what one replay leaves, whatever is repeated on the way."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import SHAPE, CudaOnHost, count_work, kernel, make_cuda_replay
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.cuda.driver.calls import make_call_error
from tracegraph.runtime.cuda.node_timer import MOST, REPEATS, SHORT, CudaTimer, _join_ranges
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    CopyNode,
    FillNode,
    KernelCode,
    KernelNode,
)
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.node_timer import TimedGraph
from tracegraph.runtime.replay import Replay


def use(name: str) -> BufferUse:
    return BufferUse(name, 0, 16)


def make_setter() -> KernelNode:
    code = KernelCode("set_flag", b"image of set_flag")
    return KernelNode("set", code, SHAPE, (ConditionHandle.OWN, use("left")), (False, False))


TURN = KernelNode(
    "turn", KernelCode("turn", b"image of turn"), SHAPE, (use("left"), use("total")), (True, True)
)
LOOP = ConditionalNode(
    "loop",
    Construct.WHILE,
    (Body((TURN, make_setter()), ((0, 1),)),),
    make_setter(),
)
NODES: tuple[Node, ...] = (
    kernel("double", "x", "a"),
    # In place: each copy of it changes what the next one reads.
    kernel("increment", "a", "a"),
    kernel("add", "a state", "state"),
    FillNode("zero", use("total")),
    CopyNode("keep", use("a"), use("left")),
    kernel("set_turns", "left", "left"),
    LOOP,
    kernel("add", "total state", "y"),
)
WRITTEN = [[use(name) for name in node.results] for node in NODES]
EDGES = tuple((i, i + 1) for i in range(len(NODES) - 1))
DEFINITION = make_definition(
    make_stage(*NODES, edges=EDGES), inputs="x state", outputs="y state", residents=["state"]
)


def set_turns(parameters: tuple[bytes, ...]) -> None:
    """Leaves 3 in the first byte, which is what the loop counts down."""
    ctypes.memset(int.from_bytes(parameters[-1], "little"), 3, 1)


def turn(parameters: tuple[bytes, ...]) -> None:
    left, total = (int.from_bytes(parameter, "little") for parameter in parameters)
    count = ctypes.c_uint8.from_address(left)
    count.value = max(count.value - 1, 0)
    np.ctypeslib.as_array((ctypes.c_float * 4).from_address(total))[:] += 1


@pytest.fixture
def gpu(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    device.driver.kernels |= {"set_turns": set_turns, "turn": turn}
    count_work(device, monkeypatch)
    return device


def load(replay: Replay) -> None:
    values = [np.full(4, value, np.float32) for value in (3, 10)]
    replay.load(list(enumerate(values)))


@contextlib.contextmanager
def open_timer(
    device: CudaOnHost, definition: GraphDefinition = DEFINITION
) -> Iterator[tuple[CudaTimer, Replay]]:
    replay = make_cuda_replay(device, definition, ArrayState.STATIC)
    load(replay)
    graph = TimedGraph(
        definition, replay.arena, replay.buffers, replay.stages, replay.clock, saved_bytes=128
    )
    with device.open_timer(graph) as timer:
        load(replay)
        timer.start()
        yield timer, replay


def read_state(device: CudaOnHost, replay: Replay) -> dict[str, bytes]:
    device.driver.finish(device.context.order.stream)
    return {
        name: device.driver.read_bytes(buffer.address, 16)
        for name, buffer in replay.buffers.items()
    }


def walk(timer: CudaTimer, timed: set[int]) -> dict[int, float]:
    found = {}
    for index, node in enumerate(NODES):
        if index not in timed:
            timer.run(node)
            continue
        if isinstance(node, ConditionalNode):
            with timer.visit(WRITTEN[index]):
                inner = timer.time(TURN, WRITTEN[index], is_captured=True)
                assert inner.warm_us == 1
        time = timer.time(node, WRITTEN[index], is_captured=True)
        assert time.warm_us is not None
        assert time.cold_us is not None
        assert 0 < time.warm_us <= time.cold_us
        found[index] = time.warm_us
    timer._catch_up()
    return found


@pytest.mark.parametrize("timed", [set(range(8)), set(), {1, 6}, {0, 2, 4}])
def test_a_walk_leaves_what_a_replay_leaves(gpu: CudaOnHost, timed: set[int]) -> None:
    replay = make_cuda_replay(gpu, DEFINITION, ArrayState.STATIC)
    load(replay)
    replay.launch()
    expected = read_state(gpu, replay)
    np.testing.assert_array_equal(np.frombuffer(expected["y"], np.float32), 20)
    with open_timer(gpu) as (timer, walked):
        found = walk(timer, timed)
        assert read_state(gpu, walked) == expected
    assert found.keys() == timed
    # One unit of work each; of the loop the kernel that sets its condition is another.
    assert all(us == 1 + (index == 6) for index, us in found.items())


def test_chains_are_graphs_of_copies_with_early_edges(gpu: CudaOnHost) -> None:
    driver = gpu.driver
    with open_timer(gpu) as (timer, _):
        assert timer.floor_us == 1
        built = len(driver.calls)
        timer.time(NODES[0], WRITTEN[0], is_captured=True)
        calls = driver.calls[built:]
    counts = Counter(call.name for call in calls)
    copies = SHORT + (SHORT + MOST) + 2 * 8 + 8
    assert counts["add_kernel_node"] == copies
    assert counts["instantiate"] == counts["destroy_executable"] == 4
    assert counts["launch"] == 4 * (1 + REPEATS) == counts["elapsed_ms"] + counts["launch"]
    assert counts["record_event"] == 2 * counts["launch"]


def test_everything_goes_back(gpu: CudaOnHost) -> None:
    warm_up(gpu)
    live = gpu.driver.live_handles()
    reserved = read_reserved(gpu)
    with open_timer(gpu) as (timer, replay):
        walk(timer, set(range(8)))
        assert read_reserved(gpu) > reserved
    del timer, replay
    assert gpu.driver.live_handles().keys() - live.keys() == set()
    assert read_reserved(gpu) == reserved


def test_a_call_that_fails_leaves_nothing_behind(
    gpu: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = gpu.driver
    warm_up(gpu)
    live = driver.live_handles()
    first = len(driver.calls)
    warm_up(gpu)
    counts = Counter(call.name for call in driver.calls[first:])
    failed = set()
    for name, count in counts.items():
        # What a finaliser hands back cannot raise.
        if name.startswith(("destroy", "unload", "free")):
            continue
        for number in {1, (count + 1) // 2}:
            with monkeypatch.context() as patch:
                fail_at(driver, name, number, patch)
                # What is handed back later, as memory, may be so in another walk.
                with contextlib.suppress(CudaError):
                    warm_up(gpu)
                    continue
            failed.add(name)
            left = driver.live_handles().keys() - live.keys()
            if left:
                # The error of a block that fails when it ends is in a cycle with its frames.
                gc.collect()
                left = driver.live_handles().keys() - live.keys()
            assert not left, (name, left)
    assert failed >= {"instantiate", "launch", "record_event", "copy_async", "add_kernel_node"}
    warm_up(gpu)


def fail_at(driver: MemoryDriver, name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one call of a method fail, counted from 1."""
    enter, counts = driver._enter, itertools.count(1)

    def enter_or_fail(method: str, *arguments: Any, **options: Any) -> None:
        enter(method, *arguments, **options)
        if method == name and next(counts) == number:
            raise make_call_error("CUDA_ERROR_UNKNOWN", name, name, "chosen by the test")

    monkeypatch.setattr(driver, "_enter", enter_or_fail)


def test_work_of_the_host_is_not_timed_as_the_gpus(gpu: CudaOnHost) -> None:
    with open_timer(gpu) as (timer, replay):
        whole = timer.time_stage(0)
        assert whole == len(NODES) + 1
        assert math.isfinite(whole)
        del replay


def warm_up(device: CudaOnHost) -> None:
    """Walks once: page-locked memory for copies from the host, and its events, are kept."""
    with open_timer(device) as (timer, _):
        walk(timer, {0, 1, 6})


def read_reserved(device: CudaOnHost) -> int:
    segments = device.allocator.snapshot()
    return sum(segment["total_size"] for segment in segments)


def test_ranges_that_touch_are_one() -> None:
    assert _join_ranges([(0, 8), (8, 8), (4, 2), (32, 4)]) == [(0, 16), (32, 4)]
