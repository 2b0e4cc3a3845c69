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
        >>> owners = ByteMap("nobody")
        >>> owners.replace(4, 8, "me")
        >>> owners.read(0, 6)
        ['nobody', 'me']
    """

    def __init__(self, value: T) -> None:
        self._starts = [0]
        self._values = [value]

    def read(self, start: int, end: int) -> list[T]:
        """Returns the values of the pieces that share a byte with the range, ascending."""
        if start >= end:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, end)
        return self._values[first:last]

    def replace(self, start: int, end: int, value: T) -> None:
        """Makes one value hold for the whole range."""
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        self._starts[first:last] = [start]
        self._values[first:last] = [value]

    def change(self, start: int, end: int, function: Callable[[T], T]) -> None:
        """Replaces the value of each piece of the range by the function of it."""
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        self._values[first:last] = map(function, self._values[first:last])

    def _cut(self, offset: int) -> int:
        """Makes a piece begin at the offset and returns its index."""
        index = bisect.bisect_left(self._starts, offset)
        if index == len(self._starts) or self._starts[index] != offset:
            self._starts.insert(index, offset)
            self._values.insert(index, self._values[index - 1])
        return index
