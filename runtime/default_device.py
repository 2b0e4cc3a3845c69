"""The device that captures use: JAX's default device, if it is a GPU on the CUDA device."""

from __future__ import annotations

from typing import Any

import jax

from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.device import Device
from tracegraph.runtime.host.device import find_host_device
from tracegraph.runtime.stream import StreamBackend, register_backend


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
