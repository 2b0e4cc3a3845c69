"""The device that captures use: JAX's default device, if it is a GPU on the CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.ffi.recorder import record_registrations
from tracegraph.runtime.host.device import HostDevice, find_host_device
from tracegraph.runtime.late_import import import_late
from tracegraph.runtime.stream import StreamBackend, register_backend

if TYPE_CHECKING:
    from tracegraph.runtime.cuda.device import CudaDevice

# Note [Late imports].
find_cuda_device: Callable[[Any], CudaDevice] = import_late(
    "tracegraph.runtime.cuda.device", "find_cuda_device"
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
    jax_device = _find_jax_device(device)
    if jax_device.platform == "gpu":
        return find_cuda_device(jax_device)
    return HostDevice(jax_device, is_checking=is_checking)


def _find_jax_device(device: Any) -> Any:
    local = jax.local_devices()
    known = list(dict.fromkeys((*local, *jax.local_devices(backend="cpu"))))
    is_index = isinstance(device, int) and not isinstance(device, bool)
    found: Any = local[device] if is_index and 0 <= device < len(local) else device
    if found in known and found.platform in ("cpu", "gpu"):
        return found
    raise ConfigError(
        f"`device` is {device!r}",
        where="argument `device`",
        why=f"tracegraph manages memory on {', '.join(map(str, known))}",
        fix=f"pass an index from 0 to {len(local) - 1}, a JAX device of these, or leave it out",
        anchor="config",
    )


def _find_gpu() -> Any:
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    # It may be a device, the name of a platform, or None.
    is_device = isinstance(default, jax.Device)
    device = default if is_device else jax.local_devices(backend=default)[0]
    return device if device.platform == "gpu" else None


def _find_streams() -> StreamBackend | None:
    gpu = _find_gpu()
    return None if gpu is None else find_cuda_device(gpu).streams


register_backend(_find_streams)


# As early as possible: see Note [Registered handlers].
record_registrations()
