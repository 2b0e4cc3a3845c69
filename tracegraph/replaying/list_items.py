"""ListItems: do lists hold the objects that they held, without a look at any of these objects?

Note [Items of lists]. CPython keeps the items of a list as an array of pointers; the list has its
length and the address of that array, which is another one when the list has grown. Both are read
where they are and compared as bytes: 2 us for 2000 items, where a tuple of them, which counts one
more reference to each, takes ten times as long. The array may be gone once another thread has
changed the list. So the list's own words are compared first, and nothing lets another thread in
between that and the look at the array: `all`, `map`, the attribute and the comparison are C that
keeps the interpreter's lock. Where there is no such lock, or lists are laid out in another way,
this is not used.
"""

from __future__ import annotations

import itertools
import operator
import struct
import sys
from collections.abc import Sequence
from typing import Any

from tracegraph.replaying.identities import find_view, read_pointers
from tracegraph.replaying.object_words import WORD, read_word

# Behind the count of references and the type: the length, then the address of the items.
_LENGTH_OFFSET, _ITEMS_OFFSET = 2 * WORD.itemsize, 3 * WORD.itemsize
_get_bytes = operator.attrgetter("raw")
_find_words = find_view(2)


class ListItems:
    """Which objects some lists hold; keeps both alive.

    Args:
        lists: exact lists.

    Example:
        >>> state = [object(), object()]
        >>> items = ListItems([state])
        >>> items.are_same()
        True
        >>> state.reverse()
        >>> items.are_same()
        False
    """

    __slots__ = ("_held", "_lists", "_seen", "_views")

    def __init__(self, lists: Sequence[list[Any]]) -> None:
        self._lists = tuple(lists)
        self._held = tuple(map(tuple, lists))
        self._look()

    def are_same(self) -> bool:
        """True while the lists hold the same objects in the same order."""
        # See Note [Items of lists].
        if all(map(operator.eq, map(_get_bytes, self._views), self._seen)):
            return True
        if list(map(len, self._lists)) != list(map(len, self._held)):
            return False
        items, held = map(itertools.chain.from_iterable, (self._lists, self._held))
        if not all(map(operator.is_, items, held)):
            return False
        # They have moved in memory.
        self._look()
        return True

    def _look(self) -> None:
        """Finds where the items are now; a list that has others already is never the same."""
        self._views: list[Any] = []
        self._seen: list[bytes] = []
        for each, held in zip(self._lists, self._held, strict=True):
            address = read_word(id(each) + _ITEMS_OFFSET)
            self._views.append(_find_words(id(each) + _LENGTH_OFFSET))
            self._seen.append(struct.pack("nn", len(held), address))
            if held:
                self._views.append(find_view(len(held))(address))
                self._seen.append(read_pointers(held))


def can_read_lists() -> bool:
    """True where the items of a list are where we read them."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)() or WORD.itemsize != 8:
        return False
    probe: list[Any] = [object(), object(), object()]
    words = _find_words(id(probe) + _LENGTH_OFFSET).raw
    length, address = struct.unpack("nn", words)
    # Only what is in the list's own memory is looked at until that is known to be as expected.
    if length != len(probe) or type(probe).__basicsize__ != 5 * WORD.itemsize:
        return False
    return find_view(length)(address).raw == read_pointers(tuple(probe))


CAN_READ_LISTS = can_read_lists()
