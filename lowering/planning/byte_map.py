"""ByteMap: a value for every byte of a range, kept as pieces."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteMap(Generic[T]):
    """What holds for each byte from 0 on: pieces in ascending order, each up to the next one.

    Cost follows the number of pieces that a range touches, not the number of bytes.

    Args:
        value: what holds for all bytes at first.

    Example:
        >>> owners = ByteMap("free")
        >>> owners.replace(4, 8, "me")
        ['free']
        >>> owners.read(0, 6)
        ['free', 'me']
    """

    def __init__(self, value: T) -> None:
        self._starts = [0]
        self._values = [value]

    def copy(self) -> ByteMap[T]:
        """Returns a map of its own with the same pieces."""
        copied = ByteMap(self._values[0])
        copied._starts, copied._values = self._starts.copy(), self._values.copy()
        return copied

    def list_pieces(self) -> list[tuple[int, int, T]]:
        """Returns start, end and value of each piece but the last, which has no end."""
        return list(zip(self._starts, self._starts[1:], self._values, strict=False))

    def read(self, start: int, end: int) -> list[T]:
        """Returns the values of the pieces that share a byte with the range, ascending."""
        if start >= end:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, end)
        return self._values[first:last]

    def replace(self, start: int, end: int, value: T) -> list[T]:
        """Makes one value hold for the whole range, and returns those before, ascending."""
        if start >= end:
            return []
        pieces = self._cut(start, end)
        before = self._values[pieces]
        self._starts[pieces] = [start]
        self._values[pieces] = [value]
        return before

    def change(self, start: int, end: int, function: Callable[[T], T]) -> list[T]:
        """Replaces each value of the range by the function of it, and returns those before."""
        if start >= end:
            return []
        pieces = self._cut(start, end)
        before = self._values[pieces]
        self._values[pieces] = map(function, before)
        return before

    def _cut(self, start: int, end: int) -> slice:
        """Makes pieces begin at both offsets and returns where those of the range are."""
        starts, values = self._starts, self._values
        first = bisect.bisect_left(starts, start)
        if first == len(starts) or starts[first] != start:
            starts.insert(first, start)
            values.insert(first, values[first - 1])
        # Most ranges are one piece that is there.
        if starts[first + 1 : first + 2] == [end]:
            return slice(first, first + 1)
        last = bisect.bisect_left(starts, end, first)
        if last == len(starts) or starts[last] != end:
            starts.insert(last, end)
            values.insert(last, values[last - 1])
        return slice(first, last)
