"""Devices leave nothing to the garbage collector: memory is freed with the last name of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_device, place
from tests.fakes.definitions import make_call, make_copy, make_definition, make_stage
from tests.oracles.garbage import find_garbage
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.cuda.graphs.stages import CudaStage
from tracegraph.runtime.definition.graph import GraphDefinition, Instance, ReplayClock
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.host.device import HostDevice
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.streams.stream import Stream
from tracegraph.runtime.streams.stream_capture import thread_state

# What one stage computes, in each way that a device has for it.
HOST_STAGES = {
    "lock-free": make_stage(make_call("a", lambda x: x * 2, "x", "y")),
    "two calls": make_stage(
        make_call("a", lambda x: (x * 2, x + 1), "x", "y z"),
        make_call("b", lambda z: z - 1, "z", "w"),
        edges=[(0, 1)],
    ),
    "a copy": make_stage(make_call("a", lambda x: x * 2, "x", "z"), make_copy("z", "y")),
}
CUDA_STAGES = {
    "a kernel": make_stage(kernel("double", "x", "y")),
    "two kernels": make_stage(kernel("double", "x", "z"), kernel("add", "x z", "y")),
    "a copy": make_stage(kernel("double", "x", "z"), make_copy("z", "y"), edges=[(0, 1)]),
    "state": make_stage(kernel("increment", "s", "s"), kernel("double", "x", "y")),
}
EAGER = make_stage(make_call("eager", lambda y: y - 3, "y", "v"), is_captured=False)


def find_cycles(action: Callable[[], Any]) -> list[str]:
    """Returns what an action leaves to the collector, but for the books of the allocators."""
    books = "tracegraph.runtime.memory."
    return [each for each in find_garbage(action) if not each.startswith(books)]


def run(device: Device, definition: GraphDefinition, x: Any) -> None:
    """Makes a definition executable, takes inputs in both ways, launches, and drops everything."""
    pool = PrivatePool(new_pool_id(), device.allocator)
    arena = Arena(pool, definition.arena_size)
    buffers = device.bind_buffers(definition, arena, ReplayClock(arena.lock))
    instance = device.instantiate(definition, buffers, definition.outputs)
    _call(instance, buffers, x)
    for name in definition.inputs:
        buffers[name].write(floats([1] * 4))
    _call(instance, buffers, x)
    read = [buffer.snapshot() for buffer in buffers.values()]
    for buffer in instance.consumed:
        buffer.restore()
    del read


def _call(instance: Instance, buffers: Any, x: Any) -> None:
    write: StaticBuffer = buffers["x"]
    write.make_writer()(x)
    for stage in instance.stages:
        stage.launch()
    results = [take() for take in instance.takers.values()]
    for result in results:
        np.asarray(result)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["whole", "mixed"])
@pytest.mark.parametrize("is_checking", [False, True], ids=["plain", "checking"])
@pytest.mark.parametrize("kind", HOST_STAGES)
def test_a_graph_on_the_host(kind: str, is_checking: bool, is_mixed: bool) -> None:
    stages = (HOST_STAGES[kind], EAGER) if is_mixed else (HOST_STAGES[kind],)
    definition = make_definition(*stages, outputs="y v" if is_mixed else "y")
    device = HostDevice(jax.devices()[0], is_checking=is_checking)
    x = jax.numpy.ones(4)
    assert find_cycles(lambda: run(device, definition, x)) == []


def test_state_on_the_host() -> None:
    node = make_call("a", lambda s, x: (s + x, x * 2), "s x", "s y")
    definition = make_definition(make_stage(node), inputs="s x", outputs="s y", residents=["s"])
    device = HostDevice(jax.devices()[0])
    x = jax.numpy.ones(4)
    assert find_cycles(lambda: run(device, definition, x)) == []


@pytest.mark.parametrize("is_mixed", [False, True], ids=["whole", "mixed"])
@pytest.mark.parametrize("kind", CUDA_STAGES)
def test_a_graph_on_a_gpu(kind: str, is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (CUDA_STAGES[kind], EAGER) if is_mixed else (CUDA_STAGES[kind],)
    names, residents = ("s x", ["s"]) if kind == "state" else ("x", [])
    outputs = "y v" if is_mixed else "y"
    definition = make_definition(*stages, inputs=names, outputs=outputs, residents=residents)
    device = make_device(monkeypatch)
    before = device.driver.live_handles()
    x = place([2] * 4)
    assert find_cycles(lambda: run(device, definition, x)) == []
    assert "executable" not in device.driver.live_handles().values()
    # Page-locked memory and an event, of the copy to the GPU and of the read.
    assert len(device.driver.live_handles()) <= len(before) + 4


def test_a_graph_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device, side = make_device(monkeypatch), Stream()
    monkeypatch.setattr(thread_state, "streams", [side])
    definition = make_definition(CUDA_STAGES["a kernel"])
    x = place([2] * 4)
    assert find_cycles(lambda: run(device, definition, x)) == []


def test_a_graph_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    device, definition = make_device(monkeypatch), make_definition(CUDA_STAGES["two kernels"])

    def fail() -> None:
        device.driver.fail_on = "instantiate"
        with contextlib.suppress(CudaError):
            run(device, definition, place([2] * 4))

    assert find_cycles(fail) == []
    assert "executable" not in device.driver.live_handles().values()


def test_a_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_device(monkeypatch).driver

    def use() -> None:
        device = CudaOnHost(driver)
        run(device, make_definition(CUDA_STAGES["a kernel"]), place([2] * 4))
        assert device.comparison.find_unequal([(0, 0, 0)]) == []
        device.host_allocator.free(device.host_allocator.allocate(100))

    assert find_cycles(use) == []


def test_a_planted_cycle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold_itself(stage: Any, *arguments: Any) -> None:
        make(stage, *arguments)
        stage.owner = stage

    make = CudaStage.__init__
    monkeypatch.setattr(CudaStage, "__init__", hold_itself)
    device, definition = make_device(monkeypatch), make_definition(CUDA_STAGES["a kernel"])
    found = find_cycles(lambda: run(device, definition, place([2] * 4)))
    assert "tracegraph.runtime.cuda.graphs.stages.CudaStage" in found
