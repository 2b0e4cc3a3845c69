"""SegmentSet: the segments that a provider has handed out and not taken back."""

from __future__ import annotations

import threading
import weakref

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.providers.segment import Segment


class SegmentSet:
    """Keeps count of segments without keeping them alive. Safe from several threads.

    Weak: a segment that is dropped without being taken back has given its memory back as well.

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
        """Counts a segment that is handed out."""
        with self.lock:
            self._segments.add(segment)

    def remove(self, segment: Segment) -> None:
        """Stops counting a segment that is taken back.

        Raises:
            TracegraphError: it was taken back before, or comes from another provider.
        """
        with self.lock:
            if segment not in self._segments:
                raise TracegraphError(
                    f"cannot take back the segment at {segment.address:#x}: it is not handed out",
                    where=f"{self._provider} provider",
                    why="it was taken back before or comes from another provider",
                    fix="internal error in tracegraph: please report this text",
                    anchor="pool",
                )
            self._segments.discard(segment)
