"""The driver of other tests does its work late, in the order of streams and events."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.memory_driver import MemoryDriver

ONE, OTHER = 0x5555, 0x6666


@pytest.fixture
def driver() -> MemoryDriver:
    driver = MemoryDriver(is_deferred=True)
    driver.set_current(driver.retain_primary_context(0))
    return driver


def test_work_waits_for_the_host(driver: MemoryDriver) -> None:
    source, target = np.full(4, 7, np.uint8), np.zeros(4, np.uint8)
    driver.copy_async(target.ctypes.data, source.ctypes.data, 4, ONE)
    assert not driver.query_stream(ONE)
    assert not target.any()
    driver.synchronize_stream(ONE)
    assert driver.query_stream(ONE)
    assert target.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_shows(driver: MemoryDriver, waits: bool) -> None:
    middle, target = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    event = driver.create_event()
    driver.fill_async(middle.ctypes.data, 5, 1, 4, ONE)
    driver.record_event(event, ONE)
    driver.fill_async(middle.ctypes.data, 9, 1, 4, ONE)
    if waits:
        driver.wait_event(OTHER, event)
    driver.copy_async(target.ctypes.data, middle.ctypes.data, 4, OTHER)
    driver.synchronize_stream(OTHER)
    assert target.tolist() == [5 if waits else 0] * 4
    assert driver.query_event(event) is waits
    driver.synchronize_event(event)
    assert middle.tolist() == [5] * 4
    driver.synchronize_context()
    assert middle.tolist() == [9] * 4


def test_work_is_done_at_once_unless_deferred() -> None:
    driver = MemoryDriver()
    driver.set_current(driver.retain_primary_context(0))
    target = np.zeros(4, np.uint8)
    driver.fill_async(target.ctypes.data, 5, 1, 4, ONE)
    assert target.tolist() == [5] * 4
