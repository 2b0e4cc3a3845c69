"""The contexts, streams and events of FakeDriver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.fakes.fake_memory import FakeMemory
from tests.fakes.fake_state import DEFAULT_STREAMS, check
from tracegraph.runtime.cuda.driver.calls import make_call_error


class FakeStreams(FakeMemory):
    """Contexts, streams and events; see `FakeState` and `FakeMemory` for arguments."""

    def retain_primary_context(self, ordinal: int) -> int:
        self._enter("retain_primary_context", ordinal)
        held = self._contexts.setdefault(ordinal, [next(self._numbers), 0])
        held[1] += 1
        self._live[held[0]] = "context"
        return held[0]

    def release_primary_context(self, ordinal: int) -> None:
        held = self._contexts[ordinal]
        check(held[1] > 0, f"context of device {ordinal} released too often")
        held[1] -= 1
        if not held[1]:
            del self._live[held[0]]
        self._enter("release_primary_context", ordinal)

    def set_current(self, context: int) -> None:
        self._enter("set_current", context)
        if context:
            self._check_live("context", context)
        self._thread.context = context

    def get_current(self) -> int:
        self._enter("get_current")
        return getattr(self._thread, "context", 0)

    @contextlib.contextmanager
    def use_context(self, context: int) -> Iterator[None]:
        before = self.get_current()
        if before == context:
            yield
            return
        self.set_current(context)
        try:
            yield
        finally:
            self.set_current(before)

    def count_resident_threads(self) -> int:
        self._enter("count_resident_threads", needs_context=True)
        return 132 * 2048

    def count_processors(self) -> int:
        self._enter("count_processors", needs_context=True)
        return 132

    def read_attribute(self, ordinal: int, name: str) -> int:
        self._enter("read_attribute", ordinal, name)
        return {"COMPUTE_CAPABILITY_MAJOR": 9, "WARP_SIZE": 32, "PCI_BUS_ID": 0x65}.get(name, 0)

    def read_total_bytes(self, ordinal: int) -> int:
        self._enter("read_total_bytes", ordinal)
        return 139 << 30

    def read_uuid(self, ordinal: int) -> bytes:
        self._enter("read_uuid", ordinal)
        return bytes(range(16))

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        self._enter("can_access_peer", ordinal, peer)
        return ordinal != peer

    def allow_peer(self, peer: int) -> None:
        self._enter("allow_peer", peer, needs_context=True)

    def synchronize_context(self) -> None:
        self._enter("synchronize_context", needs_context=True)
        check(not self._captures, "synchronize_context while a stream is captured")

    def create_stream(self, priority: int = 0) -> int:
        return self._create("stream", "create_stream", priority, needs_context=True)

    def destroy_stream(self, stream: int) -> None:
        check(stream not in self._captures, "destroy_stream of a stream that is captured")
        self._destroy("stream", "destroy_stream", stream)

    def find_context(self, stream: int) -> int:
        self._enter("find_context", stream)
        check(stream not in DEFAULT_STREAMS, "the context of a default stream")
        if stream not in self.foreign_streams:
            where = f"cuStreamGetCtx({stream:#x})"
            raise make_call_error("CUDA_ERROR_INVALID_HANDLE", "cuStreamGetCtx", where, "no stream")
        return self.foreign_streams[stream]

    def query_stream(self, stream: int) -> bool:
        self._enter("query_stream", stream)
        self._check_stream(stream)
        return True

    def synchronize_stream(self, stream: int) -> None:
        self._enter("synchronize_stream", stream)
        self._check_stream(stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._enter("wait_event", stream, event)
        self._check_stream(stream)
        self._check_live("event", event)

    def read_priority_range(self) -> tuple[int, int]:
        self._enter("read_priority_range", needs_context=True)
        return 0, -5

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> int:
        event = self._create("event", "create_event", timing, blocking, needs_context=True)
        self._event_contexts[event] = self._thread.context
        return event

    def record_event(self, event: int, stream: int) -> None:
        self._enter("record_event", event, stream)
        self._check_stream(stream)
        self._check_live("event", event)
        current = getattr(self._thread, "context", 0)
        is_same = current in (0, self._event_contexts[event])
        check(is_same, "record_event on a stream of another context")

    def query_event(self, event: int) -> bool:
        self._enter("query_event", event)
        self._check_live("event", event)
        return True

    def synchronize_event(self, event: int) -> None:
        self._enter("synchronize_event", event)
        self._check_live("event", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        self._enter("elapsed_ms", start, end)
        self._check_live("event", start)
        self._check_live("event", end)
        return 1.0

    def destroy_event(self, event: int) -> None:
        self._destroy("event", "destroy_event", event)
