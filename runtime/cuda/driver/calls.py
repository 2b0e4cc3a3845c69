"""Calls of the CUDA driver, checked: what every group of calls in this folder builds on.

All handles and addresses are plain ints. A call that fails raises, with its name, its arguments and
CUDA's own name and text of the failure. Nothing here imports the bindings: ``driver.py`` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import LaunchShape
from tracegraph.runtime.errors import REPORT_FIX, CudaError, OutOfMemoryError

_FIX_LOST = "restart the process, its GPU context is lost; compute-sanitizer finds the kernel"
_FIX_OTHER_GPU = "capture again on this GPU: the kernels were compiled for another one"
_FIX_DRIVER = "install a newer NVIDIA driver, then check with: nvidia-smi"
_FIX_NO_GPU = "run on a machine with an NVIDIA GPU; check CUDA_VISIBLE_DEVICES and nvidia-smi"
_FIX_MEMORY = (
    "capture fewer or smaller graphs, donate state, or lower XLA_PYTHON_CLIENT_MEM_FRACTION"
)
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_FIXES = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": _FIX_LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _FIX_LOST,
    "CUDA_ERROR_INVALID_PC": _FIX_LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _FIX_LOST,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _FIX_LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _FIX_LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _FIX_LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _FIX_LOST,
    "CUDA_ERROR_ASSERT": _FIX_LOST,
    "CUDA_ERROR_ECC_UNCORRECTABLE": _FIX_LOST,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _FIX_OTHER_GPU,
    "CUDA_ERROR_INVALID_IMAGE": _FIX_OTHER_GPU,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _FIX_DRIVER,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": _FIX_DRIVER,
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": _FIX_DRIVER,
    "CUDA_ERROR_NO_DEVICE": _FIX_NO_GPU,
    "CUDA_ERROR_INVALID_DEVICE": _FIX_NO_GPU,
    "CUDA_ERROR_STUB_LIBRARY": _FIX_DRIVER,
}


class Port(enum.IntEnum):
    """When an edge lets its second node start; the numbers are CUDA's ports of kernel nodes.

    With the two early ones the second kernel waits for the first itself.
    """

    COMPLETE = 0  # the first has completed
    PROGRAMMATIC = 1  # every block of the first has ended
    LAUNCH_ORDER = 2  # every block of the first has begun


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """What a kernel node of a graph launches.

    Attributes:
        function: handle of the kernel's code, see `KernelLoader`.
        shape: threads and dynamic shared memory.
        parameters: the bytes of each parameter, in order: 8 of an address, 128 of a tensor map, or
            those of a value.
    """

    function: int
    shape: LaunchShape
    parameters: tuple[bytes, ...]

    def __str__(self) -> str:
        shape = self.shape
        sizes = ", ".join(str(len(parameter)) for parameter in self.parameters)
        return (
            f"function={self.function:#x}, grid={shape.grid}, block={shape.block}, "
            f"cluster={shape.cluster}, shared_bytes={shape.shared_bytes}, "
            f"parameter bytes=({sizes})"
        )


@dataclasses.dataclass(frozen=True)
class CopyRange:
    """What a memcpy node of a graph copies, from device memory to device memory."""

    target_address: int
    source_address: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class CopyRows:
    """Rows of bytes that are copied between two places of device memory.

    Attributes:
        target_address: of the first row.
        target_pitch: bytes from one row to the next.
        source_address: as of the target.
        source_pitch: as of the target.
        nbytes: of each row.
        count: how many.
    """

    target_address: int
    target_pitch: int
    source_address: int
    source_pitch: int
    nbytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class FillRange:
    """What a memset node of a graph sets: ``count`` elements of 1, 2 or 4 bytes to one value."""

    target_address: int
    value: int
    element_bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Condition:
    """What a conditional node of a graph does with the value of a handle.

    Attributes:
        handle: see `GraphCalls.create_condition`.
        construct: how the value is used.
        body_count: how many graphs are inside of the node.
    """

    handle: int
    construct: Construct
    body_count: int


class DriverCalls:
    """Base of the groups of calls.

    Args:
        api: the module ``cuda.bindings.driver``.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        # In a process that was forked from this one: its number, see `note_fork`.
        self._forks: list[int] = []
        _groups.add(self)

    def _call(self, name: str, *arguments: Any, shown: object = None) -> Any:
        """Calls a function of the driver, and returns its one result, if it has one.

        Args:
            name: as ``cuStreamCreate``.
            arguments: as the bindings take them.
            shown: what an error says of the arguments, or a function that returns it; by default
                themselves.
        """
        results = getattr(self._api, name)(*arguments)
        if results[0]:
            shown = shown() if callable(shown) else shown
            self._raise_call_error(results[0], name, arguments if shown is None else shown)
        if len(results) == 2:
            return results[1]
        return results[1:]

    @contextlib.contextmanager
    def _allow_during_capture(self) -> Iterator[None]:
        """Lets this thread make calls that no stream is part of while it captures a library."""
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    def _get_device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _is_done(self, name: str, handle: int) -> bool:
        """Calls one of the functions that say whether work is done."""
        result = getattr(self._api, name)(handle)[0]
        if result == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result:
            self._raise_call_error(result, name, (handle,))
        return True

    def _raise_call_error(self, result: Any, name: str, arguments: object) -> NoReturn:
        error_name = self._read_text("cuGetErrorName", result) or f"error {int(result)}"
        text = self._read_text("cuGetErrorString", result) or "the driver has no text for it"
        where = f"{name}({format_arguments(arguments)})"
        if self._forks:
            raise make_fork_error(where)
        raise make_call_error(error_name, name, where, text)

    def _read_text(self, name: str, result: Any) -> str:
        error, text = getattr(self._api, name)(result)
        return "" if error or text is None else text.decode()


_groups: weakref.WeakSet[DriverCalls] = weakref.WeakSet()


def note_fork() -> None:
    """Notes in a new process that what it was forked from had started CUDA.

    CUDA does not promise that a call fails there, so launches of graphs look at this.
    """
    for group in list(_groups):
        group._forks.append(os.getpid())


os.register_at_fork(after_in_child=note_fork)


def make_fork_error(where: str) -> CudaError:
    """Returns the error of a call in a process that was forked from one that had started CUDA.

    Args:
        where: the call with its arguments.
    """
    return CudaError(
        "a forked process uses CUDA, which the process that it was forked from had started",
        where=f"{where}, in process {os.getpid()}",
        why="CUDA works in the process that has started it, and in none that is forked from it",
        fix='start processes with multiprocessing.get_context("spawn"), or fork before JAX is used',
        anchor="cuda-call",
    )


def make_call_error(
    error_name: str, name: str, where: str, why: str
) -> CudaError | OutOfMemoryError:
    """Returns the error of a failed call.

    Args:
        error_name: as ``CUDA_ERROR_INVALID_VALUE``.
        name: of the function.
        where: the call with its arguments.
        why: CUDA's text.

    Example:
        >>> error = make_call_error("CUDA_ERROR_INVALID_VALUE", "cuFree", "cuFree(0)", "bad")
        >>> error.what
        'CUDA_ERROR_INVALID_VALUE from cuFree'
    """
    what = f"{error_name} from {name}"
    if error_name == _OUT_OF_MEMORY:
        return OutOfMemoryError(what, where=where, why=why, fix=_FIX_MEMORY, anchor="out-of-memory")
    fix = _FIXES.get(error_name, REPORT_FIX)
    return CudaError(what, where=where, why=why, fix=fix, anchor="cuda-call")


def format_arguments(arguments: object) -> str:
    """Returns arguments as an error shows them: handles in hexadecimal, images by their size.

    Example:
        >>> format_arguments((4096, 3, b"ab", [1, 2]))
        '0x1000, 3, 2 bytes, [1, 2]'
    """
    if not isinstance(arguments, tuple):
        return str(arguments)
    return ", ".join(_format_argument(argument) for argument in arguments)


def _format_argument(argument: object) -> str:
    if isinstance(argument, bytes) and len(argument) != argument.find(b"\0") + 1:
        return f"{len(argument)} bytes"
    if type(argument) is int and argument >= 4096:
        return hex(argument)
    return repr(argument)
