"""What streams and events need of a device, and how the device of a stream is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from tracegraph.runtime.errors import ConfigError

# Of the classes in ``stream.py``, which imports this file.
Stream: TypeAlias = Any
Event: TypeAlias = Any


class StreamBackend(Protocol):
    """The streams and events of a device that runs work asynchronously."""

    @property
    def context(self) -> int:
        """The driver's context of the device, which tells devices apart."""
        ...

    def find_handle(self, stream: Stream) -> int:
        """Returns the driver's handle of a stream.

        Raises:
            ConfigError: the stream is of another device.
        """
        ...

    def check_handle(self, handle: int) -> None:
        """Refuses what is no stream of this device.

        Raises:
            ConfigError: it is none.
        """
        ...

    def read_priority_range(self) -> tuple[int, int]:
        """Returns the least and the greatest priority; the greatest is the lower number."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Blocks the host until the stream's work is done."""
        ...

    def query(self, stream: Stream) -> bool:
        """True when the stream's work is done."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Records the event behind the stream's current work."""
        ...

    def wait(self, event: Event, stream: Stream) -> None:
        """Makes later work of the stream wait for the event."""
        ...

    def query_event(self, event: Event) -> bool:
        """True when the work before the event is done."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Blocks the host until the work before the event is done."""
        ...

    def measure(self, start: Event, end: Event) -> float:
        """Returns the milliseconds between two recorded events, once both are done."""
        ...

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the device is done."""
        ...


_finders: list[Callable[[Any], StreamBackend | None]] = []


def register_backend(find: Callable[[Any], StreamBackend | None]) -> None:
    """Sets how the backend of a device is found.

    Args:
        find: takes what the user named as a device, None for the one that captures use; returns
            None for the host.
    """
    _finders[:] = [find]


def find_backend(device: Any = None) -> StreamBackend | None:
    """Returns the backend of a device, None for the host.

    Args:
        device: a JAX device, its index, or None for the one that captures use.

    Raises:
        ConfigError: there is no such device.
    """
    return _finders[0](device) if _finders else None


def require_backend(device: Any, name: str) -> StreamBackend:
    """Returns the backend of a device that must be a GPU.

    Args:
        device: see `find_backend`.
        name: of the property or class that the user used.

    Raises:
        ConfigError: it is the host device.
    """
    backend = find_backend(device)
    if backend is not None:
        return backend
    raise ConfigError(
        f"`{name}` is used on the host device",
        where=name,
        why="a handle of the CUDA driver takes a GPU; the host device has no driver's streams",
        fix="run where JAX computes on a GPU, or pass the GPU as `device`",
        anchor="stream-handle",
    )


def check_device(stream: Stream, context: int) -> None:
    """Refuses a stream on another device than its own.

    Args:
        stream: the stream.
        context: of the device that is to use it.

    Raises:
        ConfigError: it was made for another device.
    """
    if stream.device is None:
        return
    backend = find_backend(stream.device)
    if backend is not None and backend.context == context:
        return
    raise ConfigError(
        f"{stream} is used on another device than its own",
        where=f"Stream(device={stream.device!r})",
        why="a stream of the driver belongs to one GPU",
        fix="make the stream for the device that computes, or leave `device` out",
        anchor="stream-handle",
    )
