"""Fakes under the caching host allocator: pages without memory, and events that end on demand."""

from __future__ import annotations

import itertools
from typing import Any

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.providers.segment import Segment

CAPTURED, OTHER = 7, 8


class FakePages:
    """Returns addresses without memory, and counts."""

    name = "fake"

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.live: dict[Segment, str] = {}
        self.calls: list[tuple[str, int]] = []
        self._addresses = itertools.count(1 << 32, 1 << 24)

    def allocate(self, nbytes: int) -> Segment:
        used_bytes = sum(segment.nbytes for segment in self.live)
        if used_bytes + nbytes > self.limit_bytes:
            raise OutOfMemoryError("full", where="here", why="because", fix="no", anchor="pinned")
        segment = Segment(next(self._addresses), nbytes, None)
        self.live[segment] = "locked"
        self.calls.append(("allocate", nbytes))
        return segment

    def free(self, segment: Segment) -> None:
        assert self.live.pop(segment) == "locked"
        self.calls.append(("free", segment.nbytes))

    def register(self, segment: Segment) -> None:
        self.live[segment] = "registered"
        self.calls.append(("register", segment.nbytes))

    def unregister(self, segment: Segment) -> None:
        assert self.live.pop(segment) == "registered"
        self.calls.append(("unregister", segment.nbytes))


class FakeEvents:
    """Events that are over when the test says so, or when they are waited for."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.done: set[int] = set()
        self.is_asked = False
        self._numbers = itertools.count()

    def record(self, stream: int) -> int:
        event = next(self._numbers)
        self.live[event] = stream
        return event

    def is_done(self, event: int) -> bool:
        assert event in self.live
        self.is_asked = True
        return event in self.done

    def synchronize(self, event: int) -> None:
        assert event in self.live
        self.done.add(event)

    def release(self, event: int) -> None:
        del self.live[event]

    def finish(self, stream: int | None = None) -> None:
        """Lets the work of a stream, or of all, be over."""
        self.done |= {event for event, s in list(self.live.items()) if stream in (None, s)}


def make(pages: FakePages, text: str, events: Any = None) -> CachingHostAllocator:
    return CachingHostAllocator(pages, config=parse_alloc_conf(text), events=events)
