"""A provider and events that do what a test says: addresses, capacity, failures, counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.segment import Segment

FIRST_ADDRESS = 0x7F0000000000
GIB = 1 << 30


class ScriptedProvider:
    """Allocates segments without memory.

    Args:
        capacity_bytes: of the whole device.
        addresses: of the segments, in order; behind them, and by default, addresses count up.
        fail_at: requests that fail, by number from 0.

    Attributes:
        name: shown in errors.
        live: segments that are not freed yet, by address.
        log: what was asked, as ("allocate" | "free", address, bytes).
        before_allocate: called at the start of each request.
    """

    name = "scripted"

    def __init__(
        self,
        capacity_bytes: int = 64 * GIB,
        *,
        addresses: Iterable[int] = (),
        fail_at: Iterable[int] = (),
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.live: dict[int, Segment] = {}
        self.log: list[tuple[str, int, int]] = []
        self.before_allocate: Callable[[], None] = lambda: None
        self._addresses = list(addresses)
        self._fail_at = frozenset(fail_at)
        self._next_address = FIRST_ADDRESS
        self._request_count = 0

    @property
    def allocation_count(self) -> int:
        return sum(action == "allocate" for action, _, _ in self.log)

    @property
    def free_count(self) -> int:
        return sum(action == "free" for action, _, _ in self.log)

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.nbytes for segment in self.live.values())

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        self.before_allocate()
        number = self._request_count
        self._request_count += 1
        if number in self._fail_at or nbytes > self.available_bytes():
            raise OutOfMemoryError(
                f"cannot reserve {nbytes:,} bytes",
                where="scripted provider",
                why="the test says so",
                fix="none",
                anchor="out-of-memory",
            )
        address = self._choose_address(nbytes)
        segment = Segment(address, nbytes, storage=None)
        self.live[address] = segment
        self.log.append(("allocate", address, nbytes))
        return segment

    def free(self, segment: Segment) -> None:
        assert self.live.pop(segment.address) is segment
        self.log.append(("free", segment.address, segment.nbytes))

    def available_bytes(self) -> int:
        return self.capacity_bytes - self.reserved_bytes

    def total_bytes(self) -> int:
        return self.capacity_bytes

    def _choose_address(self, nbytes: int) -> int:
        if self._addresses:
            return self._addresses.pop(0)
        address = self._next_address
        # A gap, so that blocks of neighbouring segments never touch.
        self._next_address += nbytes + (4 << 20)
        return address


@dataclasses.dataclass(eq=False)
class ScriptedEvent:
    stream: int
    is_done: bool = False


class ScriptedEvents:
    """Events that are done when the test says so. A stream that waits for no other is never busy.

    Attributes:
        busy: streams on which work is under way.
        outstanding: events recorded and not released.
        synchronize_count: how often the host waited.
    """

    def __init__(self, *, busy: Iterable[int] = ()) -> None:
        self.busy = set(busy)
        self.outstanding: list[ScriptedEvent] = []
        self.synchronize_count = 0

    def record(self, stream: int) -> ScriptedEvent:
        event = ScriptedEvent(stream, is_done=stream not in self.busy)
        self.outstanding.append(event)
        return event

    def is_done(self, event: ScriptedEvent) -> bool:
        assert event in self.outstanding, "queried after it was released"
        return event.is_done

    def synchronize(self, event: ScriptedEvent) -> None:
        self.synchronize_count += 1
        event.is_done = True

    def release(self, event: ScriptedEvent) -> None:
        self.outstanding.remove(event)

    def finish(self, stream: int) -> None:
        """Ends the work of a stream."""
        self.busy.discard(stream)
        for event in self.outstanding:
            event.is_done = event.is_done or event.stream == stream
