"""DictTags: CPython 3.11 numbers the states of a dict, so that an unchanged one is not looked at.

Each dict has a version tag (PEP 509): a word that gets a new number, which no other dict ever had,
whenever a key or a value is changed. Reading it costs less than being told of changes, see Note
[Dict watchers], but 3.12 gave it up: there, attributes of an object that are set while its
``__dict__`` is an object, too, leave the tag of that dict as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.replaying.object_words import WORD, make_reader, read_word

# Behind the count of references, the type, and the number of items.
_TAG_OFFSET = 3 * WORD.itemsize


class DictTags:
    """Tells of changes of some dicts by their version tags.

    Args:
        mappings: exact dicts; who asks keeps them alive.

    Attributes:
        counted: the dicts, all of them.
        uncounted: none.
        read: returns what is equal while no dict was changed.
    """

    __slots__ = ("counted", "read", "uncounted")

    def __init__(self, mappings: Sequence[dict[Any, Any]]) -> None:
        self.counted = list(mappings)
        self.uncounted: list[dict[Any, Any]] = []
        self.read: Callable[[], Any] = make_reader([id(each) + _TAG_OFFSET for each in mappings])


def has_tags() -> bool:
    """True where each change of a dict changes the word that we take for its tag."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return False
    probe: dict[str, Any] = {"a": 0}
    tags = [read_word(id(probe) + _TAG_OFFSET)]
    for change in (lambda: probe.update(a=1), lambda: probe.update(b=1), lambda: probe.pop("a")):
        change()
        tags.append(read_word(id(probe) + _TAG_OFFSET))
    is_stable = "b" in probe and read_word(id(probe) + _TAG_OFFSET) == tags[-1]
    return is_stable and len(set(tags)) == len(tags)
