"""Warm memory: pages that the process has touched before it needs them.

Note [Warm memory]. XLA's serialization of a step of 700 kernels takes a hundred megabytes of the C
library's heap, and decoding takes more. Fresh pages come from the system one fault each: 24
thousand, which took 0.05 to 0.1 of 0.4 seconds on a virtual machine with an H200. Touched while XLA
compiles, which the calling thread only waits for, they cost nothing.
"""

from __future__ import annotations

# The C library keeps freed memory up to twice the largest block that was mapped separately and
# freed, and takes 32 MiB at most for that.
_LARGEST_MAPPED_BYTES = 31 << 20
_BLOCK_BYTES = 1 << 20
MOST_BYTES = 2 * _LARGEST_MAPPED_BYTES - (6 << 20)


def warm_memory(nbytes: int) -> int:
    """Touches memory and frees it to the heap, where later allocations find it.

    Args:
        nbytes: how much; no more than ``MOST_BYTES`` is kept.

    Returns:
        The bytes that were touched.

    Example:
        >>> warm_memory(3_000_000)
        2097152
    """
    count = min(nbytes, MOST_BYTES) // _BLOCK_BYTES
    if count:
        # Mapped separately, and freed at once: it only makes the heap keep what follows.
        bytes(_LARGEST_MAPPED_BYTES)
    blocks = [b"\1" * _BLOCK_BYTES for _ in range(count)]
    return sum(map(len, blocks))
