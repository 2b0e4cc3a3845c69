"""Staging: host arrays reach the GPU through page-locked memory, without blocking the host.

The driver copies ordinary host memory only after it has been staged, and the caller may change its
array as soon as the call returns. So the bytes are copied into page-locked memory at once, and from
there to the GPU by a copy that the stream does in its turn. Large arrays go piece by piece: while
one is on its way, the next is staged. An array that `pin_memory` made with ``non_blocking=True`` is
not staged: its owner promised not to change it before the copy is over.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pinned.host_block import HostBlock

SMALLEST_CHUNK_BYTES = 1 << 16
LARGEST_CHUNK_BYTES = 1 << 26


class Staging:
    """Copies host arrays to one GPU. Safe from several threads.

    Args:
        driver: the CUDA driver.
        stream: handle of the stream that the copies are put on.
        allocator: of page-locked memory.
    """

    def __init__(self, driver: CudaDriver, stream: int, allocator: CachingHostAllocator) -> None:
        self._driver, self._stream, self.allocator = driver, stream, allocator

    @property
    def reserved_bytes(self) -> int:
        """Page-locked bytes held, pinned arrays included."""
        return self.allocator.reserved_bytes

    def copy(self, array: np.ndarray[Any, Any], address: int) -> None:
        """Enqueues a copy of a contiguous array to a device address; returns at once.

        Args:
            array: host memory, C-contiguous; the caller may change it afterwards, unless it is
                pinned with ``non_blocking=True``.
            address: of at least as many bytes of device memory.

        Raises:
            CaptureError: the stream is being captured, and the array is not pinned.
            OutOfMemoryError: the machine has no more page-locked memory.
        """
        if not array.nbytes:
            return
        source = array.ctypes.data
        block = self.allocator.find_source(source, self._stream)
        if block is not None:
            self._copy_block(block, source, address, array.nbytes)
            return
        for start in range(0, array.nbytes, LARGEST_CHUNK_BYTES):
            nbytes = min(array.nbytes - start, LARGEST_CHUNK_BYTES)
            self._copy_piece(source + start, address + start, nbytes)

    def _copy_piece(self, source: int, target: int, nbytes: int) -> None:
        chunk = self.allocator.allocate(max(nbytes, SMALLEST_CHUNK_BYTES), self._stream)
        try:
            ctypes.memmove(chunk.address, source, nbytes)
            self._copy_block(chunk, chunk.address, target, nbytes)
        finally:
            self.allocator.free(chunk)

    def _copy_block(self, block: HostBlock, source: int, target: int, nbytes: int) -> None:
        self._driver.copy_async(target, source, nbytes, self._stream)
        try:
            self.allocator.record_event(block, self._stream)
        except BaseException:
            # No event knows of the copy; the block may serve again only after it.
            self._driver.synchronize_stream(self._stream)
            raise
