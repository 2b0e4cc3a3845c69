"""ExternalStream: a stream of the driver that another library made."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.streams.stream import Stream
from tracegraph.runtime.streams.stream_backend import require_backend
from tracegraph.runtime.streams.stream_errors import make_handle_error


class ExternalStream(Stream):
    """A stream that another library made, and keeps alive for as long as this object is used.

    Its work and that of captured functions are ordered as for every stream: by `wait_stream`,
    events, and `with tg.stream(s)`.

    Args:
        stream: an object with `__cuda_stream__`, as of cuda.core, PyTorch or CuPy, or the driver's
            handle as an int.
        device: its GPU: a JAX device, an index, or None for the one that captures use.

    Raises:
        ConfigError: the device is the host, or the handle is that of no stream on the device.

    Example:
        >>> try:
        ...     tg.ExternalStream("cuda:0")
        ... except tg.ConfigError as error:
        ...     print(error.what)
        'cuda:0' is not a stream
    """

    def __init__(self, stream: Any, device: Any = None) -> None:
        super().__init__(device)
        handle = _read_handle(stream)
        require_backend(device, "ExternalStream").check_handle(handle)
        self.given_handle = handle

    def __repr__(self) -> str:
        return f"ExternalStream({self.given_handle:#x}, number={self.number})"


def _read_handle(stream: Any) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    given = stream
    if protocol is not None:
        version, given = protocol()
        if version != 0:
            raise make_handle_error(stream, f"its __cuda_stream__ has version {version}, not 0")
    if not isinstance(given, int) or isinstance(given, bool):
        raise make_handle_error(stream, "it is not an int and has no __cuda_stream__")
    return given
