"""Packing: elements of less than a byte share bytes on a GPU, where JAX keeps them so.

NumPy has a byte for each. The first element is in the lowest bits, and what is left of the last
byte belongs to no element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# By the names of JAX's dtypes.
PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def is_packable(dtype: np.dtype[Any]) -> bool:
    """True for a dtype whose elements have less than a byte.

    Example:
        >>> is_packable(np.dtype(jnp.int4)), is_packable(np.dtype(jnp.int8))
        (True, False)
    """
    # The size first: NumPy makes the name of a dtype anew each time.
    return dtype.itemsize == 1 and dtype.name in PACKED_BITS


def count_packed_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Returns how many bytes an array takes on a GPU.

    Example:
        >>> count_packed_bytes((3, 5), np.dtype(jnp.int4)), count_packed_bytes((3,), np.dtype("f4"))
        (8, 12)
    """
    bits = PACKED_BITS[dtype.name] if is_packable(dtype) else 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)


def pack(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the bytes of an array as they lie on a GPU; those of whole bytes as they are.

    Example:
        >>> pack(np.array([1, -1, 3]).astype(jnp.int4)).tolist()
        [241, 3]
    """
    bits = PACKED_BITS.get(array.dtype.name)
    if bits is None:
        return array
    return pack_bits(np.ascontiguousarray(array).ravel().view(np.uint8), bits)


def pack_bits(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Returns small values, one per byte, as they share bytes: the first in the lowest bits.

    Args:
        values: ``uint8``, in one dimension.
        bits: of each that count: 2 or 4.

    Example:
        >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).tobytes().hex()
        '2103'
    """
    per_byte = 8 // bits
    padded = np.pad(values & ((1 << bits) - 1), (0, -values.size % per_byte))
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    return np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1, dtype=np.uint8)


def unpack(
    content: np.ndarray[Any, Any], shape: Sequence[int], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Returns the array whose bytes on a GPU are given.

    Args:
        content: ``uint8``, as many as `count_packed_bytes` says.
        shape: of the array.
        dtype: of the array.

    Example:
        >>> unpack(np.array([241, 3], np.uint8), (3,), np.dtype(jnp.int4))
        array([1, -1, 3], dtype=int4)
    """
    bits = PACKED_BITS.get(dtype.name)
    if bits is None:
        return content.view(dtype).reshape(shape)
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    values = (content[:, None] >> shifts & np.uint8((1 << bits) - 1)).ravel()
    return values[: math.prod(shape)].view(dtype).reshape(shape)
