"""What the devices of this process are."""

from __future__ import annotations

from typing import Any

import jax

from tracegraph.runtime import default_device
from tracegraph.runtime.device_properties import DeviceProperties


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Returns what a device is: name, memory, compute capability, limits of its kernels.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        ConfigError: there is no such device.
        CudaError: it is a GPU, and the driver's bindings are missing.

    Example:
        >>> tg.get_device_properties(0).total_memory > 0
        True
    """
    return default_device.read_properties(device)


def get_device_name(device: Any = None) -> str:
    """Returns the name of a device, as ``NVIDIA H200``; ``cpu`` for the host device.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        ConfigError: there is no such device.
    """
    return str(default_device.find_jax_device(device).device_kind)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Returns the compute capability of a device, as (9, 0); (0, 0) for the host device.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        ConfigError: there is no such device.
        CudaError: it is a GPU, and the driver's bindings are missing.

    Example:
        >>> tg.get_device_capability() >= (8, 0) or not tg.is_available()
        True
    """
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Returns True when programs on one device can use the memory of another one directly.

    Args:
        device: a JAX device, or the index of one.
        peer_device: another one; False for the same one, as in CUDA.

    Raises:
        ConfigError: there is no such device.
        CudaError: both are GPUs, and the driver's bindings are missing.

    Example:
        >>> tg.can_device_access_peer(0, 0)
        False
    """
    return default_device.can_access_peer(device, peer_device)


def get_arch_list() -> list[str]:
    """Returns the architectures that XLA compiles for here, as ``["sm_90"]``.

    They are those of the GPUs of this process: XLA compiles when a program is first called, for the
    GPU that it runs on, and no list is fixed when it is built. Without a GPU the list is empty.

    Raises:
        CudaError: there is a GPU, and the driver's bindings are missing.
    """
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return [f"sm_{major}{minor}" for major, minor in sorted(set(map(get_device_capability, gpus)))]
