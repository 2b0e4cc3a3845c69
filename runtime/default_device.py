"""The device that captures use: JAX's default device, if it is a GPU on the CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from tracegraph.runtime.device import Device
from tracegraph.runtime.device_properties import DeviceProperties
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.ffi.recorder import record_registrations
from tracegraph.runtime.host.device import HostDevice, find_host_device
from tracegraph.runtime.host.properties import read_properties as read_host_properties
from tracegraph.runtime.late_import import import_late
from tracegraph.runtime.streams.stream_backend import StreamBackend, register_backend

if TYPE_CHECKING:
    from tracegraph.runtime.cuda.described_device import DescribedGpu
    from tracegraph.runtime.cuda.device import CudaDevice
    from tracegraph.runtime.cuda.spread_gpus import SpreadGpus

# Note [Late imports].
find_cuda_device: Callable[[Any], CudaDevice] = import_late(
    "tracegraph.runtime.cuda.device", "find_cuda_device"
)
join_gpus: Callable[..., SpreadGpus] = import_late(
    "tracegraph.runtime.cuda.spread_gpus", "SpreadGpus"
)
describe_gpu: Callable[[str], DescribedGpu] = import_late(
    "tracegraph.runtime.cuda.described_device", "describe_gpu"
)
read_gpu_properties: Callable[[Any], DeviceProperties] = import_late(
    "tracegraph.runtime.cuda.properties", "read_properties"
)
can_gpu_access_peer: Callable[[Any, Any], bool] = import_late(
    "tracegraph.runtime.cuda.properties", "can_access_peer"
)


def find_device(*, is_checking: bool) -> Device:
    """Returns the CUDA device if JAX computes on a GPU by default, else the host device.

    Args:
        is_checking: True for the host device in checking mode, wherever JAX computes.

    Raises:
        CudaError: JAX computes on a GPU, and there is no CUDA driver, or it is too old.
    """
    gpu = _find_gpu()
    if gpu is None or is_checking:
        return find_host_device(is_checking=is_checking)
    return find_cuda_device(gpu)


def find_any_device(device: Any = None) -> Device:
    """Returns a device that the user names.

    Args:
        device: a JAX device, the index of one of JAX's local devices, or None for the device that
            captures use.

    Raises:
        ConfigError: there is no such device, or none of ours of its kind.
    """
    is_checking = read_check_replay()
    if device is None:
        return find_device(is_checking=is_checking)
    jax_device = find_jax_device(device)
    if jax_device.platform == "gpu":
        return find_cuda_device(jax_device)
    return HostDevice(jax_device, is_checking=is_checking)


def find_jax_device(device: Any = None, argument: str = "device") -> Any:
    """Returns the JAX device that a user names.

    Args:
        device: a JAX device, the index of one of JAX's local devices, or None for the current one:
            JAX's default device in this thread.
        argument: what an error calls it.

    Raises:
        ConfigError: there is no such device, or it is neither a CPU nor a GPU.
    """
    if device is None:
        return _find_default()
    local = jax.local_devices()
    known = list(dict.fromkeys((*local, *jax.local_devices(backend="cpu"))))
    is_index = isinstance(device, int) and not isinstance(device, bool)
    found: Any = local[device] if is_index and 0 <= device < len(local) else device
    if found in known and found.platform in ("cpu", "gpu"):
        return found
    raise ConfigError(
        f"`{argument}` is {device!r}",
        where=f"argument `{argument}`",
        why=f"this process has the devices {', '.join(map(str, known))}",
        fix=f"pass an index from 0 to {len(local) - 1}, a JAX device of these, or leave it out",
        anchor="device",
    )


def read_properties(device: Any) -> DeviceProperties:
    """Returns what a device is.

    Args:
        device: as `find_jax_device` takes it.

    Raises:
        ConfigError: there is no such device.
        CudaError: it is a GPU, and the driver's bindings are missing.
    """
    jax_device = find_jax_device(device)
    is_gpu = jax_device.platform == "gpu"
    return (read_gpu_properties if is_gpu else read_host_properties)(jax_device)


def can_access_peer(device: Any, peer: Any) -> bool:
    """Returns True when programs on a device can use the memory of another.

    Args:
        device: as `find_jax_device` takes it.
        peer: another.

    Raises:
        ConfigError: there is no such device.
        CudaError: both are GPUs, and the driver's bindings are missing.
    """
    first, second = find_jax_device(device), find_jax_device(peer, "peer_device")
    if first == second or first.platform != second.platform:
        return False
    # CPU devices of one process are parts of the same memory.
    return first.platform == "cpu" or can_gpu_access_peer(first, second)


def _find_default() -> Any:
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    # It may be a device, the name of a platform, or None.
    is_device = isinstance(default, jax.Device)
    return default if is_device else jax.local_devices(backend=default)[0]


def _find_gpu() -> Any:
    device = _find_default()
    return device if device.platform == "gpu" else None


def _find_streams(device: Any) -> StreamBackend | None:
    named = None if device is None else find_jax_device(device)
    if named is not None:
        return find_cuda_device(named).streams if named.platform == "gpu" else None
    gpu = _find_gpu()
    return None if gpu is None else find_cuda_device(gpu).streams


register_backend(_find_streams)


# As early as possible: see Note [Registered handlers].
record_registrations()
