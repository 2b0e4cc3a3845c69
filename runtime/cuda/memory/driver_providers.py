"""Segments straight from the CUDA driver: plain device memory, and the driver's own pool."""

from __future__ import annotations

from collections.abc import Callable

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import OwnedMemory, Segment, SegmentSet
from tracegraph.runtime.memory.sizes import format_size

KEEP_EVERYTHING = (1 << 64) - 1


class _DriverProvider:
    """What the providers over the driver have in common."""

    name = ""

    def __init__(self, driver: CudaDriver, context: int) -> None:
        self._driver, self._context = driver, context
        self._segments = SegmentSet(self.name)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments in use."""
        return self._segments.nbytes

    def available_bytes(self) -> int:
        """Returns the free bytes of the GPU; less may fit in one piece."""
        with self._driver.use_context(self._context):
            return self._driver.read_memory()[0]

    def total_bytes(self) -> int:
        """Returns the bytes of the GPU."""
        with self._driver.use_context(self._context):
            return self._driver.read_memory()[1]

    def free(self, segment: Segment) -> None:
        """Frees a segment and its memory.

        Raises:
            InternalError: the segment was freed before, or comes from another provider.
        """
        self._segments.remove(segment)
        segment.storage.close()

    def _make_memory_error(self, nbytes: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"cannot reserve {nbytes:,} bytes of GPU memory",
            where=f"{self.name} provider: wanted {nbytes:,} bytes, "
            f"free {self.available_bytes():,} of {format_size(self.total_bytes())}",
            why="this provider serves from what JAX and other processes leave of the GPU",
            fix="lower XLA_PYTHON_CLIENT_MEM_FRACTION, or use provider:jax, that shares JAX's pool",
            anchor="out-of-memory",
        )


class CudaProvider(_DriverProvider):
    """Allocates by cuMemAlloc. Safe from several threads, and while a thread captures.

    Freeing a segment waits for the work of the whole GPU, so nothing is freed that a running graph
    still uses.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
    """

    name = "cuda"

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment; its contents are undefined.

        Args:
            nbytes: its size, at least 1.
            stream: ignored.

        Raises:
            OutOfMemoryError: the GPU has no free piece of that size.
        """
        del stream
        with self._driver.use_context(self._context):
            try:
                address = self._driver.allocate_memory(nbytes)
            except OutOfMemoryError as error:
                raise self._make_memory_error(nbytes) from error
        storage = OwnedMemory(_free_memory, self._driver, self._context, address)
        segment = Segment(address, nbytes, storage)
        self._segments.add(segment)
        return segment


class CudaAsyncProvider(_DriverProvider):
    """Allocates from the driver's own pool, in stream order.

    A segment may be used by work that is enqueued on its stream after the allocation, and returns
    to the pool after the work that its stream has when it is freed. The pool keeps what is free.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        ordinal: of the GPU, as the driver numbers them.
        find_stream: returns the driver's handle of a stream's number.
    """

    name = "cuda_async"

    def __init__(
        self, driver: CudaDriver, context: int, ordinal: int, find_stream: Callable[[int], int]
    ) -> None:
        super().__init__(driver, context)
        self._find_stream = find_stream
        self._pool = driver.find_memory_pool(ordinal)
        driver.keep_in_memory_pool(self._pool, KEEP_EVERYTHING)

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment; its contents are undefined.

        Args:
            nbytes: its size, at least 1.
            stream: number of the stream on which it is used and freed.

        Raises:
            OutOfMemoryError: the GPU has too little memory.
        """
        handle = self._find_stream(stream)
        with self._driver.use_context(self._context):
            try:
                address = self._driver.allocate_async(nbytes, handle)
            except OutOfMemoryError as error:
                raise self._make_memory_error(nbytes) from error
        storage = OwnedMemory(_free_async, self._driver, self._context, address, handle)
        segment = Segment(address, nbytes, storage)
        self._segments.add(segment)
        return segment

    def trim(self) -> None:
        """Returns what is free in the driver's pool to the GPU."""
        with self._driver.use_context(self._context):
            self._driver.trim_memory_pool(self._pool, 0)


def _free_memory(driver: CudaDriver, context: int, address: int) -> None:
    with driver.use_context(context):
        driver.free_memory(address)


def _free_async(driver: CudaDriver, context: int, address: int, stream: int) -> None:
    with driver.use_context(context):
        driver.free_async(address, stream)
