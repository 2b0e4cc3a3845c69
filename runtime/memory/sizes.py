"""Sizes: what a request is rounded to, and how large a segment serves it.

The figures are those of PyTorch's caching allocator.
"""

from __future__ import annotations

from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.config import AllocatorConfig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MIN_BLOCK_BYTES = 512
# Blocks up to this size come from segments of their own kind, so that they do not break up others.
SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
# From this size on a request has a segment of its own.
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
# A request of this size is a wrong computation on every device.
ABSURD_BYTES = 1 << 60

# Rounding lets a freed arena serve one of about its size; it wastes three percent at most.
EXACT_ROUNDING_BYTES = ((SMALL_BYTES, MIN_BLOCK_BYTES), (128 * MIB, 32 * KIB))


def round_size(nbytes: int, config: AllocatorConfig) -> int:
    """Returns the size of the block that serves a request of ``nbytes`` bytes.

    Example:
        >>> round_size(1, AllocatorConfig()), round_size(513, AllocatorConfig())
        (512, 1024)
    """
    if nbytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = config.find_divisions(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
        return round_to_division(nbytes, divisions)
    return round_up(nbytes, MIN_BLOCK_BYTES)


def round_to_division(nbytes: int, divisions: int) -> int:
    """Returns the next step up, where each power of two is reached in ``divisions`` equal steps.

    Args:
        nbytes: at least 1.
        divisions: a power of two.

    Example:
        >>> round_to_division(1200, 4), round_to_division(1024, 4)
        (1280, 1024)
    """
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    return round_up(nbytes, step) if step else 2 * floor


def choose_segment_bytes(nbytes: int, config: AllocatorConfig) -> int:
    """Returns the size of the new segment that serves a block of ``nbytes`` bytes.

    Example:
        >>> [choose_segment_bytes(n << 20, AllocatorConfig()) >> 20 for n in (1, 2, 9, 10, 11)]
        [2, 20, 20, 10, 12]
    """
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if nbytes < MIN_LARGE_BYTES:
        return config.large_segment_bytes
    return round_up(nbytes, ROUND_LARGE_BYTES)


def round_exact(nbytes: int) -> int:
    """Returns the size of the segment that holds an arena of ``nbytes`` bytes alone.

    Example:
        >>> round_exact(1), round_exact(1 << 20), round_exact((1 << 20) + 1)
        (512, 1048576, 1081344)
    """
    fitting = (rounding for border, rounding in EXACT_ROUNDING_BYTES if nbytes <= border)
    return round_up(max(nbytes, 1), next(fitting, ROUND_LARGE_BYTES))


def round_up(nbytes: int, step: int) -> int:
    """Returns the smallest multiple of ``step`` that is not below ``nbytes``."""
    return -(-nbytes // step) * step


def check_size(nbytes: int, device: int) -> None:
    """Refuses a request whose size is negative, or beyond any device.

    Raises:
        OutOfMemoryError: it is 1 EiB or more.
        TracegraphError: it is negative.

    Example:
        >>> check_size(0, device=0)
    """
    if nbytes < 0:
        raise TracegraphError(
            f"cannot allocate {nbytes:,} bytes",
            where=f"caching allocator of device {device}",
            why="a block has zero bytes or more",
            fix="pass a size of zero or more",
            anchor="pool",
        )
    if nbytes >= ABSURD_BYTES:
        raise OutOfMemoryError(
            f"cannot allocate {nbytes:,} bytes: tried to allocate more than 1 EiB",
            where=f"caching allocator of device {device}",
            why=f"a request of {format_size(ABSURD_BYTES)} or more comes from a wrong computation",
            fix="look where this size is computed; an overflow or a wrong shape is likely",
            anchor="out-of-memory",
        )


def format_size(nbytes: int) -> str:
    """Returns a size as the error texts print it.

    Example:
        >>> format_size(3 * MIB // 2), format_size(512), format_size(800_000_000 * GIB)
        ('1.50 MiB', '512 bytes', '800000000.00 GiB')
    """
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
