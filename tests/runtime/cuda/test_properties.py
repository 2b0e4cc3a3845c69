"""What a GPU is, read from a driver that is not there."""

from __future__ import annotations

import types

import pytest

from tests.fakes.fake_driver import FakeDriver
from tracegraph.runtime.cuda import properties
from tracegraph.runtime.device_properties import DeviceProperties

GPU = types.SimpleNamespace(local_hardware_id=2, device_kind="NVIDIA H200", platform="gpu")
OTHER = types.SimpleNamespace(local_hardware_id=0, device_kind="NVIDIA H200", platform="gpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(properties, "load_driver", lambda: driver)
    return driver


def test_the_properties_of_a_gpu(driver: FakeDriver) -> None:
    found = properties.read_properties(GPU)
    assert found == DeviceProperties(
        name="NVIDIA H200",
        major=9,
        total_memory=139 << 30,
        warp_size=32,
        pci_bus_id=0x65,
        uuid="00010203-0405-0607-0809-0a0b0c0d0e0f",
    )
    # The driver counts the GPUs that this process sees; JAX's own numbers may differ.
    assert {call.arguments[0] for call in driver.calls} == {2}


def test_peers_are_known_by_their_ordinals(driver: FakeDriver) -> None:
    assert properties.can_access_peer(GPU, OTHER)
    assert [(call.name, call.arguments) for call in driver.calls] == [("can_access_peer", (2, 0))]
