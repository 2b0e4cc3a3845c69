"""CudaEvents: events are used again, each in the context that it was made in."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.cuda.memory.pinned_pages import find_pinned_allocator
from tracegraph.runtime.cuda.memory.staging import Staging
from tracegraph.runtime.errors import CudaError

STREAM = 0x5555


@pytest.fixture
def driver() -> MemoryDriver:
    driver = MemoryDriver()
    driver.set_current(driver.retain_primary_context(0))
    return driver


def test_a_released_event_is_recorded_again(driver: MemoryDriver) -> None:
    events = CudaEvents(driver)
    first, second = events.record(STREAM), events.record(STREAM)
    assert first != second
    events.release(first)
    assert events.record(STREAM + 1) == first


def test_an_event_that_cannot_be_recorded_stays(driver: MemoryDriver) -> None:
    events = CudaEvents(driver)
    driver.fail_on = "record_event"
    with pytest.raises(CudaError, match="record_event"):
        events.record(STREAM)
    events.record(STREAM)
    assert driver.count_calls("create_event") == 1


def test_events_go_with_their_owner(driver: MemoryDriver) -> None:
    events = CudaEvents(driver)
    for stream in (STREAM, STREAM + 1):
        events.release(events.record(stream))
    del events
    gc.collect()
    assert "event" not in driver.live_handles().values()


def test_streams_of_two_gpus_have_events_of_their_own(driver: MemoryDriver) -> None:
    contexts = driver.retain_primary_context(0), driver.retain_primary_context(1)
    pinned = find_pinned_allocator(driver, contexts[0])
    stages = [Staging(driver, STREAM + index, pinned) for index in range(2)]
    source, target = np.arange(16.0), np.zeros(16)
    for _ in range(3):
        for context, stage in zip(contexts, stages, strict=True):
            with driver.use_context(context):
                stage.copy(source, target.ctypes.data)
            driver.synchronize_stream(STREAM)
            driver.synchronize_stream(STREAM + 1)
    np.testing.assert_array_equal(target, source)
    assert driver.count_calls("create_event") == 2
