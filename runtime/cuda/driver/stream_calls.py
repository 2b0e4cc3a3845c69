"""Streams, events, memcpys and memsets of the CUDA driver."""

from __future__ import annotations

from tracegraph.runtime.cuda.driver.calls import CopyRows, DriverCalls


class StreamCalls(DriverCalls):
    """Calls on streams and events. The thread needs a current context."""

    def create_stream(self, priority: int = 0) -> int:
        """Returns a new stream that never waits for the legacy default stream.

        Args:
            priority: lower numbers are served first, see `read_priority_range`.
        """
        flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(self._call("cuStreamCreateWithPriority", flags, priority))

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream once its work is done; does not block."""
        self._call("cuStreamDestroy", stream)

    def query_stream(self, stream: int) -> bool:
        """True when all work of a stream is done."""
        return self._is_done("cuStreamQuery", stream)

    def find_context(self, stream: int) -> int:
        """Returns the context that a stream belongs to."""
        return int(self._call("cuStreamGetCtx", stream))

    def synchronize_stream(self, stream: int) -> None:
        """Blocks the host until all work of a stream is done."""
        self._call("cuStreamSynchronize", stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Makes later work of a stream wait for an event, without blocking the host."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def read_priority_range(self) -> tuple[int, int]:
        """Returns the least and the greatest priority; the greatest is the lower number."""
        least, greatest = self._call("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> int:
        """Returns a new event.

        Args:
            timing: record the time, for `elapsed_ms`.
            blocking: a host thread that waits for it sleeps.
        """
        flags = self._api.CUevent_flags
        value = 0 if timing else flags.CU_EVENT_DISABLE_TIMING.value
        value |= flags.CU_EVENT_BLOCKING_SYNC.value if blocking else 0
        return int(self._call("cuEventCreate", value))

    def record_event(self, event: int, stream: int) -> None:
        """Records an event after the work so far of a stream."""
        self._call("cuEventRecord", event, stream)

    def query_event(self, event: int) -> bool:
        """True when the work before an event is done, or the event was never recorded."""
        return self._is_done("cuEventQuery", event)

    def synchronize_event(self, event: int) -> None:
        """Blocks the host until the work before an event is done."""
        self._call("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Returns the milliseconds between two recorded events with timing."""
        return float(self._call("cuEventElapsedTime", start, end))

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""
        self._call("cuEventDestroy", event)

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy between any two addresses that the driver knows."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_rows_async(self, rows: CopyRows, stream: int) -> None:
        """Enqueues one copy of rows within device memory."""
        parameters = self._api.CUDA_MEMCPY2D()
        kind = self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        parameters.srcMemoryType = parameters.dstMemoryType = kind
        parameters.srcDevice, parameters.srcPitch = rows.source_address, rows.source_pitch
        parameters.dstDevice, parameters.dstPitch = rows.target_address, rows.target_pitch
        parameters.WidthInBytes, parameters.Height = rows.nbytes, rows.count
        self._call("cuMemcpy2DAsync", parameters, stream, shown=(rows, stream))

    def fill_async(
        self, target: int, value: int, element_bytes: int, count: int, stream: int
    ) -> None:
        """Enqueues setting ``count`` elements of 1, 2 or 4 bytes to one value."""
        name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[element_bytes]
        self._call(name, target, value, count, stream)
