"""StaticBuffer: what arrays and replays need to know of a buffer, whatever device it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tracegraph.runtime.stream import Stream


class StaticBuffer(Protocol):
    """Bytes at a fixed address in the pool of a captured graph. It never holds its arrays."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def aval(self) -> Any:
        """JAX's abstract value; physical, so ``uint32`` key data for a typed key."""
        ...

    @property
    def jax_device(self) -> Any:
        """The JAX device that reads this memory."""
        ...

    @property
    def generation(self) -> int:
        """Number of the replay that last wrote it."""
        ...

    @property
    def lock(self) -> Any:
        """Re-entrant; held by whoever reads or writes."""
        ...

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    @property
    def arena(self) -> Any:
        """The arena that holds it."""
        ...

    @property
    def memory(self) -> Any:
        """A plain array over the bytes, if no replay ever writes them again; else None."""
        ...

    @property
    def holder(self) -> Any:
        """Keeps memory that left the graph for streams of the user; None where work never waits."""
        ...

    def record_stream(self, stream: Stream) -> None:
        """Has the arena wait for a stream when it is given back."""
        ...

    @property
    def is_handed_out(self) -> bool:
        """True for a result that leaves the graph in memory of its own."""
        ...

    def take_result(self) -> Any:
        """Returns such a result of the last replay, a plain JAX array, and lets go of it."""
        ...

    @property
    def view(self) -> Any:
        """The bytes themselves, to be copied: on the host a NumPy array."""
        ...

    def snapshot(self) -> Any:
        """Returns a private copy of the present bytes.

        On the host a NumPy array; elsewhere what has ``copy()``, ``to_jax()``, which is called
        once, ``block_until_ready()`` and ``is_ready()``.
        """
        ...

    def wait(self) -> None:
        """Blocks the host until the bytes of the last replay are there."""
        ...

    def is_ready(self) -> bool:
        """True when a read would not wait; the caller holds the lock."""
        ...

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype into the buffer."""
        ...

    def make_writer(self) -> Callable[[Any], None]:
        """Returns what takes a plain JAX array of the same type on this device, as fast as can be.

        It need not copy: the array is immutable.
        """
        ...

    def restore(self) -> bool:
        """Makes the buffer usable after a failed launch; True if its value was lost."""
        ...

    def drop_leaf(self) -> None:
        """Hears that the array which stood for the resident value was deleted."""
        ...
