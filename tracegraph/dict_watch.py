"""DictWatch: have some dicts been changed? Answered without looking at them.

Note [Dict watchers]. Since 3.12 CPython tells who asks for it that a dict is about to change:
`PyDict_AddWatcher` and its neighbours, part of the C API. A train step gets hundreds of leaves in
dozens of dicts back at each call; to compare them costs a quarter of the host's time, to ask for a
flag nothing. The callback only sets flags. It gets addresses, not objects, because an object must
not be held while it is being deallocated. At the end of the interpreter the watcher is taken out
first, since dicts die there after the modules.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

_CALLBACK = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
# By address of a dict: who watches it. Tuples, so that the callback never meets half a change.
_watches: dict[int, tuple[weakref.ref[DictWatch], ...]] = {}
# Re-entrant: a finaliser may run while this thread holds it.
_lock = threading.RLock()


class DictWatch:
    """Watches dicts as long as it lives; it keeps them alive.

    Args:
        dicts: exact dicts; a subclass may keep an order that changes unseen.

    Attributes:
        has_changed: True once one of them was changed; whoever has looked may reset it.

    Example:
        >>> state = {"w": 1.5}
        >>> watch = watch_dicts([state])
        >>> state["w"] = 2.5
        >>> watch is None or watch.has_changed
        True
    """

    __slots__ = ("__weakref__", "has_changed")

    def __init__(self, dicts: Sequence[dict[Any, Any]], watcher: int) -> None:
        self.has_changed = False
        reference = weakref.ref(self)
        # Its arguments are what keeps the dicts alive. At exit nothing is left to be taken back.
        weakref.finalize(self, _unwatch, tuple(dicts), watcher).atexit = False
        with _lock:
            for each in dicts:
                _watches[id(each)] = (*_watches.get(id(each), ()), reference)
                # Last: a finaliser may just have taken the mark off.
                ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(each))


def watch_dicts(dicts: Sequence[dict[Any, Any]]) -> DictWatch | None:
    """Returns a watch of some dicts, or None where Python has no watchers: before 3.12."""
    watcher = _find_watcher()
    return None if watcher is None else DictWatch(dicts, watcher)


@functools.cache
def _find_watcher() -> int | None:
    """Returns CPython's number of our watcher; None without one, or when all eight are taken."""
    if not hasattr(ctypes.pythonapi, "PyDict_AddWatcher"):
        return None
    try:
        watcher = ctypes.pythonapi.PyDict_AddWatcher(_note_change)
    except RuntimeError:
        return None
    atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, watcher)
    return watcher


@_CALLBACK
def _note_change(_event: int, address: int, _key: int, _value: int) -> int:
    for reference in _watches.get(address, ()):
        watch = reference()
        if watch is not None:
            watch.has_changed = True
    return 0


def _unwatch(dicts: Sequence[dict[Any, Any]], watcher: int) -> None:
    with _lock:
        for each in dicts:
            living = tuple(ref for ref in _watches.get(id(each), ()) if ref() is not None)
            if living:
                _watches[id(each)] = living
                continue
            _watches.pop(id(each), None)
            ctypes.pythonapi.PyDict_Unwatch(watcher, ctypes.py_object(each))
