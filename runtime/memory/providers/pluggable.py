"""Segments from a library of the user: two C functions, one that allocates and one that frees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import OwnedMemory, Segment, SegmentSet

_ALLOCATE_TYPES = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE_TYPES = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class PluggableAllocator:
    """Two functions of a shared library that allocate and free memory of a device.

    Their signatures in C are those of the CUDA semantics::

        void* allocate(ssize_t size, int device, cudaStream_t stream);
        void free(void* pointer, ssize_t size, int device, cudaStream_t stream);

    The library stays loaded until the last memory that it allocated is freed. It is called without
    Python's lock, from any thread, in finalisers too.

    Args:
        path_to_so: file of the library.
        alloc_fn_name: name of the function that allocates; it returns NULL where it cannot.
        free_fn_name: name of the function that frees.

    Raises:
        ConfigError: there is no such library, or no such function in it.
    """

    def __init__(
        self, path_to_so: str | os.PathLike[str], alloc_fn_name: str, free_fn_name: str
    ) -> None:
        self.path = os.fspath(path_to_so)
        library = _load(self.path)
        self._allocate = _find(library, self.path, "alloc_fn_name", alloc_fn_name)
        self._allocate.argtypes, self._allocate.restype = _ALLOCATE_TYPES, ctypes.c_void_p
        self._free = _find(library, self.path, "free_fn_name", free_fn_name)
        self._free.argtypes, self._free.restype = _FREE_TYPES, None

    def __repr__(self) -> str:
        return f"PluggableAllocator({self.path!r})"

    def make_provider(
        self,
        device: int,
        find_stream: Callable[[int], int],
        read_memory: Callable[[], tuple[int, int]],
    ) -> PluggableProvider:
        """Returns a provider of segments of one device.

        Args:
            device: its index, as the library gets it.
            find_stream: returns the driver's handle of a stream's number, as the library gets it.
            read_memory: returns the free and the total bytes of the device.
        """
        functions = (self._allocate, self._free)
        return PluggableProvider(functions, device, find_stream, read_memory)


class PluggableProvider:
    """Allocates with the functions of a PluggableAllocator. See `make_provider`."""

    name = "pluggable"

    def __init__(
        self,
        functions: tuple[Any, Any],
        device: int,
        find_stream: Callable[[int], int],
        read_memory: Callable[[], tuple[int, int]],
    ) -> None:
        self._allocate, self._free = functions
        self._device, self._find_stream, self._read_memory = device, find_stream, read_memory
        self._segments = SegmentSet(self.name)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments in use."""
        return self._segments.nbytes

    def available_bytes(self) -> int:
        """Returns the free bytes of the device; the library may have other limits."""
        return self._read_memory()[0]

    def total_bytes(self) -> int:
        """Returns the bytes of the device."""
        return self._read_memory()[1]

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment; its contents are what the library left there.

        Args:
            nbytes: its size, at least 1.
            stream: number of the stream on which it is used and freed.

        Raises:
            OutOfMemoryError: the library returned NULL.
        """
        handle = self._find_stream(stream)
        address = self._allocate(nbytes, self._device, handle)
        if not address:
            raise OutOfMemoryError(
                f"the pluggable allocator returned NULL for {nbytes:,} bytes",
                where=f"{self._allocate.__name__}({nbytes}, {self._device}, {handle:#x})",
                why="NULL says that there is no memory, and there is no other provider to try",
                fix="free arrays, or find out in the library why it refuses",
                anchor="out-of-memory",
            )
        storage = OwnedMemory(self._free, address, nbytes, self._device, handle)
        segment = Segment(address, nbytes, storage)
        self._segments.add(segment)
        return segment

    def free(self, segment: Segment) -> None:
        """Frees a segment, by the library, at once.

        Raises:
            InternalError: the segment was freed before, or comes from another provider.
        """
        self._segments.remove(segment)
        segment.storage.close()


def _load(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ConfigError(
            f"cannot load the library {path!r}",
            where=f"argument `path_to_so` of PluggableAllocator: {error}",
            why="a pluggable allocator is a shared library with two C functions",
            fix="compile it with `cc -shared -fPIC`, and pass its path with a slash in it",
            anchor="pluggable-allocator",
        ) from error


def _find(library: ctypes.CDLL, path: str, argument: str, name: str) -> Any:
    try:
        # Not as an attribute, which would be shared with others who set other types.
        return library[name]
    except AttributeError as error:
        raise ConfigError(
            f"the library {path!r} has no function {name!r}",
            where=f"argument `{argument}` of PluggableAllocator",
            why="the function is looked up by its name as C sees it",
            fix='declare it `extern "C"` where it is compiled as C++, and check its spelling',
            anchor="pluggable-allocator",
        ) from error
