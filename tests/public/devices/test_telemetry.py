"""Telemetry of a GPU, from a module of NVML that is not there."""

from __future__ import annotations

import importlib.util
import sys
import types

import jax
import pytest

import tracegraph as tg
from tests.fakes.fake_pynvml import FakeNvml
from tracegraph.runtime import default_device
from tracegraph.runtime.device_properties import DeviceProperties

CALLS = {
    "utilization": 87,
    "memory_usage": 41,
    "temperature": 45,
    "power_draw": 312_500,
    "clock_rate": 1980,
}
NAMES = [*CALLS, "list_gpu_processes"]


class Gpu:
    """A GPU of JAX that is only looked at."""

    platform = "gpu"

    def __repr__(self) -> str:
        return "cuda:0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Makes a GPU the second device of this process."""
    gpu, local_devices = Gpu(), jax.local_devices
    others = local_devices()
    found = DeviceProperties("NVIDIA H200", pci_domain_id=1, pci_bus_id=0x65, pci_device_id=2)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [*others[:1], gpu])
    monkeypatch.setattr(default_device, "read_gpu_properties", lambda device: found)
    return gpu


@pytest.fixture
def nvml(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml("00000001:65:02.0")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_is_measured_where_it_is_on_the_bus(name: str, nvml: FakeNvml, gpu: Gpu) -> None:
    assert getattr(tg, name)(1) == getattr(tg, name)(gpu) == CALLS[name]
    assert nvml.opened == 0


def test_the_processes_of_a_gpu(nvml: FakeNvml) -> None:
    assert tg.list_gpu_processes(1) == "GPU:1\nno process computes on it"
    nvml.processes = [
        types.SimpleNamespace(pid=4321, usedGpuMemory=None),
        types.SimpleNamespace(pid=77, usedGpuMemory=1536 << 20),
    ]
    assert tg.list_gpu_processes(1).splitlines() == [
        "GPU:1",
        "process         77 uses 1,536.0 MiB of GPU memory",
        "process       4321 uses an unknown amount of GPU memory",
    ]
    assert nvml.opened == 0


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetUtilizationRates"])
def test_what_nvml_cannot_tell_is_an_error(failing: str, nvml: FakeNvml) -> None:
    nvml.failing = failing
    with pytest.raises(tg.CudaError) as raised:
        tg.utilization(1)
    assert raised.value.what == "NVML cannot tell: Not Supported"
    assert raised.value.where.endswith("utilization() of cuda:0")
    assert "NVMLErrorNotSupported" in raised.value.why
    assert (raised.value.anchor, nvml.opened) == ("nvml", 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_package_to_install_is_named(
    name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(tg.CudaError) as raised:
        getattr(tg, name)(1)
    error = raised.value
    assert error.what == "nvidia-ml-py, NVML's package for Python, is not installed"
    assert "test_telemetry.py" in error.where
    assert f"{name}()" in error.where
    assert error.fix.startswith("pip install nvidia-ml-py")
    assert len(str(error).splitlines()) == 4


@pytest.mark.parametrize("name", NAMES)
def test_the_host_device_has_no_telemetry(name: str) -> None:
    with pytest.raises(tg.CudaError) as raised:
        getattr(tg, name)(0)
    assert raised.value.what == f"{name}() is asked of {jax.devices()[0]}, which is no GPU"
    assert raised.value.anchor == "nvml"


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(tg.ConfigError, match="`device` is 64"):
        tg.temperature(64)


def test_the_fake_has_the_names_of_the_package() -> None:
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("needs nvidia-ml-py")
    real = importlib.import_module("pynvml")
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == []
