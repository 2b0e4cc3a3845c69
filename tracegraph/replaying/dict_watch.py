"""DictWatch: CPython says when a dict is changed, so that an unchanged one is not looked at again.

Note [Dict watchers]. Since 3.12 CPython calls a function just before it changes a dict that was
marked by `PyDict_Watch`; both are public in its C API. Four rules make that safe to use from here:

* The function runs no Python code. A signal could be raised in there and be lost with the change,
  and another thread could look at the dict before it is changed. So it is a cache of size zero
  around `min`, which counts its calls: how many changes there were, of whatever marked dict.
  The count is all that we want to know of the cache, so that `max` takes what it tells of itself:
  a named tuple, as `functools.lru_cache` would make, costs five times as much.
* A mark has one owner. To release it, take it off first and leave the table of owners then, so that
  neither threads nor a finaliser in the middle of anything take off another's mark. An interrupt
  may come between any two steps: a watch holds first what it will own, and releases what it owns.
* No dict dies with a mark on it, because that is a change too, and often happens while an exception
  is on its way, when nothing may be called. A watch keeps its dicts alive.
* At exit the function is unregistered before the interpreter destroys its modules.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
from collections.abc import Iterable
from typing import Any

from tracegraph.replaying.object_words import WORD, make_reader, read_word

FIRST_VERSION = (3, 12)

# The kind of change, the dict, its key and its value. The smallest of them is not negative, which
# CPython would take for an error.
_CALLBACK = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t
)
_count_call = functools._lru_cache_wrapper(min, 0, False, max)  # type: ignore[attr-defined]


def _make_count_reader() -> Any:
    """Returns what reads the number of calls: a function of C."""
    words = range(id(_count_call), id(_count_call) + type(_count_call).__basicsize__, WORD.itemsize)
    # Of hits, misses, its size and what is in it, all but the misses stay 0.
    counts = []
    for _ in range(3):
        _count_call(0, 0)
        counts.append([read_word(word) for word in words])
    found = [word for word, *seen in zip(words, *counts, strict=True) if seen == [1, 2, 3]]
    # Half the time of `cache_info`, which tells of all four.
    return make_reader(found) if len(found) == 1 else _count_call.cache_info


read_count: Any = _make_count_reader()
_callback = _CALLBACK(_count_call)


def count_changes() -> int:
    """Returns a number that grows with each change of a watched dict.

    Where nothing counts, as late at exit, it grows with each look.
    """
    count = read_count()
    if not _watcher.is_open:
        # After the look: what `read_count` returns is never what was returned here.
        _count_call(0, 0)
    return count


class DictWatcher:
    """The function that CPython calls, registered under a number, and who owns which mark.

    Attributes:
        is_open: False where there are no watchers: Python 3.11, another Python than CPython, one
            without the interpreter's lock, or one whose eight watchers are in use.
    """

    def __init__(self) -> None:
        self.is_open = has_watchers()
        self._owners: dict[int, object] = {}
        # As long as it may be called.
        self._callback = _callback
        if not self.is_open:
            return
        api = ctypes.pythonapi
        mark = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)
        self._watch, self._unwatch = mark(("PyDict_Watch", api)), mark(("PyDict_Unwatch", api))
        self._clear = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)(("PyDict_ClearWatcher", api))
        add = ctypes.PYFUNCTYPE(ctypes.c_int, _CALLBACK)(("PyDict_AddWatcher", api))
        try:
            self._number = add(self._callback)
        except RuntimeError:
            self.is_open = False
            return
        atexit.register(self.close)

    def acquire(self, mapping: dict[Any, Any], owner: object) -> bool:
        """Marks a dict for an owner; False if another one has marked it."""
        if not self.is_open or self._owners.setdefault(id(mapping), owner) is not owner:
            return False
        self._watch(self._number, mapping)
        return True

    def release(self, mapping: dict[Any, Any], owner: object) -> None:
        """Takes the mark off a dict, if it is the owner's."""
        if self._owners.get(id(mapping)) is not owner:
            return
        if self.is_open:
            self._unwatch(self._number, mapping)
        self._owners.pop(id(mapping), None)

    def close(self) -> None:
        """Takes the function back: changes are not counted any more, and no dict gets a mark."""
        if self.is_open:
            self.is_open = False
            # What was counted so far is not the count any more: look at every dict.
            _count_call(0, 0)
            self._clear(self._number)


def has_watchers() -> bool:
    """True for a Python that notifies of changes one at a time."""
    is_locked: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    is_cpython = sys.implementation.name == "cpython"
    return is_cpython and is_locked and sys.version_info >= FIRST_VERSION


_watcher = DictWatcher()


class DictWatch:
    """Makes `count_changes` count the changes of some dicts; keeps them alive.

    Args:
        mappings: exact dicts.

    Attributes:
        counted: the dicts whose changes are counted.
        uncounted: the others: there are no watchers, or another watch owns the mark.
        watcher: of the marks.
        read: returns what is equal while no dict was changed.

    Example:
        >>> state = {"w": 1.5}
        >>> watch, before = DictWatch([state]), count_changes()
        >>> state["w"] = 2.5
        >>> count_changes() > before or bool(watch.uncounted)
        True
    """

    __slots__ = ("_mappings", "_owner", "counted", "read", "uncounted", "watcher")

    def __init__(self, mappings: Iterable[dict[Any, Any]]) -> None:
        # Held here: at exit a finaliser may find no names in its module any more.
        self.watcher, self._owner, self.read = _watcher, object(), count_changes
        self._mappings = tuple({id(mapping): mapping for mapping in mappings}.values())
        self.counted: list[dict[Any, Any]] = []
        self.uncounted: list[dict[Any, Any]] = []
        for mapping in self._mappings:
            is_counted = _watcher.acquire(mapping, self._owner)
            (self.counted if is_counted else self.uncounted).append(mapping)

    def __del__(self) -> None:
        try:
            watcher, owner, mappings = self.watcher, self._owner, self._mappings
        except AttributeError:
            # Made by half: it owns no mark yet.
            return
        for mapping in mappings:
            watcher.release(mapping, owner)
