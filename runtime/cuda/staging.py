"""Staging: host arrays reach the GPU through page-locked memory, without blocking the host.

The driver copies ordinary host memory only after it has been staged, and the caller may change its
array as soon as the call returns. So the bytes are copied into page-locked memory at once, and from
there to the GPU by a copy that the stream does in its turn. Large arrays go piece by piece: while
one is on its way, the next is staged.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref
from typing import Any

import numpy as np

SMALLEST_CHUNK_BYTES = 1 << 16
LARGEST_CHUNK_BYTES = 1 << 26


class _Chunk:
    """A piece of page-locked memory, free again once its event is over."""

    __slots__ = ("address", "event", "nbytes")

    def __init__(self, address: int, nbytes: int, event: int) -> None:
        self.address, self.nbytes, self.event = address, nbytes, event


class Staging:
    """Copies host arrays to one GPU. Safe from several threads.

    Args:
        driver: the CUDA driver.
        stream: handle of the stream that the copies are put on.
    """

    def __init__(self, driver: Any, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._chunks: collections.deque[_Chunk] = collections.deque()
        self._lock = threading.Lock()
        weakref.finalize(self, _release, driver, self._chunks).atexit = False

    @property
    def reserved_bytes(self) -> int:
        """Page-locked bytes held."""
        with self._lock:
            return sum(chunk.nbytes for chunk in self._chunks)

    def copy(self, array: np.ndarray[Any, Any], address: int) -> None:
        """Enqueues a copy of a contiguous array to a device address; returns at once.

        Args:
            array: host memory, C-contiguous; the caller may change it afterwards.
            address: of at least as many bytes of device memory.

        Raises:
            OutOfMemoryError: the machine has no more page-locked memory.
        """
        if not array.nbytes:
            return
        with self._lock:
            for start in range(0, array.nbytes, LARGEST_CHUNK_BYTES):
                nbytes = min(array.nbytes - start, LARGEST_CHUNK_BYTES)
                self._copy_piece(array.ctypes.data + start, address + start, nbytes)

    def _copy_piece(self, source: int, target: int, nbytes: int) -> None:
        chunk = self._take(nbytes)
        # Known to the finaliser from now on, whatever fails.
        self._chunks.append(chunk)
        ctypes.memmove(chunk.address, source, nbytes)
        self._driver.copy_async(target, chunk.address, nbytes, self._stream)
        try:
            self._driver.record_event(chunk.event, self._stream)
        except BaseException:
            # The event does not know of the copy; the chunk may serve again only after it.
            self._driver.synchronize_stream(self._stream)
            raise

    def _take(self, nbytes: int) -> _Chunk:
        """Returns the oldest chunk that is big enough and free, or a new one."""
        for chunk in self._chunks:
            if chunk.nbytes >= nbytes and self._driver.query_event(chunk.event):
                self._chunks.remove(chunk)
                return chunk
        size = max(SMALLEST_CHUNK_BYTES, 1 << (nbytes - 1).bit_length())
        event = self._driver.create_event(timing=False, blocking=False)
        try:
            return _Chunk(self._driver.allocate_host(size), size, event)
        except BaseException:
            self._driver.destroy_event(event)
            raise


def _release(driver: Any, chunks: collections.deque[_Chunk]) -> None:
    for chunk in chunks:
        # A copy may still be reading it.
        driver.synchronize_event(chunk.event)
        driver.free_host(chunk.address)
        driver.destroy_event(chunk.event)
