"""Writes Universal Binary JSON as cuDNN's front end does."""

from __future__ import annotations

import struct
from typing import Any


def write_ubjson(value: Any) -> bytes:
    """Returns the bytes of a value of dicts, lists, texts, ints, floats, booleans and None."""
    if value is None:
        return b"Z"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _write_int(value)
    if isinstance(value, float):
        return b"D" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"S" + _write_text(value)
    if isinstance(value, list | tuple):
        return b"[" + b"".join(map(write_ubjson, value)) + b"]"
    pairs = (_write_text(key) + write_ubjson(each) for key, each in value.items())
    return b"{" + b"".join(pairs) + b"}"


def _write_int(value: int) -> bytes:
    for marker, form in (("i", ">b"), ("U", ">B"), ("I", ">h"), ("l", ">i")):
        try:
            return marker.encode() + struct.pack(form, value)
        except struct.error:
            continue
    return b"L" + struct.pack(">q", value)


def _write_text(text: str) -> bytes:
    data = text.encode()
    return _write_int(len(data)) + data
