"""Identities: which objects a tuple holds, in one value that compares at the speed of C.

Comparing two tuples asks the items that differ whether they are equal, and arrays answer that with
a computation. Comparing item by item with `is` costs 20 ns each. CPython keeps the items of a tuple
as an array of pointers behind the fixed part of the object, so one copy of that memory tells which
objects they are.
"""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any

_HAS_POINTERS = sys.implementation.name == "cpython"
_HEADER_BYTES = tuple.__basicsize__
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_read_memory = ctypes.string_at


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
        return _read_memory(id(items) + _HEADER_BYTES, len(items) * _POINTER_BYTES)
    return array.array("q", map(id, items)).tobytes()
