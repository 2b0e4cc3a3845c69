"""What arrays and replays need to know of a buffer, whatever device it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.jax_interop import to_immutable
from tracegraph.runtime.streams.stream import Stream


class PendingRead(Protocol):
    """A copy of a value to the host that was begun."""

    def finish(self) -> np.ndarray[Any, Any]:
        """Waits for it, and returns the value, which cannot be written; to be called once."""
        ...


class DeviceContext(Protocol):
    """The work of a device that goes on after a call has returned."""

    def synchronize(self) -> None:
        """Blocks the host until all work that was enqueued so far is done."""
        ...

    def is_idle(self) -> bool:
        """True when all work that was enqueued so far is done."""
        ...

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocator's number of a stream."""
        ...

    def start_read(self, address: int, aval: Any) -> PendingRead | None:
        """Begins to copy a value to the host after all work that was enqueued so far.

        Args:
            address: of its first byte.
            aval: its shape and dtype.

        Returns:
            None for a value that is better read as an array of JAX.
        """
        ...

    def hold(self, array: Any, memory: Any, stream: Stream) -> None:
        """Keeps memory that is in no arena for a stream of the user.

        Args:
            array: when it dies, the work that the stream holds by then is waited for.
            memory: a plain array that keeps the bytes.
            stream: that reads or writes them.
        """
        ...


class ReadableBuffer(Protocol):
    """Memory that holds the value of an `Array`. It never holds its arrays."""

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
    def clock(self) -> ReplayClock:
        """Number of the replay that last wrote it, and the lock to hold while it is used."""
        ...

    @property
    def context(self) -> DeviceContext | None:
        """The device's work; None where all work is done when a call returns."""
        ...

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    @property
    def arena(self) -> Arena | None:
        """The arena that holds it; None for memory of its own, which is written once."""
        ...

    @property
    def memory(self) -> Any:
        """A plain array over the bytes, if no replay ever writes them again; else None."""
        ...

    @property
    def view(self) -> Any:
        """The bytes themselves, to be copied: on the host a NumPy array."""
        ...

    def snapshot(self) -> Any:
        """Returns a private copy of the current bytes.

        On the host a NumPy array; elsewhere what has ``copy()``, ``to_jax()``, which is called
        once, ``block_until_ready()`` and ``is_ready()``.
        """
        ...


class StaticBuffer(ReadableBuffer, Protocol):
    """Bytes at a fixed address in the arena of a captured graph."""

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype into the buffer."""
        ...

    def reads(self, array: Any, /) -> bool:
        """True while the graph reads a plain array that it took where the array is."""
        ...

    def read_at(self, address: int, /) -> bool:
        """Has the graph read the input at an address of its device; False if it must be copied.

        What is there must not change before the graph is launched, or be freed before it has run.
        """
        ...

    def make_writer(self) -> Callable[[Any], None]:
        """Returns what takes a plain JAX array of the same type on this device, as fast as can be.

        It need not copy: the array is immutable.
        """
        ...


class PartBuffer(StaticBuffer, Protocol):
    """A static buffer of one device: it takes arrays that are smaller, too."""

    def write_part(self, array: Any) -> None:
        """Copies a smaller array in, from the first element on; what is behind it stays.

        Args:
            array: a plain array on the buffer's device, or of NumPy, of which one copy takes all
                rows: see `array_parts.py`.
        """
        ...


def make_plain(snapshot: Any, aval: Any, device: Any) -> jax.Array:
    """Returns the private copy that `ReadableBuffer.snapshot` made as a plain array.

    Args:
        snapshot: the copy.
        aval: of the buffer.
        device: the JAX device that reads the memory.
    """
    if isinstance(snapshot, np.ndarray):
        return to_immutable(snapshot, aval, device)
    return snapshot.to_jax()
