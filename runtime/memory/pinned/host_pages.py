"""Page-locked host memory: where the segments of the caching host allocator come from."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Protocol

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.segment import Segment

# Segments cut from the reserve have this alignment, which is the least of a driver's.
ALIGNMENT = 512


class HostPageProvider(Protocol):
    """Page-locks host memory, so that a device copies from it without the host's help."""

    name: str

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh page-locked segment, or raises OutOfMemoryError."""
        ...

    def free(self, segment: Segment) -> None:
        """Frees a segment that ``allocate`` returned; no copy may be reading it."""
        ...

    def register(self, segment: Segment) -> None:
        """Page-locks ordinary memory."""
        ...

    def unregister(self, segment: Segment) -> None:
        """Ends what ``register`` began; no copy may be reading the segment."""
        ...


class PlainPages:
    """Ordinary memory under the same protocol, for a device that reads it anyway.

    Example:
        >>> pages = PlainPages()
        >>> segment = pages.allocate(4096)
        >>> segment.nbytes
        4096
        >>> pages.free(segment)
    """

    name = "host"

    def __init__(self, provider: HostProvider | None = None) -> None:
        self._provider = provider or HostProvider()

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh segment of ordinary memory.

        Raises:
            OutOfMemoryError: there is not enough free memory.
        """
        return self._provider.allocate(nbytes)

    def free(self, segment: Segment) -> None:
        """Frees a segment that ``allocate`` returned."""
        self._provider.free(segment)

    def register(self, segment: Segment) -> None:
        """Does nothing: no device needs the pages locked."""

    def unregister(self, segment: Segment) -> None:
        """Does nothing, see `register`."""


class PageSource:
    """Allocates segments in the way that the options say, and frees them in the same way.

    Args:
        provider: page-locks memory.
        config: ``pinned_use_cuda_host_register``, ``pinned_num_register_threads`` and
            ``pinned_reserve_segment_bytes`` are read; may be replaced at any time.
    """

    def __init__(self, provider: HostPageProvider, config: AllocatorConfig) -> None:
        self.provider, self.config = provider, config
        self._lock = threading.Lock()
        self._registered: set[Segment] = set()
        self._reserve: Segment | None = None
        self._reserve_used_bytes = 0

    def take_reserved(self, nbytes: int) -> Segment | None:
        """Returns the next piece of the reserve, None when it is used up or not configured.

        The reserve is page-locked at the first call; its pieces are never freed alone.

        Raises:
            OutOfMemoryError: there is no memory for the reserve.
        """
        with self._lock:
            reserve = self._open_reserve()
            if reserve is None or self._reserve_used_bytes + nbytes > reserve.nbytes:
                return None
            address = reserve.address + self._reserve_used_bytes
            self._reserve_used_bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
            return Segment(address, nbytes, reserve)

    def _open_reserve(self) -> Segment | None:
        wanted_bytes = self.config.pinned_reserve_segment_bytes
        if self._reserve is None and wanted_bytes:
            self._reserve = self.allocate(wanted_bytes)
        return self._reserve

    def is_reserved(self, segment: Segment) -> bool:
        """True for a piece of the reserve."""
        return self._reserve is not None and segment.storage is self._reserve

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh page-locked segment.

        Raises:
            OutOfMemoryError: the machine has no more memory that can be locked.
        """
        if not self.config.pinned_use_cuda_host_register:
            return self.provider.allocate(nbytes)
        segment = reserve_pages(nbytes)
        touch_pages(segment, self.config.pinned_num_register_threads)
        self.provider.register(segment)
        self._registered.add(segment)
        return segment

    def free(self, segment: Segment) -> None:
        """Frees a segment that ``allocate`` returned."""
        if segment not in self._registered:
            self.provider.free(segment)
            return
        self._registered.discard(segment)
        self.provider.unregister(segment)

    def close(self) -> None:
        """Frees the reserve; no piece of it may be in use any more."""
        if self._reserve is not None:
            self.free(self._reserve)
        self._reserve = None


def reserve_pages(nbytes: int) -> Segment:
    """Returns ordinary zeroed memory that begins on a page.

    Raises:
        OutOfMemoryError: the system has too little memory.

    Example:
        >>> reserve_pages(100).address % mmap.PAGESIZE
        0
    """
    try:
        pages = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemoryError(
            f"cannot reserve {nbytes:,} bytes of host memory",
            where=f"memory to be registered with the driver: {error}",
            why="registered memory is ordinary memory of this process first",
            fix="pin smaller arrays, or drop pinned arrays that are no longer needed",
            anchor="pinned",
        ) from error
    return Segment(ctypes.addressof(ctypes.c_char.from_buffer(pages)), nbytes, pages)


def touch_pages(segment: Segment, thread_count: int) -> None:
    """Writes to every page, so that the system allocates them now and the lock is quick.

    Args:
        segment: fresh memory, which becomes zero.
        thread_count: how many threads share the work; one does it in this thread.
    """
    page_count = -(-segment.nbytes // mmap.PAGESIZE)
    if thread_count == 1 or page_count < thread_count:
        ctypes.memset(segment.address, 0, segment.nbytes)
        return
    share_bytes = -(-page_count // thread_count) * mmap.PAGESIZE
    threads = [
        threading.Thread(
            target=ctypes.memset,
            args=(segment.address + start, 0, min(share_bytes, segment.nbytes - start)),
        )
        for start in range(0, segment.nbytes, share_bytes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
