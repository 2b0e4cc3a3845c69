"""DeviceCalls: what the driver is asked about a device."""

from __future__ import annotations

import types

import pytest

from tests.fakes.fake_bindings import FakeBindings, import_real
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.properties import ATTRIBUTES
from tracegraph.runtime.errors import CudaError


def test_an_attribute_is_asked_for_by_its_number(api: FakeBindings) -> None:
    api.results |= {"cuDeviceGet": (0x40,), "cuDeviceGetAttribute": (32,)}
    assert CudaDriver(api).read_attribute(1, "WARP_SIZE") == 32
    (_, ordinals), (_, arguments) = api.calls
    assert ordinals == (1,)
    assert [int(each) for each in arguments] == [10, 0x40]


def test_memory_identity_and_peers(api: FakeBindings) -> None:
    uuid = types.SimpleNamespace(bytes=bytes(range(16)))
    api.results |= {"cuDeviceGet": (0x40,), "cuDeviceTotalMem": (1 << 30,)}
    api.results |= {"cuDeviceGetUuid": (uuid,), "cuDeviceCanAccessPeer": (1,)}
    driver = CudaDriver(api)
    assert driver.read_total_bytes(0) == 1 << 30
    assert driver.read_uuid(0) == bytes(range(16))
    api.calls.clear()
    assert driver.can_access_peer(0, 1) is True
    assert api.calls[:2] == [("cuDeviceGet", (0,)), ("cuDeviceGet", (1,))]
    assert api.calls[2] == ("cuDeviceCanAccessPeer", (0x40, 0x40))


def test_a_device_that_cuda_does_not_have(api: FakeBindings) -> None:
    api.errors["cuDeviceGet"] = 101
    api.results["cuGetErrorName"] = (0, b"CUDA_ERROR_INVALID_DEVICE")
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_DEVICE from cuDeviceGet\n"):
        CudaDriver(api).read_total_bytes(7)


def test_the_bindings_have_every_attribute() -> None:
    real = import_real()
    if real is None:
        pytest.skip("needs cuda.bindings")
    names = {f"CU_DEVICE_ATTRIBUTE_{name}" for name in ATTRIBUTES.values()}
    assert names <= set(dir(real.CUdevice_attribute))
