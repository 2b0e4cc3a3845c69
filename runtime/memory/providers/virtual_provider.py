"""What segments that grow need of a device: addresses, and memory put behind them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tracegraph.runtime.memory.providers.segment import Segment


@runtime_checkable
class VirtualProvider(Protocol):
    """A provider that also gives addresses and memory apart from each other."""

    name: str

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        """Returns a fresh segment that does not grow, see `Provider`."""
        ...

    def free(self, segment: Segment) -> None:
        """Takes back a segment that ``allocate`` returned."""
        ...

    def available_bytes(self) -> int:
        """Returns how many bytes could still be allocated."""
        ...

    def total_bytes(self) -> int:
        """Returns how many bytes there are, in use or not."""
        ...

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
        """Puts fresh memory behind reserved addresses.

        Raises:
            OutOfMemoryError: there is not that much.
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes the memory of one `map`, or of several in a row, from its addresses.

        Blocks the host until no work of the device uses it any more.
        """
        ...

    def release(self, address: int, nbytes: int) -> None:
        """Gives a range that `reserve` returned back; nothing is mapped there any more."""
        ...
