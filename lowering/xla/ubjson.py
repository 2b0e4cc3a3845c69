"""Universal Binary JSON: what cuDNN's front end writes a compiled graph as.

https://ubjson.org. Only what that writer writes is read: no containers of one type, no counts.
"""

from __future__ import annotations

import struct
from typing import Any

from tracegraph.lowering.xla.refusal import Refusal

_NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_CONSTANTS = {"Z": None, "T": True, "F": False}
# Deeper than any graph of cuDNN; Python's own limit is far beyond.
MAX_DEPTH = 64


def read_ubjson(data: bytes) -> Any:
    """Returns the value that bytes hold.

    Args:
        data: one value, and nothing behind it.

    Raises:
        Refusal: they hold something else.

    Example:
        >>> read_ubjson(b"{i\\x01aI\\x01\\x00i\\x01b[TZ]}")
        {'a': 256, 'b': [True, None]}
    """
    try:
        value, end = _read_value(data, 0, 0)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise Refusal(f"has a compiled graph that cannot be read: {error}") from None
    if end != len(data):
        raise Refusal(f"has a compiled graph that ends at {end} of {len(data)} bytes")
    return value


def _read_value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    marker, at = chr(data[at]), at + 1
    if marker in _CONSTANTS:
        return _CONSTANTS[marker], at
    if marker in _NUMBERS:
        return _read_number(data, at, marker)
    if marker == "S":
        return _read_text(data, at)
    if marker in "[{" and depth < MAX_DEPTH:
        read = _read_array if marker == "[" else _read_object
        return read(data, at, depth + 1)
    raise Refusal(f"has a compiled graph with the mark {marker!r} at {at - 1}, which is not known")


def _read_number(data: bytes, at: int, marker: str) -> tuple[Any, int]:
    (value,) = struct.unpack_from(_NUMBERS[marker], data, at)
    return value, at + struct.calcsize(_NUMBERS[marker])


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    marker = chr(data[at])
    if marker not in "iUIlL":
        raise Refusal(f"has a compiled graph with a text of length {marker!r} at {at}")
    length, at = _read_number(data, at + 1, marker)
    if not 0 <= length <= len(data) - at:
        raise Refusal(f"has a compiled graph with a text of {length} bytes at {at}")
    return data[at : at + length].decode(), at + length


def _read_array(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    values = []
    while data[at] != ord("]"):
        value, at = _read_value(data, at, depth)
        values.append(value)
    return values, at + 1


def _read_object(data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
    values = {}
    while data[at] != ord("}"):
        key, at = _read_text(data, at)
        values[key], at = _read_value(data, at, depth)
    return values, at + 1
