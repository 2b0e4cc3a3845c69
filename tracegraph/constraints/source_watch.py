"""Puts the stand-ins of Python's clocks and random sources where the user's code finds them."""

from __future__ import annotations

import contextlib
import dis
import functools
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

from tracegraph.constraints.sources import (
    SourceWatch,
    get_watch,
    list_source_modules,
    list_stand_ins,
    thread,
)
from tracegraph.runtime.source_lines import is_own_file

_lock = threading.Lock()
# Weak: of a watch whose end was interrupted, nothing is left. The next one's end undoes all of it.
_watches: weakref.WeakSet[SourceWatch] = weakref.WeakSet()
# The class that a module had, by the one that watches it.
_plain_types: dict[type[ModuleType], type[ModuleType]] = {}
# What to undo when the last watch ends.
_watched_modules: list[ModuleType] = []
_exchanged: list[tuple[Any, Any, Any, Any]] = []
_GENERATORS = frozenset([random.Random, np.random.RandomState, np.random.Generator])
_DEPTH_LIMIT = 4
_CACHE = dis.opname.index("CACHE")
_READING_OPS = frozenset(["LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"])
_EMPTY_CELL = CellType()
# By name: there are thousands of modules, and few are the user's own.
_own_modules: dict[str, bool] = {}


@contextlib.contextmanager
def move_sources(function: Callable[..., Any], number: int = 1) -> Iterator[SourceWatch]:
    """Moves clocks and random sources for the user's own code in this thread.

    See Note [Moved sources]. Names that the user's modules and the function itself have imported
    are exchanged; whatever else holds a source directly, as a list or an attribute, is not found.

    Args:
        function: what is traced in the body.
        number: of the trace, from 1: each is moved in another way.

    Returns:
        What was read.
    """
    watch, outer = SourceWatch(number), get_watch()
    namespaces = _list_namespaces(function)
    generators = {id(each): (name, each) for space in namespaces for name, each in _find(space)}
    states = {key: _save_state(each) for key, (_, each) in generators.items()}
    try:
        _install(watch, namespaces)
        thread.watch = watch
        yield watch
    finally:
        # Without a call: no interrupt comes before it.
        thread.watch = outer
        _uninstall(watch)
        _add_drawn(watch, generators, states)


def _add_drawn(
    watch: SourceWatch, generators: dict[int, tuple[str, Any]], states: dict[int, Any]
) -> None:
    """Adds the generators whose state has changed."""
    for key, (name, each) in generators.items():
        if _save_state(each) != states[key]:
            watch.add_generator(name)


def _reads_attribute(frame: FrameType) -> bool:
    """True where the frame itself reads, and not a function of C that it calls, as pickle's."""
    code, index = frame.f_code.co_code, frame.f_lasti
    # Python 3.12 is past the caches of an instruction that it has specialized.
    while code[index] == _CACHE:
        index -= 2
    return dis.opname[code[index]] in _READING_OPS


@functools.cache
def _make_watched(kind: type[ModuleType]) -> type[ModuleType]:
    """Makes a class of modules that give stand-ins to the user's own code in a watched thread."""

    def read(module: ModuleType, name: str) -> Any:
        # Not by `super()`: another thread may have made the module plain again a moment ago.
        value = kind.__getattribute__(module, name)
        if get_watch() is None:
            return value
        _, stand_in = list_stand_ins().get(id(value), (None, None))
        if stand_in is None:
            return value
        frame = sys._getframe(1)
        is_read = is_own_file(frame.f_code.co_filename) and _reads_attribute(frame)
        return stand_in if is_read else value

    made = type("WatchedModule", (kind,), {"__getattribute__": read})
    _plain_types[made] = kind
    return made


def _install(watch: SourceWatch, namespaces: Sequence[Any]) -> None:
    """Watches the modules of the sources, and exchanges what namespaces hold of them."""
    with _lock:
        _watches.add(watch)
        _watch_modules()
        for space in namespaces:
            _exchange(space)


def _watch_modules() -> None:
    for module in list_source_modules():
        if type(module) not in _plain_types:
            _watched_modules.append(module)
            module.__class__ = _make_watched(type(module))


def _uninstall(watch: SourceWatch) -> None:
    """Undoes everything when the last watch ends: another thread may still need it."""
    with _lock:
        _watches.discard(watch)
        if not _watches:
            _restore_modules()
            _restore_exchanged()


def _restore_modules() -> None:
    for module in _watched_modules:
        module.__class__ = _plain_types.get(type(module), type(module))
    _watched_modules.clear()


def _restore_exchanged() -> None:
    for space, name, real, stand_in in _exchanged:
        if space.get(name) is stand_in:
            space[name] = real
    _exchanged.clear()


class _Closure:
    """The variables that a function closes over, as a namespace by number."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = function.__closure__ or ()

    def items(self) -> list[tuple[int, Any]]:
        return [
            (index, cell.cell_contents)
            for index, cell in enumerate(self._cells)
            if cell != _EMPTY_CELL
        ]

    def values(self) -> list[Any]:
        return [value for _, value in self.items()]

    def get(self, index: int) -> Any:
        return dict(self.items()).get(index)

    def __setitem__(self, index: int, value: Any) -> None:
        self._cells[index].cell_contents = value


def _list_namespaces(function: Callable[..., Any]) -> list[Any]:
    """Returns the globals of the user's own modules, and what the function itself holds."""
    found: dict[int, Any] = {}
    for name in list(sys.modules):
        is_own = _own_modules.get(name)
        if is_own is False:
            continue
        module = sys.modules.get(name)
        if is_own is None:
            is_own = _own_modules[name] = name == "__main__" or _is_own_module(module)
        if is_own:
            found[id(module)] = module.__dict__
    for each in _list_parts(function, _DEPTH_LIMIT):
        if not isinstance(each, FunctionType):
            found[id(each.__dict__)] = each.__dict__
        elif is_own_file(each.__code__.co_filename):
            found[id(each.__globals__)] = each.__globals__
            found[id(each)] = _Closure(each)
    return list(found.values())


def _is_own_module(module: object) -> bool:
    if not issubclass(type(module), ModuleType):
        return False
    # Not `vars`: a module that is loaded at its first use must not be loaded by this.
    file = object.__getattribute__(module, "__dict__").get("__file__")
    return file is not None and is_own_file(file)


def _list_parts(value: Any, depth: int) -> Iterator[Any]:
    """Yields the functions inside a callable, and the objects that methods are bound to."""
    if depth == 0:
        return
    if isinstance(value, FunctionType):
        yield value
        inner = [content for _, content in _Closure(value).items() if callable(content)]
    elif isinstance(value, type) or not callable(value):
        return
    else:
        owner = getattr(value, "__self__", value)
        if hasattr(owner, "__dict__") and not isinstance(owner, type | ModuleType):
            yield owner
        inner = [type(value).__call__]
        inner += [getattr(value, name, None) for name in ("__func__", "func", "__wrapped__")]
    for each in inner:
        yield from _list_parts(each, depth - 1)


def _exchange(space: Any) -> None:
    """Puts the stand-ins into a namespace."""
    stand_ins = list_stand_ins()
    # Without a step of Python for each: most namespaces hold none.
    if stand_ins.keys().isdisjoint(map(id, _list_values(space))):
        return
    for name, value in _list_items(space):
        if id(value) in stand_ins:
            real, stand_in = stand_ins[id(value)]
            _exchanged.append((space, name, real, stand_in))
            space[name] = stand_in


def _list_items(space: Any) -> list[tuple[Any, Any]]:
    # A copy: other threads may import into the namespace.
    return list(space.items())


def _list_values(space: Any) -> list[Any]:
    return list(space.values())


def _find(space: Any) -> list[tuple[str, Any]]:
    """Returns the random generators of a namespace, with their names."""
    if _GENERATORS.isdisjoint(map(type, _list_values(space))):
        return []
    return [(str(name), value) for name, value in _list_items(space) if type(value) in _GENERATORS]


def _save_state(generator: Any) -> bytes:
    """Returns a generator's state, which every number that it gives changes."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state())
    return pickle.dumps(generator.bit_generator.state)
