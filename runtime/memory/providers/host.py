"""The host provider: segments in ordinary memory."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import Segment, SegmentSet

ALIGNMENT = 256
MEMINFO_PATH = pathlib.Path("/proc/meminfo")
CGROUP_LIMIT_PATH = pathlib.Path("/sys/fs/cgroup/memory.max")


class HostProvider:
    """Allocates NumPy-backed segments, aligned to 256 bytes. Safe from several threads.

    The system overcommits memory: a request for more than there is may succeed and end the
    process when the bytes are touched. So each request is compared with what is free first.

    Args:
        limit_bytes: the most that all segments together may take; None for what the machine has.

    Raises:
        ConfigError: the limit is negative.

    Example:
        >>> segment = HostProvider().allocate(4096)
        >>> segment.address % 256, segment.storage.shape, segment.storage.dtype
        (0, (4096,), dtype('uint8'))
    """

    name = "host"

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ConfigError(
                f"`limit_bytes` is {limit_bytes:,}",
                where="argument `limit_bytes` of HostProvider",
                why="a limit is a number of bytes",
                fix="pass zero or more, or None for all memory of the machine",
                anchor="config",
            )
        self._limit_bytes = limit_bytes
        self._segments = SegmentSet(self.name)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments in use."""
        return self._segments.nbytes

    def available_bytes(self) -> int:
        """Returns how many bytes could still be allocated."""
        reserved_bytes = self.reserved_bytes
        # The system counts segments that were never touched as free.
        available = min(_read_physical_bytes() - reserved_bytes, _read_free_bytes())
        if self._limit_bytes is not None:
            available = min(available, self._limit_bytes - reserved_bytes)
        return max(available, 0)

    def total_bytes(self) -> int:
        """Returns the bytes of the machine, or the limit if that is lower."""
        total_bytes = _read_physical_bytes()
        return total_bytes if self._limit_bytes is None else min(total_bytes, self._limit_bytes)

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment; its contents are undefined.

        Args:
            nbytes: its size.
            stream: ignored.

        Raises:
            OutOfMemoryError: there is not enough free memory.
        """
        del stream
        with self._segments.lock:
            free_bytes = self.available_bytes()
            if nbytes > free_bytes:
                raise make_memory_error(nbytes, free_bytes)
            try:
                room = np.empty(nbytes + ALIGNMENT, np.uint8)
            except MemoryError as error:
                raise make_memory_error(nbytes, free_bytes) from error
            offset = -room.ctypes.data % ALIGNMENT
            storage = room[offset : offset + nbytes]
            segment = Segment(room.ctypes.data + offset, nbytes, storage)
            self._segments.add(segment)
            return segment

    def free(self, segment: Segment) -> None:
        """Frees a segment; its memory is freed with the last array in it.

        Raises:
            InternalError: the segment was freed before, or comes from another provider.
        """
        self._segments.remove(segment)


def make_memory_error(wanted_bytes: int, free_bytes: int) -> OutOfMemoryError:
    """Returns the error of a request that is larger than what is free."""
    return OutOfMemoryError(
        f"cannot reserve {wanted_bytes:,} bytes of host memory",
        where=f"host provider: wanted {wanted_bytes:,} bytes, free {free_bytes:,} bytes",
        why="a graph keeps all of its buffers in memory of its own for as long as it lives",
        fix="donate the state (`donate_argnums`), capture a smaller batch, or drop unused graphs",
        anchor="out-of-memory",
    )


def _read_physical_bytes() -> int:
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT_PATH.read_text().strip()
    except OSError:
        return machine_bytes
    # A container without a limit says "max".
    return min(machine_bytes, int(limit)) if limit.isdigit() else machine_bytes


def _read_free_bytes() -> int:
    try:
        lines = MEMINFO_PATH.read_text().splitlines()
    except OSError:
        return _read_physical_bytes()
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _read_physical_bytes()
