"""Where the first part of an array lies in the memory of the whole: rows at equal distances.

A part begins at the first element and has fewer along some axes. Fewer along the first axis only is
one row: the first bytes. Fewer along one more axis are rows, of which one copy of the driver takes
all. Fewer along two inner axes are rows of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tracegraph.runtime.definition.packing import is_packable

# Of the distance between rows that CUDA copies.
MAX_PITCH_BYTES = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class PartRows:
    """The rows of a part.

    Attributes:
        count: how many.
        nbytes: of each.
        pitch_bytes: from one row to the next in the whole; in the part they are side by side.
    """

    count: int
    nbytes: int
    pitch_bytes: int


@functools.lru_cache(maxsize=4096)
def find_part_rows(
    part: tuple[int, ...], whole: tuple[int, ...], dtype: np.dtype[Any]
) -> PartRows | None:
    """Returns the rows of a part, or None where one copy does not take them.

    Args:
        part: shape of the part, at most that of the whole along each axis.
        whole: shape of the whole.
        dtype: of both; an array with it is made of elements, not of typed keys.

    Example:
        >>> find_part_rows((3, 5), (4, 5), np.dtype("f4"))
        PartRows(count=1, nbytes=60, pitch_bytes=60)
        >>> find_part_rows((3, 2), (4, 5), np.dtype("f4"))
        PartRows(count=3, nbytes=8, pitch_bytes=20)
        >>> find_part_rows((3, 2, 1), (3, 5, 4), np.dtype("f4"))
    """
    if is_packable(dtype):
        # A row may end within a byte.
        return None
    itemsize = dtype.itemsize
    cut = [axis for axis, (n, m) in enumerate(zip(part, whole, strict=True)) if n != m]
    inner = [axis for axis in cut if axis > 0]
    if not inner:
        nbytes = math.prod(part) * itemsize
        return PartRows(1, nbytes, nbytes)
    if len(inner) > 1:
        return None
    axis = inner[0]
    pitch_bytes = math.prod(whole[axis:]) * itemsize
    if pitch_bytes > MAX_PITCH_BYTES:
        return None
    return PartRows(math.prod(part[:axis]), math.prod(part[axis:]) * itemsize, pitch_bytes)
