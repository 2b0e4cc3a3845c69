"""The same array on several devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from tracegraph.communication.buffers import (
    DEFAULT_BYTES,
    check_buffer_size,
    join_buffers,
    plan_buffers,
    split_buffers,
)
from tracegraph.communication.operands import read_array, read_arrays, read_devices


def broadcast(tensor: Any, devices: Iterable[Any] | None = None) -> tuple[jax.Array, ...]:
    """Copies an array to devices.

    Args:
        tensor: a `jax.Array` on any device, or a NumPy array.
        devices: JAX devices or their indices; None for all local ones.

    Returns:
        One array per device, in their order. The one on the device of ``tensor`` shares its memory.

    Raises:
        ConfigError: an argument is no array or no list of devices.
        CaptureError: a function is being traced.

    Example:
        >>> copies = tg.comm.broadcast(jnp.arange(3.0), [0, 0])
        >>> [copy.tolist() for copy in copies]
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    array = read_array(tensor, "tensor", "broadcast")
    return tuple(jax.device_put(array, device) for device in read_devices(devices, "broadcast"))


def broadcast_coalesced(
    tensors: Iterable[Any],
    devices: Iterable[Any] | None = None,
    buffer_size: int = DEFAULT_BYTES,
) -> tuple[tuple[jax.Array, ...], ...]:
    """Copies many arrays to devices, small ones of one dtype joined in buffers.

    Args:
        tensors: arrays of any shapes and dtypes; those of one device and dtype are joined.
        devices: JAX devices or their indices; None for all local ones.
        buffer_size: most bytes of a buffer of more than one array.

    Returns:
        One tuple per device, each with the copies of all arrays in their order.

    Raises:
        ConfigError: an argument is no list of arrays or of devices, or ``buffer_size`` is wrong.
        CaptureError: a function is being traced.

    Example:
        >>> (first, second), = tg.comm.broadcast_coalesced([jnp.ones(2), jnp.zeros((2, 2))], [0])
        >>> first.shape, second.shape
        ((2,), (2, 2))
    """
    call = "broadcast_coalesced"
    arrays, targets = read_arrays(tensors, "tensors", call), read_devices(devices, call)
    buffers = plan_buffers([arrays], check_buffer_size(buffer_size, call))
    joined = join_buffers(arrays, buffers)
    return tuple(
        split_buffers([jax.device_put(each, device) for each in joined], arrays, buffers)
        for device in targets
    )
