"""Outer values: what a captured function reads from around it, and whether that has changed since.

A trace takes the values of globals and of enclosing functions as they are, as under `jax.jit`; a
graph replays these, whatever the names mean later. What was read is described here without being
kept alive: numbers and texts by value, arrays by identity, and those of NumPy, which can be
written, by a checksum too.

Only what the code of the function names is read, and that of the user's functions that it names.
Attributes of objects and modules are not.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from tracegraph.constraints.variable_trees import list_variable_leaves
from tracegraph.runtime.source_lines import is_user_file

# Of one value; larger trees are compared in part.
MAX_LEAVES = 10_000
MAX_FUNCTIONS = 200
# A larger array of NumPy is known by its identity alone.
MAX_CHECKED_BYTES = 1 << 24
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayMark:
    """An array that was read.

    Attributes:
        array: itself, while the user's code keeps it.
        text: its type.
        checksum: of its bytes; 0 for one that cannot be written.
    """

    array: weakref.ref[Any]
    text: str
    checksum: int = 0

    def __str__(self) -> str:
        return self.text


Mark: TypeAlias = ArrayMark | str
# By where a name is looked up and the name.
OuterValues: TypeAlias = Mapping[tuple[str, str], tuple[Mark, ...]]


def read_outer_values(function: Callable[..., Any]) -> OuterValues:
    """Returns what a function reads from around it, as it is now.

    Args:
        function: of the user.

    Example:
        >>> scale = 2.0
        >>> def make():
        ...     rate = 0.1
        ...     return lambda x: x * rate
        >>> read_outer_values(make())
        {('around `make.<locals>.<lambda>`', 'rate'): ('0.1',)}
    """
    found: dict[tuple[str, str], tuple[Mark, ...]] = {}
    for place, name, value in _walk(function):
        marks = tuple(_describe(value))
        if marks:
            found[place, name] = marks
    return found


def find_stale(then: OuterValues, function: Callable[..., Any]) -> list[str]:
    """Returns a line for each value that is not what it was.

    Args:
        then: what `read_outer_values` found.
        function: the same function.
    """
    now = {(place, name): value for place, name, value in _walk(function)}
    lines = []
    for (place, name), marks in then.items():
        if (place, name) not in now:
            lines.append(f"`{name}` {place} was {_print(marks)}, and is gone")
            continue
        others = tuple(_describe(now[place, name]))
        if len(marks) == len(others) and all(map(_is_same, marks, others)):
            continue
        if _print(others) == _print(marks):
            lines.append(f"`{name}` {place} was another {_print(marks)}")
        else:
            lines.append(f"`{name}` {place} was {_print(marks)}, and is {_print(others)}")
    return lines


def _walk(function: Callable[..., Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the variables that a function and those that it names read, with their places."""
    waiting: collections.deque[Any] = collections.deque([function])
    seen: set[int] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        plain = _find_function(waiting.popleft())
        if plain is None or id(plain) in seen:
            continue
        seen.add(id(plain))
        for place, name, value in _list_variables(plain):
            if isinstance(value, types.ModuleType | type):
                continue
            if callable(value):
                waiting.append(value)
            else:
                yield place, name, value


def _find_function(value: Any) -> types.FunctionType | None:
    """Returns the user's function inside of partials, methods and what wraps it."""
    for _ in range(100):
        if isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename):
            return value
        inner = value.func if isinstance(value, functools.partial) else None
        value = inner or getattr(value, "__func__", None) or getattr(value, "__wrapped__", None)
        if value is None:
            return None
    return None


def _list_variables(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    around = f"around `{function.__qualname__}`"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield around, name, cell.cell_contents
        except ValueError:
            continue  # It is not bound yet.
    module = f"of module `{function.__module__}`"
    for name in sorted(_list_names(function.__code__)):
        if name in function.__globals__:
            yield module, name, function.__globals__[name]


def _list_names(code: types.CodeType) -> set[str]:
    """Returns the names that code may look up outside, those of functions inside of it too."""
    names = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names |= _list_names(each)
    return names


def _describe(value: Any) -> Iterator[Mark]:
    """Yields what is known of each leaf; nothing of an object that is no leaf of JAX."""
    for _, leaf in itertools.islice(list_variable_leaves("", value), MAX_LEAVES):
        if type(leaf) in _PLAIN or isinstance(leaf, np.generic):
            yield repr(leaf)
        elif isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            yield ArrayMark(weakref.ref(leaf), leaf.aval.str_short())
        elif type(leaf) is np.ndarray:
            yield ArrayMark(weakref.ref(leaf), f"{leaf.dtype}{list(leaf.shape)}", _sum(leaf))


def _is_same(then: Mark, now: Mark) -> bool:
    if isinstance(then, str) or isinstance(now, str):
        return then == now
    array = now.array()
    return array is not None and then.array() is array and then.checksum == now.checksum


def _sum(array: np.ndarray[Any, Any]) -> int:
    if array.nbytes > MAX_CHECKED_BYTES or array.dtype.hasobject:
        return 0
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _print(marks: tuple[Mark, ...]) -> str:
    if not marks:
        return "an object"
    text = ", ".join(map(str, marks[:3]))
    return text if len(marks) <= 3 else f"{text} and {len(marks) - 3} more"
