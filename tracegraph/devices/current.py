"""The current device: JAX's default device, under the names of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.default_device import find_jax_device
from tracegraph.runtime.errors import CaptureError, ConfigError
from tracegraph.runtime.gpu_count import count_gpus
from tracegraph.runtime.streams.stream import is_tracing, thread_state


def is_available() -> bool:
    """Returns True when JAX computes on a GPU, or would; starts neither JAX nor CUDA.

    So a process can ask and fork afterwards. Without a GPU captures use the host device.

    Example:
        >>> tg.is_available() == (tg.device_count() > 0)
        True
    """
    return device_count() > 0


def device_count() -> int:
    """Returns how many GPUs JAX computes on, or would; starts neither JAX nor CUDA.

    Where JAX has started, they are those of `jax.local_devices()`; before that, those that NVML
    and ``CUDA_VISIBLE_DEVICES`` promise. It is 0 where JAX computes on the CPU; `device(0)` is the
    host device there.
    """
    return count_gpus()


def current_device() -> int:
    """Returns the index of this thread's current device: JAX's default device.

    The index is that of `jax.local_devices()`, as everywhere in tracegraph.

    Raises:
        ConfigError: JAX's default device is of another platform than `jax.local_devices()`.

    Example:
        >>> with tg.device(0):
        ...     tg.current_device()
        0
    """
    found, local = find_jax_device(), jax.local_devices()
    if found in local:
        return local.index(found)
    raise ConfigError(
        f"the current device, {found}, has no index",
        where=f"{locate_caller()}, current_device()",
        why=f"jax.default_device has chosen it; {', '.join(map(str, local))} have an index",
        fix="use the device itself: jax.config.jax_default_device",
        anchor="device",
    )


def set_device(device: Any) -> None:
    """Makes a device this thread's current one: prefer `with tg.device(i)`.

    It sets `jax.default_device`, for this thread alone. A with-block around it ends it.

    Args:
        device: a JAX device, or the index of one; None changes nothing.

    Raises:
        ConfigError: there is no such device.
        CaptureError: a function is being captured on this thread.

    Example:
        >>> tg.set_device(0)
        >>> tg.current_device()
        0
    """
    jax_device = _find_target(device, "set_device")
    # JAX sets a thread's default only by a with-block. This one is never left.
    _choose(jax_device).__enter__()


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Runs the body of a with-block with a device as the current one, as `jax.default_device` does.

    New arrays are made on it, and captured functions that are called inside use it.

    Args:
        device: a JAX device, or the index of one; None changes nothing.

    Raises:
        ConfigError: there is no such device.
        CaptureError: a function is being captured on this thread.

    Example:
        >>> with tg.device(0):
        ...     x = jnp.ones(3)
        >>> x.devices() == {jax.local_devices()[0]}
        True
    """
    if device is None:
        yield
        return
    with _choose(_find_target(device, "device")):
        yield


@contextlib.contextmanager
def device_of(array: jax.Array) -> Iterator[None]:
    """Runs the body of a with-block with the device of an array as the current one.

    Args:
        array: a `jax.Array` on one device.

    Raises:
        ConfigError: it is not a `jax.Array`, or on several devices.
        CaptureError: a function is being captured on this thread.

    Example:
        >>> x = jnp.ones(3)
        >>> with tg.device_of(x):
        ...     y = jnp.zeros(3)
        >>> y.devices() == x.devices()
        True
    """
    with _choose(_find_target(_find_only_device(array), "device_of")):
        yield


def _find_only_device(array: Any) -> Any:
    if isinstance(array, Tracer):
        # It has no device before the program runs; the capture is of the current one.
        return find_jax_device()
    if not isinstance(array, jax.Array):
        what = f"`array` is a {type(array).__name__}"
    elif len(array.devices()) > 1:
        what = f"`array` is on {len(array.devices())} devices"
    else:
        return next(iter(array.devices()))
    raise ConfigError(
        what,
        where=f"{locate_caller()}, argument `array` of device_of()",
        why="the current device is one device, that of a jax.Array",
        fix="name the device: with tg.device(0)",
        anchor="device",
    )


def _find_target(device: Any, call: str) -> Any:
    """Returns the JAX device, if it may become the current one."""
    found = find_jax_device(device)
    if not is_tracing() or found == find_jax_device():
        return found
    raise CaptureError(
        f"{call} changes the current device to {found} while a function is being captured",
        where=f"{locate_caller()}, capture of `{thread_state.tracing[-1]}`",
        why="a graph's buffers and kernels belong to one device, the current one of the call",
        fix="write `with tg.device(i):` around the call of the captured function",
        anchor="set-device",
    )


def _choose(jax_device: Any) -> contextlib.AbstractContextManager[None]:
    """Returns what sets JAX's default device.

    The first one is JAX's default without being set. Were it set, JAX would take that for another
    setting, and trace and compile again what it has.
    """
    return jax.default_device(None if jax_device == jax.local_devices()[0] else jax_device)
