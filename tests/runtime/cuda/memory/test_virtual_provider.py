"""Providers of addresses and memory apart: the order of their calls, and what they refuse."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.fakes.fake_state import MisuseError
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.errors import CudaError, InternalError, OutOfMemoryError
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider
from tracegraph.runtime.memory.providers.provider import VirtualProvider

PAGE = 2 << 20
STREAM = 0x5555
KINDS = ("cuda", "host")


def make_cuda(**options: Any) -> tuple[CudaVirtualProvider, MemoryDriver]:
    driver = MemoryDriver(is_deferred=True, **options)
    return CudaVirtualProvider(driver, driver.retain_primary_context(0), 0), driver


def make(kind: str, limit_bytes: int = 8 * PAGE) -> Any:
    if kind == "host":
        return HostVirtualProvider(limit_bytes)
    return make_cuda(memory_bytes=limit_bytes)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_is_mapped_page_by_page(kind: str) -> None:
    provider = make(kind)
    assert isinstance(provider, VirtualProvider)
    assert provider.granularity_bytes() == PAGE
    address = provider.reserve(9 * PAGE)
    assert address % PAGE == 0
    assert provider.available_bytes() == provider.total_bytes() == 8 * PAGE
    for index in (0, 1, 3):
        provider.map(address + index * PAGE, PAGE)
    assert provider.available_bytes() == 5 * PAGE
    ctypes.memset(address + PAGE, 7, PAGE)
    provider.unmap(address, 2 * PAGE)
    provider.map(address, 2 * PAGE)
    provider.unmap(address, 2 * PAGE)
    provider.unmap(address + 3 * PAGE, PAGE)
    provider.release(address, 9 * PAGE)
    assert provider.available_bytes() == 8 * PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_mapped_memory_and_segments_share_the_device(kind: str) -> None:
    provider = make(kind, 4 * PAGE)
    address = provider.reserve(4 * PAGE)
    segment = provider.allocate(PAGE)
    provider.map(address, 2 * PAGE)
    with pytest.raises(OutOfMemoryError, match=r"cannot reserve 4,194,304 bytes"):
        provider.map(address + 2 * PAGE, 2 * PAGE)
    with pytest.raises(OutOfMemoryError, match=r"cannot reserve 4,194,304 bytes"):
        provider.allocate(2 * PAGE)
    provider.free(segment)
    provider.map(address + 2 * PAGE, 2 * PAGE)
    assert provider.available_bytes() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_found(kind: str) -> None:
    provider = make(kind)
    address = provider.reserve(4 * PAGE)
    provider.map(address, PAGE)
    misuse = (MisuseError, InternalError)
    with pytest.raises(misuse):
        provider.map(address, PAGE)
    with pytest.raises(misuse):
        provider.unmap(address + PAGE, PAGE)
    with pytest.raises(misuse):
        provider.unmap(address, 2 * PAGE)
    with pytest.raises(misuse):
        provider.release(address, 4 * PAGE)
    provider.unmap(address, PAGE)
    provider.release(address, 4 * PAGE)


def test_the_host_says_what_it_refuses() -> None:
    provider = HostVirtualProvider()
    with pytest.raises(InternalError, match="cannot release 512 bytes at 0x1000") as raised:
        provider.release(4096, 512)
    assert (raised.value.where, raised.value.anchor) == ("host provider", "internal")
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        provider.reserve(1 << 60)
    assert not isinstance(HostProvider(), VirtualProvider)


def test_unmapped_host_memory_is_fresh_again() -> None:
    provider = HostVirtualProvider()
    address = provider.reserve(2 * PAGE)
    provider.map(address, PAGE)
    ctypes.memset(address, 7, PAGE)
    provider.unmap(address, PAGE)
    provider.map(address, PAGE)
    assert ctypes.string_at(address, PAGE) == bytes(PAGE)


def test_memory_stays_by_its_mapping_alone() -> None:
    provider, driver = make_cuda()
    address = provider.reserve(4 * PAGE)
    provider.map(address, PAGE)
    assert sorted(driver.live_handles().values()) == ["context", "range"]
    provider.unmap(address, PAGE)
    provider.release(address, 4 * PAGE)
    assert sorted(driver.live_handles().values()) == ["context"]
    names = [call.name for call in driver.calls if "memory" in call.name or "access" in call.name]
    assert names == ["create_memory", "map_memory", "release_memory", "allow_access"] + [
        "unmap_memory"
    ]


def test_nothing_is_unmapped_under_work() -> None:
    provider, driver = make_cuda(checks_context=False)
    address = provider.reserve(4 * PAGE)
    provider.map(address, PAGE)
    driver.fill_async(address, 7, 1, 64, STREAM)
    assert not driver.query_stream(STREAM)
    provider.unmap(address, PAGE)
    assert driver.query_stream(STREAM)


@pytest.mark.parametrize("name", ["create_memory", "map_memory", "allow_access"])
def test_a_failing_map_leaves_nothing_behind(name: str) -> None:
    provider, driver = make_cuda(memory_bytes=4 * PAGE)
    address = provider.reserve(4 * PAGE)
    driver.fail_on = name
    with pytest.raises(CudaError, match=f"CUDA_ERROR_UNKNOWN from {name}"):
        provider.map(address, PAGE)
    assert provider.available_bytes() == 4 * PAGE
    assert sorted(driver.live_handles().values()) == ["context", "range"]
    provider.map(address, 4 * PAGE)
