"""A provider that allocates the memory which PyTorch obtained in a recording, and no other."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tests.oracles.allocator_traces import Entry
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import Segment

# What the driver maps at least, on every GPU so far.
GRANULARITY_BYTES = 2 << 20


class RecordedProvider:
    """Allocates the segments that PyTorch obtained, and complains about any other request.

    Args:
        total_bytes: of the device.

    Attributes:
        name: shown in errors.
        complaints: requests that PyTorch did not make.
    """

    name = "recorded"

    def __init__(self, total_bytes: int) -> None:
        self.complaints: list[str] = []
        self._total_bytes = total_bytes
        self._segments: collections.deque[tuple[int, int]] = collections.deque()
        self._pages: collections.deque[int] = collections.deque()

    def follow(self, entries: Iterable[Entry]) -> None:
        """Has what PyTorch obtained in the next operation ready."""
        for _, address, nbytes, _ in (e for e in entries if e.action == "segment_alloc"):
            self._segments.append((address, nbytes))
        for _, address, nbytes, _ in (e for e in entries if e.action == "segment_map"):
            self._pages.extend(range(address, address + nbytes, GRANULARITY_BYTES))

    def settle(self) -> list[str]:
        """Ends an operation; returns the complaints, also about what was not requested."""
        complaints = self.complaints
        if self._segments or self._pages:
            complaints.append(f"left: segments {list(self._segments)}, {len(self._pages)} pages")
        self._segments.clear()
        self._pages.clear()
        self.complaints = []
        return complaints

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        if self._segments and self._segments[0][1] == nbytes:
            return Segment(self._segments.popleft()[0], nbytes, storage=None)
        raise self._make_memory_error(f"a segment of {nbytes:,} bytes", nbytes)

    def free(self, segment: Segment) -> None:
        pass

    def available_bytes(self) -> int:
        return self._total_bytes

    def total_bytes(self) -> int:
        return self._total_bytes

    def granularity_bytes(self) -> int:
        return GRANULARITY_BYTES

    def reserve(self, nbytes: int) -> int:
        if not self._pages:
            raise self._make_memory_error(f"addresses for {nbytes:,} bytes", 0)
        return self._pages[0]

    def map(self, address: int, nbytes: int) -> None:
        for page in range(address, address + nbytes, GRANULARITY_BYTES):
            if not self._pages or self._pages[0] != page:
                raise self._make_memory_error(f"pages at {address:#x}", nbytes)
            self._pages.popleft()

    def unmap(self, address: int, nbytes: int) -> None:
        pass

    def release(self, address: int, nbytes: int) -> None:
        pass

    def _make_memory_error(self, what: str, nbytes: int) -> OutOfMemoryError:
        # A request beyond the device failed in the recording too.
        if nbytes <= self._total_bytes:
            self.complaints.append(f"asked for {what}; PyTorch did not")
        return OutOfMemoryError(
            f"cannot reserve {what}",
            where="recorded provider",
            why="PyTorch did not obtain it in this operation",
            fix="none",
            anchor="out-of-memory",
        )
