"""Identities: which objects a tuple holds, in one value that compares at the speed of C.

Comparing two tuples asks the items that differ whether they are equal, and arrays answer that with
a computation. Comparing item by item with `is` costs 20 ns each. CPython keeps the items of a tuple
as an array of pointers behind the fixed part of the object, so one copy of that memory tells which
objects they are.
"""

from __future__ import annotations

import array
import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

_HAS_POINTERS = sys.implementation.name == "cpython"
_HEADER_BYTES = tuple.__basicsize__
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


@functools.lru_cache(maxsize=256)
def _find_view(count: int) -> Callable[[int], ctypes.Array[ctypes.c_char]]:
    """Returns what views the memory of so many pointers: a third of what `string_at` costs."""
    return (ctypes.c_char * (count * _POINTER_BYTES)).from_address


def read_identities(items: tuple[Any, ...]) -> bytes:
    """Returns bytes that are equal for two tuples of the same objects in the same order.

    The objects must stay alive as long as the bytes are compared with others.

    Example:
        >>> one, other = object(), object()
        >>> read_identities((one, other)) == read_identities((one, other))
        True
        >>> read_identities((one, other)) == read_identities((other, one))
        False
    """
    if _HAS_POINTERS:
        return _find_view(len(items))(id(items) + _HEADER_BYTES).raw
    return array.array("q", map(id, items)).tobytes()
