"""CudaDevice: binding, instantiating, failing at any call, comparing and copying memory."""

from __future__ import annotations

import dataclasses
import gc
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
    make_device,
    place,
    view_floats,
)
from tests.fakes.definitions import make_copy, make_definition, make_stage
from tests.oracles import error_lines
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.cuda import device as device_module
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.memory.jax_provider import JaxProvider
from tracegraph.runtime.definition.graph import GraphDefinition, ReplayClock
from tracegraph.runtime.errors import ConfigError, CudaError, OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.segment import Segment

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))


def with_constant() -> GraphDefinition:
    """Returns y = x + c, where c is a constant of the compiled program."""
    definition = make_definition(make_stage(kernel("add", "x c", "y")))
    content = floats([10, 20, 30, 40]).tobytes()
    slots = tuple(
        dataclasses.replace(slot, content=content, is_resident=True) if slot.name == "c" else slot
        for slot in definition.slots
    )
    return dataclasses.replace(definition, slots=slots)


def call(replay: Any, value: Any) -> Any:
    replay.settle()
    replay.load([(0, floats([value] * 4))])
    replay.launch()
    return replay.make_taker(0)()


def test_names(device: CudaOnHost) -> None:
    assert (device.name, device.takes_kernels, device.updates_in_place) == ("cuda:0", True, True)
    assert device.allocator.provider.name == "jax"


def test_the_arena_is_poisoned_and_constants_are_loaded(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, with_constant())
    buffers = replay.buffers
    assert view_floats(buffers["c"].address).tolist() == [10, 20, 30, 40]
    for name in ("x", "y"):
        assert np.isnan(view_floats(buffers[name].address)).all()
    np.testing.assert_array_equal(call(replay, 1), [11, 21, 31, 41])


def test_graphs_are_uploaded_on_the_stream_of_jax(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    (executable,) = device.driver.executables.values()
    assert executable.uploads == [STREAM]
    assert executable.launches == []
    del replay
    assert not device.driver.executables


def test_static_outputs_stay_in_the_arena(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE, ArrayState.STATIC)
    addresses = {call(replay, value).data_ptr() for value in range(3)}
    assert addresses == {replay.buffers["y"].address}


def test_where_results_are_and_how_they_are_read(device: CudaOnHost) -> None:
    definition = make_definition(
        make_stage(kernel("double", "x", "y"), kernel("increment", "s", "s")),
        inputs="x s",
        outputs="y s",
        residents="s",
    )
    replay = make_cuda_replay(device, definition)
    replay.load([(0, floats([1] * 4)), (1, floats([5] * 4))])
    replay.launch()
    for (address, read), value in zip(replay.locate_outputs(), (2, 6), strict=True):
        assert view_floats(address).tolist() == [value] * 4
        np.testing.assert_array_equal(read(), [value] * 4)
    replay.launch()
    copies = replay.copy_outputs()
    np.testing.assert_array_equal(copies[0], [2] * 4)
    np.testing.assert_array_equal(copies[1].to_jax(), [7] * 4)


@pytest.mark.parametrize("definition", [DOUBLE, with_constant()])
def test_any_failing_call_leaves_nothing_behind(
    definition: GraphDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    driver = device.driver
    # Staging memory stays for other captures.
    device.context.load(b"warm", place([0] * 4).unsafe_buffer_pointer())
    driver.set_current(0)
    before, clean = driver.live_handles(), len(driver.calls)
    replay = make_cuda_replay(device, definition)
    count = len(driver.calls) - clean
    del replay
    gc.collect()
    assert driver.live_handles() == before
    for number in range(1, count + 1):
        driver.set_current(0)
        driver.fail_at = len(driver.calls) + number
        with pytest.raises(CudaError, match="chosen by the test"):
            make_cuda_replay(device, definition)
        driver.fail_at = None
        gc.collect()
        assert driver.live_handles() == before
        assert device.allocator.statistics.all.reserved_bytes.current == 0
    result = call(make_cuda_replay(device, definition), 1)
    assert result.tolist() in ([2.0] * 4, [11.0, 21.0, 31.0, 41.0])


def test_any_failing_call_of_a_replay_leaves_the_next_one_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = make_device(monkeypatch)
    driver, replay = device.driver, make_cuda_replay(device, DOUBLE)
    kept = [call(replay, 1)]
    clean = len(driver.calls)
    kept.append(call(replay, 2))
    count = len(driver.calls) - clean
    for number in range(1, count + 1):
        driver.fail_at = len(driver.calls) + number
        with pytest.raises(CudaError, match="chosen by the test"):
            call(replay, 50)
        driver.fail_at = None
        kept.append(call(replay, number + 2))
    assert [float(result[0]) for result in kept] == [2.0 * n for n in range(1, count + 3)]


def test_a_pool_that_cannot_grow(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    pool = PrivatePool(new_pool_id(), device.allocator)
    with monkeypatch.context() as patch:
        patch.setattr("tracegraph.runtime.cuda.memory.jax_provider.allocate_bytes", refuse)
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(1000)
    error_lines.match(
        caught.value,
        "out of memory: tried to allocate 1.00 KiB",
        f"private pool {pool.pool_id} with 0 bytes, device 0 (jax) has",
        "a graph keeps all of its buffers",
        "donate the state",
    )
    assert "of which 0 bytes is free" in caught.value.where
    assert device.allocator.statistics.all.reserved_bytes.current == 0
    assert pool.allocate(1000).nbytes == 1024


def test_other_failures_of_jax_are_not_taken_for_full_memory(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")

    monkeypatch.setattr("tracegraph.runtime.cuda.memory.jax_provider.allocate_bytes", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        device.allocator.provider.allocate(8)


def test_segments_are_counted_and_taken_back_once(device: CudaOnHost) -> None:
    provider = JaxProvider(device.jax_device)
    one, other = provider.allocate(1000), provider.allocate(24)
    assert provider.reserved_bytes == 1024
    provider.free(one)
    assert provider.reserved_bytes == 24
    for segment in (one, Segment(other.address, 24, None)):
        with pytest.raises(TracegraphError) as caught:
            provider.free(segment)
        error_lines.match(
            caught.value,
            f"cannot free the segment at {segment.address:#x}",
            "jax provider",
            "it was freed before",
            "internal error",
        )
    # Dropped without being freed.
    del other, segment
    caught = None
    gc.collect()
    assert provider.reserved_bytes == 0


def test_free_bytes_are_those_of_the_allocator() -> None:
    class Counting:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 100, "bytes_in_use": 30}

    assert JaxProvider(Counting()).available_bytes() == 70


def test_one_device_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, made = object(), []

    def make(*arguments: Any) -> Any:
        made.append(arguments)
        return "device"

    monkeypatch.setattr(device_module, "_devices", {})
    monkeypatch.setattr(device_module, "load_driver", lambda: "driver")
    monkeypatch.setattr(device_module, "find_compute_stream", lambda found: STREAM)
    monkeypatch.delenv("PJRT_GPU_ENABLE_ASYNC_DISPATCH", raising=False)
    monkeypatch.setattr(device_module, "CudaDevice", make)
    assert find_cuda_device(gpu) == find_cuda_device(gpu) == "device"
    assert made == [(gpu, "driver", STREAM)]


def test_work_that_xla_enqueues_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_devices", {})
    monkeypatch.setattr(device_module, "load_driver", lambda: "driver")
    monkeypatch.setattr(device_module, "find_compute_stream", lambda found: pytest.fail("asked"))
    monkeypatch.setenv("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "1")
    for _ in range(2):
        with pytest.raises(ConfigError, match="PJRT_GPU_ENABLE_ASYNC_DISPATCH has the value '1'"):
            find_cuda_device(object())


def test_without_cuda_the_error_comes_before_any_work_of_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Any:
        raise CudaError("no driver", where="w", why="y", fix="f", anchor="cuda-driver")

    monkeypatch.setattr(device_module, "load_driver", refuse)
    monkeypatch.setattr(device_module, "find_compute_stream", lambda found: pytest.fail("asked"))
    for _ in range(2):
        with pytest.raises(CudaError, match="no driver"):
            find_cuda_device(object())


def test_binding_twice_gives_two_sets_of_buffers(device: CudaOnHost) -> None:
    one, other = make_cuda_replay(device, DOUBLE), make_cuda_replay(device, DOUBLE)
    assert one.buffers["x"].address != other.buffers["x"].address
    np.testing.assert_array_equal(call(one, 1), [2] * 4)
    np.testing.assert_array_equal(call(other, 3), [6] * 4)
    clock = ReplayClock()
    again = device.bind_buffers(DOUBLE, one.arena, clock)
    assert again["x"].clock is clock
    assert again["x"].view.address == one.buffers["x"].address


def test_a_copy_node_is_rebound_too(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, make_definition(make_stage(make_copy("x", "y"))))
    for value in (1, 2):
        replay.inputs[0].make_writer()(x := place([value] * 4))
        replay.launch()
        np.testing.assert_array_equal(replay.make_taker(0)(), x)
