"""Which device captures use, by what JAX's default device is."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tracegraph.runtime import default_device
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.host.device import HostDevice
from tracegraph.runtime.streams.stream import Stream


class Gpu:
    """A device of JAX that is only looked at."""

    platform = "gpu"


class Streams:
    """What a CudaDevice has of its own for streams."""

    def query(self, stream: Stream) -> bool:
        return stream.priority == -7


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Makes a GPU the first device of this process, behind which the CPU is found by name."""
    gpu, local_devices = Gpu(), jax.local_devices

    def list_devices(backend: str | None = None) -> list[Any]:
        return [gpu] if backend in (None, "gpu", "cuda") else local_devices(backend=backend)

    class Found:
        jax_device = gpu
        streams = Streams()

    monkeypatch.setattr(jax, "local_devices", list_devices)
    monkeypatch.setattr(default_device, "find_cuda_device", lambda device: Found)
    return gpu


def test_the_host_without_a_gpu() -> None:
    device = find_device(is_checking=False)
    assert isinstance(device, HostDevice)
    assert Stream().query()


def test_the_gpu_where_jax_computes_on_it(gpu: Gpu) -> None:
    assert find_device(is_checking=False).jax_device is gpu


def test_checking_is_for_the_host(gpu: Gpu) -> None:
    assert isinstance(find_device(is_checking=True), HostDevice)


@pytest.mark.parametrize("as_name", [False, True])
def test_the_host_where_it_is_the_default(gpu: Gpu, as_name: bool) -> None:
    with jax.default_device("cpu" if as_name else jax.devices("cpu")[0]):
        assert isinstance(find_device(is_checking=False), HostDevice)
        assert Stream().query()
    assert find_device(is_checking=False).jax_device is gpu


def test_streams_are_those_of_the_gpu(gpu: Gpu) -> None:
    assert Stream(priority=-7).query()
    assert not Stream().query()


def test_without_a_driver_the_error_says_so(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> Any:
        raise CudaError("no driver", where="w", why="y", fix="f", anchor="cuda-driver")

    monkeypatch.setattr(default_device, "find_cuda_device", refuse)
    with pytest.raises(CudaError, match="no driver"):
        find_device(is_checking=False)
    with pytest.raises(CudaError, match="no driver"):
        Stream().synchronize()


def test_the_streams_of_a_device_that_is_named(gpu: Gpu) -> None:
    cpu = jax.local_devices(backend="cpu")[0]
    assert Stream(device=cpu, priority=-3).query()
    assert Stream(device=0, priority=-7).query()
    assert not Stream(device=0, priority=-3).query()
