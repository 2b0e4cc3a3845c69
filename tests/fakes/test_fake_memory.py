"""The memory of FakeDriver finds misuse: for each check a fault that it must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.fake_memory import GRANULARITY
from tests.fakes.fake_state import MisuseError
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.errors import OutOfMemoryError

STREAM, OTHER = 0x5555, 0x6666
PAGE = GRANULARITY


class Session:
    """A driver with a range of four pages, of which the first two are mapped, one by one."""

    def __init__(self) -> None:
        self.driver = driver = MemoryDriver(is_deferred=True, memory_bytes=4 * PAGE)
        driver.set_current(driver.retain_primary_context(0))
        self.memory = driver.allocate_memory(64)
        self.range = driver.reserve_addresses(4 * PAGE)
        for index in range(2):
            self.map(index)
        driver.allow_access(self.range, 2 * PAGE, 0)

    def map(self, index: int) -> None:
        handle = self.driver.create_memory(0, PAGE)
        self.driver.map_memory(self.range + index * PAGE, PAGE, handle)
        self.driver.release_memory(handle)

    def fill(self, offset: int, nbytes: int) -> None:
        self.driver.fill_async(self.range + offset, 7, 1, nbytes, STREAM)
        self.driver.synchronize_stream(STREAM)

    def copy(self, source: int, target: int) -> None:
        self.driver.copy_async(target, source, 64, STREAM)
        self.driver.synchronize_stream(STREAM)

    def unmap_under_work(self) -> None:
        self.driver.fill_async(self.range, 7, 1, 64, STREAM)
        self.driver.unmap_memory(self.range, PAGE)

    def map_released(self) -> None:
        handle = self.driver.create_memory(0, PAGE)
        self.driver.release_memory(handle)
        self.driver.map_memory(self.range + 2 * PAGE, PAGE, handle)

    def map_part(self) -> None:
        self.driver.free_memory(self.memory)
        handle = self.driver.create_memory(0, 2 * PAGE)
        self.driver.map_memory(self.range + 2 * PAGE, PAGE, handle)

    def map_elsewhere(self) -> None:
        self.driver.map_memory(self.range + 4 * PAGE, PAGE, self.driver.create_memory(0, PAGE))

    def fill_without_access(self) -> None:
        self.map(2)
        self.fill(2 * PAGE, 64)

    def free_on_other_stream(self) -> None:
        address = self.driver.allocate_async(64, STREAM)
        self.driver.free_async(address, OTHER)

    def register_twice(self) -> None:
        self.driver.register_host(4096, 4096)
        self.driver.register_host(8191, 1)


FAULTS: dict[str, tuple[Callable[[Session], object], str]] = {
    "map twice": (lambda s: s.map(1), "is mapped twice"),
    "map elsewhere": (lambda s: s.map_elsewhere(), "not reserved"),
    "map released": (lambda s: s.map_released(), "handle .* is destroyed"),
    "map a part": (lambda s: s.map_part(), "mapped as a whole"),
    "unmap nothing": (
        lambda s: s.driver.unmap_memory(s.range + 2 * PAGE, PAGE),
        "not just what is mapped",
    ),
    "unmap a part": (lambda s: s.driver.unmap_memory(s.range, PAGE // 2), "not just what"),
    "unmap too much": (lambda s: s.driver.unmap_memory(s.range, 3 * PAGE), "not just what"),
    "unmap under work": (lambda s: s.unmap_under_work(), "while work is under way"),
    "touch unmapped": (lambda s: s.fill(3 * PAGE, 1), "not all mapped"),
    "touch the end": (lambda s: s.fill(2 * PAGE - 1, 2), "not all mapped"),
    "read unmapped": (lambda s: s.copy(s.range + 3 * PAGE, s.memory), "not all mapped"),
    "write unmapped": (lambda s: s.copy(s.memory, s.range + 3 * PAGE), "not all mapped"),
    "no access": (lambda s: s.fill_without_access(), "without access"),
    "access unmapped": (lambda s: s.driver.allow_access(s.range, 3 * PAGE, 0), "allow_access"),
    "release mapped": (
        lambda s: s.driver.release_addresses(s.range, 4 * PAGE),
        "with memory in it",
    ),
    "release a part": (lambda s: s.driver.release_addresses(s.range, PAGE), "as a whole"),
    "release unknown": (lambda s: s.driver.release_addresses(PAGE, PAGE), "is unknown"),
    "small range": (lambda s: s.driver.reserve_addresses(64), "a range of 64 bytes"),
    "small memory": (lambda s: s.driver.create_memory(0, 64), "create_memory of 64"),
    "free twice": (
        lambda s: [s.driver.free_memory(s.memory) for _ in "ab"],
        "is destroyed",
    ),
    "pool memory": (lambda s: s.driver.free_async(s.memory, STREAM), "is unknown"),
    "other stream": (lambda s: s.free_on_other_stream(), "on another stream"),
    "pool": (lambda s: s.driver.trim_memory_pool(5, 0), "no pool of the driver"),
    "kept pool": (lambda s: s.driver.keep_in_memory_pool(5, 0), "no pool of the driver"),
    "registered twice": (lambda s: s.register_twice(), "registered twice"),
    "not registered": (lambda s: s.driver.unregister_host(4096), "is not registered"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault, message = FAULTS[name]
    with pytest.raises(MisuseError, match=message):
        fault(Session())


def test_a_device_has_so_many_bytes() -> None:
    session = Session()
    driver = session.driver
    assert driver.read_memory() == (2 * PAGE - 64, 4 * PAGE)
    session.map(2)
    for allocate in (
        lambda: driver.create_memory(0, PAGE),
        lambda: driver.allocate_memory(PAGE),
        lambda: driver.allocate_async(PAGE, STREAM),
    ):
        with pytest.raises(OutOfMemoryError):
            allocate()
    driver.free_memory(session.memory)
    session.map(3)
    driver.unmap_memory(session.range, 2 * PAGE)
    assert driver.read_memory() == (2 * PAGE, 4 * PAGE)
    driver.unmap_memory(session.range + 2 * PAGE, 2 * PAGE)
    driver.release_addresses(session.range, 4 * PAGE)
    assert set(driver.live_handles().values()) == {"context"}
    assert driver.read_memory() == (4 * PAGE, 4 * PAGE)


def test_mapped_memory_holds_bytes() -> None:
    session = Session()
    session.fill(PAGE - 32, 64)
    session.copy(session.range + PAGE - 32, session.memory)
    assert session.driver.read_bytes(session.memory, 64) == bytes([7]) * 64


def test_memory_of_the_pool_is_there_until_its_stream_is_done() -> None:
    driver = Session().driver
    address, target = driver.allocate_async(64, STREAM), driver.allocate_memory(64)
    driver.fill_async(address, 9, 1, 64, STREAM)
    driver.copy_async(target, address, 64, STREAM)
    driver.free_async(address, STREAM)
    driver.synchronize_stream(STREAM)
    assert driver.read_bytes(target, 64) == bytes([9]) * 64
