"""Staging: host arrays on their way to a device while their owners change them."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest

from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.cuda.memory import staging
from tracegraph.runtime.cuda.memory.pinned_pages import find_pinned_allocator
from tracegraph.runtime.cuda.memory.staging import SMALLEST_CHUNK_BYTES, Staging
from tracegraph.runtime.errors import CaptureError, CudaError
from tracegraph.runtime.memory.pool_id import new_pool_id

STREAM = 0x5555


@pytest.fixture
def driver() -> MemoryDriver:
    driver = MemoryDriver(is_deferred=True)
    driver.set_current(driver.retain_primary_context(0))
    return driver


def open_staging(driver: MemoryDriver, stream: int = STREAM) -> Staging:
    pinned = find_pinned_allocator(driver, driver.retain_primary_context(0))
    return Staging(driver, stream, pinned)


def test_the_source_may_change_right_after_the_call(driver: MemoryDriver) -> None:
    stage, source, target = open_staging(driver), np.arange(100.0), np.zeros(100)
    stage.copy(source, target.ctypes.data)
    source[:] = -1
    assert not target.any()
    driver.finish(STREAM)
    np.testing.assert_array_equal(target, np.arange(100.0))


def test_a_chunk_serves_again_only_once_its_copy_is_done(driver: MemoryDriver) -> None:
    stage, targets = open_staging(driver), np.zeros((4, 16))
    for index in range(2):
        stage.copy(np.full(16, index + 1.0), targets[index].ctypes.data)
    assert stage.reserved_bytes == 2 * SMALLEST_CHUNK_BYTES
    driver.finish(STREAM)
    for index in range(2, 4):
        stage.copy(np.full(16, index + 1.0), targets[index].ctypes.data)
    assert stage.reserved_bytes == 2 * SMALLEST_CHUNK_BYTES
    driver.finish(STREAM)
    assert targets[:, 0].tolist() == [1, 2, 3, 4]


def test_the_oldest_chunk_that_is_free_and_big_enough(driver: MemoryDriver) -> None:
    stage, target = open_staging(driver), np.zeros(1 << 18, np.uint8)
    for nbytes in (10, 200_000, 10, 150_000):
        stage.copy(np.ones(nbytes, np.uint8), target.ctypes.data)
        driver.finish(STREAM)
    assert driver.count_calls("allocate_host") == 2
    assert stage.reserved_bytes == SMALLEST_CHUNK_BYTES + (1 << 18)


def test_nothing_is_staged_for_no_bytes(driver: MemoryDriver) -> None:
    stage = open_staging(driver)
    stage.copy(np.zeros((0, 3)), 0)
    assert stage.reserved_bytes == 0
    assert driver.count_calls("copy_async") == 0


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_large_array_goes_piece_by_piece(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    monkeypatch.setattr(staging, "LARGEST_CHUNK_BYTES", SMALLEST_CHUNK_BYTES)
    nbytes = 3 * SMALLEST_CHUNK_BYTES + extra
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes + 8, np.uint8)
    stage = open_staging(driver)
    stage.copy(source, target.ctypes.data)
    # Page-locked memory is freed only after the copies from it.
    del stage
    assert "host memory" not in driver.live_handles().values()
    np.testing.assert_array_equal(target[:nbytes], source)
    assert not target[nbytes:].any()
    assert driver.count_calls("copy_async") == 3 + (extra > 0)


@pytest.mark.parametrize("name", ["create_event", "allocate_host", "copy_async", "record_event"])
def test_after_a_failure_nothing_leaks_and_the_next_copy_works(
    driver: MemoryDriver, name: str
) -> None:
    before, target = driver.live_handles(), np.zeros(16)
    stage = open_staging(driver)
    driver.fail_on = name
    with pytest.raises(CudaError, match=name):
        stage.copy(np.full(16, 1.0), target.ctypes.data)
    # Whatever the failed call had enqueued must not see the bytes of the next.
    other = np.zeros(16)
    stage.copy(np.full(16, 2.0), other.ctypes.data)
    driver.finish(STREAM)
    assert target.tolist() == [1.0 if name.endswith("_event") else 0.0] * 16
    assert other.tolist() == [2.0] * 16
    del stage
    gc.collect()
    assert driver.live_handles() == before


def pin(stage: Staging, values: Any, *, is_non_blocking: bool = True) -> np.ndarray[Any, Any]:
    """Returns an array in a block that is never freed."""
    values = np.asarray(values)
    block = stage.allocator.allocate(values.nbytes, is_non_blocking=is_non_blocking)
    room = (ctypes.c_char * values.nbytes).from_address(block.address)
    array = np.frombuffer(room, values.dtype)
    array[:] = values
    return array


def test_an_array_that_is_not_changed_is_copied_from_where_it_is(driver: MemoryDriver) -> None:
    stage, target = open_staging(driver), np.zeros(8)
    source = pin(stage, np.arange(16.0))
    stage.copy(source[8:], target.ctypes.data)
    assert driver.count_calls("allocate_host") == 1
    (call,) = [call for call in driver.calls if call.name == "copy_async"]
    assert call.arguments == (target.ctypes.data, source.ctypes.data + 64, 64, STREAM)
    # A broken promise is seen.
    source[8:] = -1
    driver.finish(STREAM)
    assert target.tolist() == [-1.0] * 8


def test_its_memory_serves_again_only_after_the_copy(driver: MemoryDriver) -> None:
    stage, target = open_staging(driver), np.zeros(16)
    source = pin(stage, np.arange(16.0))
    stage.copy(source, target.ctypes.data)
    block = stage.allocator.find_block(source.ctypes.data)
    assert block is not None
    stage.allocator.free(block)
    assert stage.allocator.allocate(128) is not block
    driver.finish(STREAM)
    assert stage.allocator.allocate(128) is block
    assert not block.is_non_blocking


def test_a_pinned_array_without_the_promise_may_change_at_once(driver: MemoryDriver) -> None:
    stage, target = open_staging(driver), np.zeros(16)
    pin(stage, np.zeros(1))
    source = pin(stage, np.arange(16.0), is_non_blocking=False)
    stage.copy(source, target.ctypes.data)
    source[:] = -1
    driver.finish(STREAM)
    np.testing.assert_array_equal(target, np.arange(16.0))


def test_a_non_blocking_copy_whose_event_fails_is_waited_for(driver: MemoryDriver) -> None:
    stage, target = open_staging(driver), np.zeros(16)
    source = pin(stage, np.arange(16.0))
    driver.fail_on = "record_event"
    with pytest.raises(CudaError, match="record_event"):
        stage.copy(source, target.ctypes.data)
    source[:] = -1
    np.testing.assert_array_equal(target, np.arange(16.0))


def test_two_streams_share_the_page_locked_memory(driver: MemoryDriver) -> None:
    first, second = open_staging(driver), open_staging(driver, STREAM + 1)
    target = np.zeros(16)
    for stage in (first, second):
        stage.copy(np.ones(16), target.ctypes.data)
        driver.finish(stage._stream)
    assert first.allocator is second.allocator
    assert first.reserved_bytes == second.reserved_bytes == SMALLEST_CHUNK_BYTES
    assert driver.count_calls("create_event") == 1


def test_each_driver_has_memory_of_its_own(driver: MemoryDriver) -> None:
    other = MemoryDriver()
    assert open_staging(driver).allocator is not open_staging(other).allocator


def test_while_the_stream_is_captured_ordinary_memory_is_refused(driver: MemoryDriver) -> None:
    stage, target, pool_id = open_staging(driver), np.zeros(16), new_pool_id()
    source = pin(stage, np.arange(16.0), is_non_blocking=False)
    stage.allocator.begin_allocate_to_pool(pool_id, lambda stream: stream == STREAM)
    with pytest.raises(CaptureError, match="ordinary host memory is captured"):
        stage.copy(np.ones(16), target.ctypes.data)
    assert driver.count_calls("copy_async") == 0
    # A captured copy reads the pinned array itself, at every replay.
    stage.copy(source, target.ctypes.data)
    assert driver.count_calls("record_event") == 0
    stage.allocator.end_allocate_to_pool(pool_id)
    stage.copy(np.ones(16), target.ctypes.data)
    assert driver.count_calls("copy_async") == 2


def test_the_options_reach_the_page_locked_memory(
    driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", "pinned_reserve_segment_size_mb:1")
    stage, target = open_staging(driver), np.zeros(16)
    for _ in range(3):
        stage.copy(np.ones(16), target.ctypes.data)
    assert [call.arguments for call in driver.calls if call.name == "allocate_host"] == [(1 << 20,)]
    assert stage.reserved_bytes == 3 * SMALLEST_CHUNK_BYTES


def test_registered_memory(driver: MemoryDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", "pinned_use_cuda_host_register:True")
    before, target = driver.live_handles(), np.zeros(16)
    stage = open_staging(driver)
    stage.copy(np.ones(16), target.ctypes.data)
    driver.finish(STREAM)
    assert target.tolist() == [1.0] * 16
    assert driver.count_calls("register_host") == 1
    assert driver.count_calls("allocate_host") == 0
    stage.allocator.empty_cache()
    assert driver.count_calls("unregister_host") == 1
    del stage
    gc.collect()
    assert driver.live_handles() == before


def test_memory_goes_back_from_a_thread_without_a_context(driver: MemoryDriver) -> None:
    before, target = driver.live_handles(), np.zeros(16)
    stages = [open_staging(driver)]
    stages[0].copy(np.ones(16), target.ctypes.data)
    thread = threading.Thread(target=stages.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert driver.live_handles() == before


def test_several_threads(driver: MemoryDriver) -> None:
    stage, targets = open_staging(driver), np.zeros((8, 50, 4))
    context = driver.get_current()

    def work(index: int) -> None:
        driver.set_current(context)
        for turn in range(50):
            values = np.full(4, index * 50.0 + turn)
            stage.copy(values, targets[index, turn].ctypes.data)
            values[:] = -1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.finish(STREAM)
    np.testing.assert_array_equal(targets[:, :, 0].ravel(), np.arange(400.0))
