"""A provider of segments with real bytes, and events that are over when the test says so."""

from __future__ import annotations

import bisect
import dataclasses
import mmap

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import Segment

FIRST_ADDRESS = 1 << 30
TOKEN_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the provider; ``address`` is None where it had not enough memory."""

    name: str
    nbytes: int
    address: int | None


class BytesProvider:
    """Allocates segments of real bytes, at the lowest address that is free.

    So segments touch each other and addresses come again: what merges over the edge of a segment,
    or trusts an address for longer than its segment lives, is found.

    Args:
        capacity_bytes: what all segments together may take.
    """

    name = "bytes"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.calls: list[Call] = []
        self.segments: dict[int, Segment] = {}
        self.failing_calls: set[int] = set()
        self.call_count = 0
        self._addresses: list[int] = []

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        self.call_count += 1
        if self.call_count in self.failing_calls or nbytes > self.available_bytes():
            self.calls.append(Call("allocate", nbytes, None))
            raise OutOfMemoryError(
                f"no {nbytes:,} bytes left",
                where="bytes provider",
                why="the test says so",
                fix="nothing",
                anchor="out-of-memory",
            )
        address = self._find_gap(nbytes)
        segment = Segment(address, nbytes, mmap.mmap(-1, nbytes))
        self.segments[address] = segment
        bisect.insort(self._addresses, address)
        self.calls.append(Call("allocate", nbytes, address))
        return segment

    def free(self, segment: Segment) -> None:
        assert self.segments.pop(segment.address) is segment
        self._addresses.remove(segment.address)
        segment.storage.close()
        self.calls.append(Call("free", segment.nbytes, segment.address))

    def available_bytes(self) -> int:
        return self.capacity_bytes - sum(one.nbytes for one in self.segments.values())

    def total_bytes(self) -> int:
        return self.capacity_bytes

    def take_calls(self) -> list[Call]:
        """Returns the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def write(self, address: int, nbytes: int, number: int) -> None:
        """Writes ``number`` at both ends and in the middle of a block."""
        storage, offsets = self._find(address, nbytes)
        for offset in offsets:
            storage[offset : offset + TOKEN_BYTES] = number.to_bytes(TOKEN_BYTES, "little")

    def read(self, address: int, nbytes: int) -> set[int]:
        """Returns what is where `write` wrote."""
        storage, offsets = self._find(address, nbytes)
        return {int.from_bytes(storage[one : one + TOKEN_BYTES], "little") for one in offsets}

    def _find(self, address: int, nbytes: int) -> tuple[mmap.mmap, tuple[int, int, int]]:
        index = bisect.bisect_right(self._addresses, address) - 1
        segment = self.segments[self._addresses[index]]
        first = address - segment.address
        assert first + nbytes <= segment.nbytes
        middle = first + nbytes // 2 // TOKEN_BYTES * TOKEN_BYTES
        return segment.storage, (first, middle, first + nbytes - TOKEN_BYTES)

    def _find_gap(self, nbytes: int) -> int:
        address = FIRST_ADDRESS
        for taken in self._addresses:
            if taken - address >= nbytes:
                return address
            address = taken + self.segments[taken].nbytes
        return address


@dataclasses.dataclass(frozen=True, eq=False)
class ManualEvent:
    stream: int
    number: int


class ManualEvents:
    """Events of streams whose work is over when the test calls `finish`.

    Attributes:
        finished: the number of the last event of each stream that is over.
        live: events that were recorded and not yet released.
        asked: the numbers of the events that were asked, in order.
        captured_streams: on these no event may be recorded, asked or waited for; nor on any, if it
            holds None.
    """

    def __init__(self) -> None:
        self.finished: dict[int, int] = {}
        self.recorded: dict[int, int] = {}
        self.live: set[ManualEvent] = set()
        self.asked: list[int] = []
        self.synchronized: list[ManualEvent] = []
        self.captured_streams: set[int | None] = set()
        self.failing_records: set[int] = set()
        self.record_count = 0

    def record(self, stream: int) -> ManualEvent:
        self._check_not_captured(stream)
        self.record_count += 1
        if self.record_count in self.failing_records:
            raise RuntimeError(f"record {self.record_count} fails")
        self.recorded[stream] = self.recorded.get(stream, 0) + 1
        event = ManualEvent(stream, self.recorded[stream])
        self.live.add(event)
        return event

    def is_done(self, event: ManualEvent) -> bool:
        assert event in self.live
        self._check_not_captured(event.stream)
        self.asked.append(event.number)
        return event.number <= self.finished.get(event.stream, 0)

    def synchronize(self, event: ManualEvent) -> None:
        assert event in self.live
        self._check_not_captured(event.stream)
        self.synchronized.append(event)
        self.finish(event.stream, event.number)

    def release(self, event: ManualEvent) -> None:
        self.live.remove(event)

    def finish(self, stream: int, number: int | None = None) -> None:
        """Lets the work of a stream run up to its ``number``-th event; None for all of it."""
        number = self.recorded.get(stream, 0) if number is None else number
        self.finished[stream] = max(self.finished.get(stream, 0), number)

    def _check_not_captured(self, stream: int) -> None:
        assert not self.captured_streams & {stream, None}, "an event touches a capture"
