"""Memory calls of CudaDriver: what each asks of the driver, also while a thread captures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.fake_bindings import FakeBindings
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.errors import CudaError, OutOfMemoryError

EXCHANGE = "cuThreadExchangeStreamCaptureMode"
OUT_OF_MEMORY = 2


@pytest.mark.parametrize(
    ("method", "arguments", "function", "results", "expected", "value"),
    [
        ("allocate_memory", (64,), "cuMemAlloc", (0x700,), (64,), 0x700),
        ("free_memory", (0x700,), "cuMemFree", (), (0x700,), None),
        ("allocate_host", (64,), "cuMemHostAlloc", (0x700,), (64, 1), 0x700),
        ("free_host", (0x700,), "cuMemFreeHost", (), (0x700,), None),
        ("register_host", (0x700, 64), "cuMemHostRegister", (), (0x700, 64, 1), None),
        ("unregister_host", (0x700,), "cuMemHostUnregister", (), (0x700,), None),
    ],
)
def test_memory_can_come_and_go_while_a_thread_captures(
    api: FakeBindings,
    method: str,
    arguments: tuple[Any, ...],
    function: str,
    results: tuple[Any, ...],
    expected: tuple[Any, ...],
    value: object,
) -> None:
    api.results |= {function: results, EXCHANGE: (1,)}
    assert getattr(CudaDriver(api), method)(*arguments) == value
    calls = [(EXCHANGE, (2,)), (function, expected), (EXCHANGE, (1,))]
    assert api.calls == calls
    api.errors[function] = 1
    with pytest.raises(CudaError, match=f"cuGetErrorName from {function}"):
        getattr(CudaDriver(api), method)(*arguments)
    assert api.calls == calls * 2


def test_the_pool_of_the_driver(api: FakeBindings) -> None:
    api.results |= {"cuDeviceGet": (1,), "cuDeviceGetDefaultMemPool": (5,)}
    driver = CudaDriver(api)
    assert driver.find_memory_pool(1) == 5
    driver.keep_in_memory_pool(5, 1 << 40)
    name, (pool, attribute, nbytes) = api.calls[-1]
    assert (name, pool, int(attribute), int(nbytes)) == ("cuMemPoolSetAttribute", 5, 4, 1 << 40)


def test_memory_without_an_address_is_that_of_a_device(api: FakeBindings) -> None:
    api.results |= {"cuMemCreate": (9,), "cuMemGetAllocationGranularity": (2 << 20,)}
    driver = CudaDriver(api)
    assert driver.create_memory(3, 64) == 9
    nbytes, properties, flags = api.take_call("cuMemCreate")
    assert (nbytes, flags) == (64, 0)
    assert int(properties.type) == 1
    assert (int(properties.location.type), properties.location.id) == (1, 3)
    assert driver.read_granularity(3) == 2 << 20
    properties, option = api.take_call("cuMemGetAllocationGranularity")
    assert (properties.location.id, int(option)) == (3, 0)


def test_a_device_gets_access_for_reading_and_writing(api: FakeBindings) -> None:
    CudaDriver(api).allow_access(0x700, 64, 3)
    address, nbytes, (access,), count = api.take_call("cuMemSetAccess")
    assert (address, nbytes, count) == (0x700, 64, 1)
    assert (int(access.location.type), access.location.id, int(access.flags)) == (1, 3, 3)


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("allocate_memory", (1 << 40,), r"cuMemAlloc\(0x10000000000\)"),
        ("allocate_async", (4096, 7), r"cuMemAllocAsync\(0x1000, 7\)"),
        ("create_memory", (3, 2 << 20), r"cuMemCreate\(0x200000, 'device 3'\)"),
    ],
)
def test_full_memory_has_an_error_of_its_own(
    api: FakeBindings, method: str, arguments: tuple[int, ...], text: str
) -> None:
    for function in ("cuMemAlloc", "cuMemAllocAsync", "cuMemCreate"):
        api.errors[function] = OUT_OF_MEMORY
        api.results[function] = (0,)
    api.results |= {"cuGetErrorName": (0, b"CUDA_ERROR_OUT_OF_MEMORY"), EXCHANGE: (1,)}
    with pytest.raises(OutOfMemoryError, match=text):
        getattr(CudaDriver(api), method)(*arguments)
