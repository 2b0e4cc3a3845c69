"""Limits of a launch on every GPU that XLA compiles for, and of a description of a tiled array."""

from __future__ import annotations

import math

from tracegraph.runtime.definition.nodes import LaunchShape, TensorMap

GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
CLUSTER_LIMITS = (16, 16, 16)
THREAD_LIMIT = 1024
SHARED_LIMIT_BYTES = 256 * 1024


def find_shape_problem(shape: LaunchShape) -> str:
    """Returns what is wrong with a launch, as ``has a grid of (0, 1, 1)``, or an empty text.

    Example:
        >>> find_shape_problem(LaunchShape((1, 1, 1), (1024, 2, 1)))
        'has a block of 2048 threads'
    """
    parts = (
        ("grid", shape.grid, GRID_LIMITS),
        ("block", shape.block, BLOCK_LIMITS),
        ("cluster", shape.cluster, CLUSTER_LIMITS),
    )
    for what, sizes, limits in parts:
        if any(not 0 < size <= limit for size, limit in zip(sizes, limits, strict=True)):
            return f"has a {what} of {sizes}"
    if math.prod(shape.block) > THREAD_LIMIT:
        return f"has a block of {math.prod(shape.block)} threads"
    if not 0 <= shape.shared_bytes <= SHARED_LIMIT_BYTES:
        return f"has {shape.shared_bytes} bytes of shared memory"
    return ""


def find_tile_problem(tiles: TensorMap) -> str:
    """Returns what is wrong with the description of a tiled array, or an empty text."""
    dims, strides, box, steps = tiles.dims, tiles.strides, tiles.box, tiles.element_strides
    rank = len(dims)
    lengths = (len(strides) + 1, len(box), len(steps))
    is_sound = 1 <= rank <= 5 and lengths == (rank,) * 3
    is_sound = is_sound and min((*dims, *strides, *box, *steps)) > 0
    if not is_sound or tiles.element_bytes not in (1, 2, 4, 8):
        return f"describes a tile of dims {dims}, strides {strides}, box {box}"
    last = sum((dim - 1) * stride for dim, stride in zip(dims[1:], strides, strict=True))
    extent = last + dims[0] * tiles.element_bytes
    if extent > tiles.use.nbytes:
        return f"describes a tiled array of {extent} bytes in an argument of {tiles.use.nbytes}"
    return ""
