"""Varints: numbers as protobuf and Riegeli write them, seven bits to a byte."""

from __future__ import annotations

import mmap

from tracegraph.lowering.xla.refusal import make_unreadable_error

_LONGEST_BYTES = 10


def read_varint(data: bytes | mmap.mmap, offset: int, where: str) -> tuple[int, int]:
    """Returns the varint at ``offset`` (below 2**64) and the offset after it.

    Args:
        data: any bytes.
        offset: of its first byte.
        where: what the bytes are, for the error.

    Raises:
        UnsupportedError: the bytes end inside it, or it has more than 64 bits.
    """
    value = 0
    for index, byte in enumerate(data[offset : offset + _LONGEST_BYTES]):
        value |= (byte & 127) << (7 * index)
        if byte < 128 and value < 1 << 64:
            return value, offset + index + 1
    raise make_unreadable_error(f"no number ends after byte {offset}", where)
