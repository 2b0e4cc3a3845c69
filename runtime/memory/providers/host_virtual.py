"""The host provider with addresses apart from memory, for expandable segments."""

from __future__ import annotations

import ctypes
import mmap
import sys

from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.memory.providers.host import HostProvider, make_memory_error

GRANULARITY_BYTES = 2 << 20
# Before Python 3.13 `mmap` does not name the flag. Linux refuses more than it has without it.
NO_RESERVE = 0x4000 if sys.platform.startswith("linux") else 0
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE


class HostVirtualProvider(HostProvider):
    """A VirtualProvider over ordinary memory. Safe from several threads.

    The system backs an address with memory when it is first touched. So `map` only counts, and
    refuses what a device would refuse; `unmap` frees the memory.

    Args:
        limit_bytes: the most that all memory together may take; None for what the machine has.

    Example:
        >>> provider = HostVirtualProvider()
        >>> address = provider.reserve(1 << 30)
        >>> provider.map(address, 2 << 20)
        >>> provider.reserved_bytes
        2097152
        >>> provider.unmap(address, 2 << 20)
        >>> provider.release(address, 1 << 30)
    """

    name = "host"

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self._ranges: dict[int, mmap.mmap] = {}
        self._mapped: dict[int, int] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments, and of all addresses that are mapped."""
        with self._segments.lock:
            return super().reserved_bytes + sum(self._mapped.values())

    def granularity_bytes(self) -> int:
        """Returns the bytes that addresses and sizes below are multiples of."""
        return GRANULARITY_BYTES

    def reserve(self, nbytes: int) -> int:
        """Returns the start of a range of addresses that nothing else gets.

        Raises:
            OutOfMemoryError: the system has no such range of addresses left.
        """
        try:
            room = mmap.mmap(-1, nbytes + GRANULARITY_BYTES, flags=_FLAGS)
        except OSError as error:
            raise make_memory_error(nbytes, self.available_bytes()) from error
        start = _read_address(room)
        address = start + -start % GRANULARITY_BYTES
        with self._segments.lock:
            self._ranges[address] = room
        return address

    def map(self, address: int, nbytes: int) -> None:
        """Maps fresh memory at reserved addresses.

        Raises:
            OutOfMemoryError: there is not enough memory.
            InternalError: memory is there already.
        """
        with self._segments.lock:
            free_bytes = self.available_bytes()
            if nbytes > free_bytes:
                raise make_memory_error(nbytes, free_bytes)
            if self._list_mapped(address, nbytes):
                raise _make_range_error("map", address, nbytes)
            self._mapped[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps the memory of one `map`, or of several in a row.

        Raises:
            InternalError: it is not just what is mapped there.
        """
        with self._segments.lock:
            starts = self._list_mapped(address, nbytes)
            if sum(self._mapped[start] for start in starts) != nbytes or min(starts) != address:
                raise _make_range_error("unmap", address, nbytes)
            for start in starts:
                del self._mapped[start]
            room = self._find_range(address)
            room.madvise(mmap.MADV_DONTNEED, address - _read_address(room), nbytes)

    def release(self, address: int, nbytes: int) -> None:
        """Releases a range that `reserve` returned.

        Raises:
            InternalError: memory is still mapped there, or the range is unknown.
        """
        with self._segments.lock:
            if address not in self._ranges or self._list_mapped(address, nbytes):
                raise _make_range_error("release", address, nbytes)
            del self._ranges[address]

    def _list_mapped(self, address: int, nbytes: int) -> list[int]:
        return [
            start
            for start, size in self._mapped.items()
            if start < address + nbytes and address < start + size
        ]

    def _find_range(self, address: int) -> mmap.mmap:
        return self._ranges[max(start for start in self._ranges if start <= address)]


def _read_address(room: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(room))


def _make_range_error(what: str, address: int, nbytes: int) -> InternalError:
    return InternalError(
        f"cannot {what} {nbytes:,} bytes at {address:#x}",
        where="host provider",
        why="a range is reserved, mapped, unmapped and released once each, in this order",
    )
