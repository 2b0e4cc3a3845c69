"""The JAX provider: segments are arrays of JAX, so one pool of device memory serves both."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_bytes
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import Segment, SegmentSet
from tracegraph.runtime.memory.waiting import may_wait


class JaxProvider:
    """Allocates segments as ``uint8`` arrays of JAX, aligned to 256 bytes.

    JAX reuses freed memory at once, because its next user computes on JAX's stream, after all
    that is there already. Graphs are launched there too. A segment for another stream is the one
    exception: that stream waits for JAX's when the segment comes from JAX, and JAX's stream waits
    for it when the segment is freed. Safe from several threads.

    Args:
        jax_device: a GPU of JAX.
        order: of its streams; None where only JAX's is used.
    """

    name = "jax"

    def __init__(self, jax_device: Any, order: JaxOrder | None = None) -> None:
        self._jax_device, self._order = jax_device, order
        self._segments = SegmentSet(self.name)
        # The streams' handles, of segments that are for another stream than JAX's.
        self._sides: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments in use."""
        return self._segments.nbytes

    def available_bytes(self) -> int:
        """Returns the free bytes of JAX's allocator; less may fit in one piece.

        It is 0 for an allocator that does not count, as with XLA_PYTHON_CLIENT_ALLOCATOR=platform.
        """
        statistics = self._jax_device.memory_stats() or {}
        return statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0)

    def total_bytes(self) -> int:
        """Returns the most that JAX's allocator may take; 0 where it does not count."""
        return (self._jax_device.memory_stats() or {}).get("bytes_limit", 0)

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment; its contents are undefined.

        Args:
            nbytes: its size.
            stream: number of the stream on which it is used; 0 is JAX's.

        Raises:
            OutOfMemoryError: JAX's allocator cannot grow by that much.
        """
        try:
            order = self._order if may_wait() else None
            array = allocate_bytes(nbytes, self._jax_device, order)
            address = array.unsafe_buffer_pointer()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self._make_memory_error(nbytes) from error
        segment = Segment(address, nbytes, array)
        if stream and self._order is not None:
            # What JAX had there before may still be read.
            side = self._order.find_handle(stream)
            self._order.make_wait(side, self._order.stream)
            self._sides[segment] = side
        self._segments.add(segment)
        return segment

    def free(self, segment: Segment) -> None:
        """Frees a segment; its memory is freed with its last holder.

        Raises:
            InternalError: the segment was freed before, or comes from another provider.
        """
        self._segments.remove(segment)
        side = self._sides.pop(segment, 0)
        if side and self._order is not None:
            self._order.make_wait(self._order.stream, side)

    def _make_memory_error(self, nbytes: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"cannot reserve {nbytes:,} bytes of GPU memory",
            where=f"jax provider on {self._jax_device}: wanted {nbytes:,} bytes, "
            f"free {self.available_bytes():,} bytes",
            why="a graph keeps all of its buffers in memory of its own for as long as it lives",
            fix="donate the state (`donate_argnums`), capture a smaller batch, or drop unused "
            "graphs; XLA_PYTHON_CLIENT_MEM_FRACTION sets JAX's share of the GPU",
            anchor="out-of-memory",
        )
