"""What an allocator needs from its device: memory, and events that tell when a stream is done."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from tracegraph.runtime.memory.providers.segment import Segment


class Provider(Protocol):
    """Where segments come from."""

    name: str

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment of ``nbytes`` bytes for use on ``stream``.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        ...

    def free(self, segment: Segment) -> None:
        """Frees a segment that ``allocate`` returned."""
        ...

    def available_bytes(self) -> int:
        """Returns how many bytes could still be allocated."""
        ...

    def total_bytes(self) -> int:
        """Returns how many bytes there are, in use or not."""
        ...


@runtime_checkable
class VirtualProvider(Provider, Protocol):
    """A provider for expandable segments: it reserves addresses apart from memory."""

    def granularity_bytes(self) -> int:
        """Returns the bytes that addresses and sizes below are multiples of."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Returns the start of a range of addresses that nothing else gets.

        Raises:
            OutOfMemoryError: there are not that many addresses left.
        """
        ...

    def map(self, address: int, nbytes: int) -> None:
        """Maps fresh memory at reserved addresses.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps the memory of one `map`, or of several in a row.

        Blocks the host until no work of the device uses it any more.
        """
        ...

    def release(self, address: int, nbytes: int) -> None:
        """Releases a range that `reserve` returned; nothing is mapped there any more."""
        ...


class EventSource(Protocol):
    """Marks points in streams, to learn later whether the work before them is over."""

    def record(self, stream: int) -> Any:
        """Returns an event that is done when all work enqueued on ``stream`` so far is."""
        ...

    def is_done(self, event: Any) -> bool:
        """Says whether the work before the event is over, without waiting."""
        ...

    def synchronize(self, event: Any) -> None:
        """Blocks the host until the event is done."""
        ...

    def release(self, event: Any) -> None:
        """Releases an event that is not needed any more."""
        ...


class NoEvents:
    """Events of a device on which nothing runs behind the host's back: all are done at once.

    Example:
        >>> events = NoEvents()
        >>> events.is_done(events.record(stream=1))
        True
    """

    def record(self, stream: int) -> Any:
        """Returns an event that is done."""
        return stream

    def is_done(self, event: Any) -> bool:
        """Returns True."""
        return event is not None

    def synchronize(self, event: Any) -> None:
        """Returns at once."""

    def release(self, event: Any) -> None:
        """Forgets the event."""
