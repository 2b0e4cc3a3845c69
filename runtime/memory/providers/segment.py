"""Segments: what a provider gives an allocator, the memory behind them, and which are in use."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.errors import InternalError


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """One allocation obtained from a provider. Compares by identity, since addresses recur.

    Attributes:
        address: of its first byte.
        nbytes: its size.
        storage: the object that keeps the memory alive.
    """

    address: int
    nbytes: int
    storage: Any = dataclasses.field(repr=False)


class OwnedMemory:
    """What a segment holds as its storage: frees the memory by `close`, or when it is dropped.

    The function that frees it holds all that it needs, a driver or a library, so the provider may
    be gone by then.

    Args:
        free: called once.
        arguments: for it; none of them may lead back to the storage.

    Example:
        >>> memory = OwnedMemory(print, "gone")
        >>> memory.close()
        gone
        >>> memory.close()
    """

    def __init__(self, free: Callable[..., object], *arguments: Any) -> None:
        self._free = weakref.finalize(self, free, *arguments)
        # At interpreter exit the process frees all memory by itself.
        self._free.atexit = False

    @property
    def is_closed(self) -> bool:
        """True once the memory was freed."""
        return not self._free.alive

    def close(self) -> None:
        """Frees the memory. May be called again; nothing happens then."""
        self._free()


class SegmentSet:
    """Keeps count of segments without keeping them alive. Safe from several threads.

    Weak: a segment that is dropped without being freed has freed its memory as well.

    Args:
        provider: its name, for errors.

    Attributes:
        lock: re-entrant; to be held where looking and adding belong together.

    Example:
        >>> segments = SegmentSet("host")
        >>> segment = Segment(4096, 512, storage=None)
        >>> segments.add(segment)
        >>> segments.nbytes
        512
        >>> segments.remove(segment)
        >>> segments.nbytes
        0
    """

    def __init__(self, provider: str) -> None:
        self.lock = threading.RLock()
        self._provider = provider
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments together."""
        with self.lock:
            return sum(segment.nbytes for segment in self._segments)

    def add(self, segment: Segment) -> None:
        """Counts a new segment."""
        with self.lock:
            self._segments.add(segment)

    def remove(self, segment: Segment) -> None:
        """Stops counting a segment that is freed.

        Raises:
            InternalError: it was freed before, or comes from another provider.
        """
        with self.lock:
            if segment not in self._segments:
                raise InternalError(
                    f"cannot free the segment at {segment.address:#x}: it is not in use",
                    where=f"{self._provider} provider",
                    why="it was freed before or comes from another provider",
                )
            self._segments.discard(segment)
