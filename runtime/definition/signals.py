"""The memory through which kernels on several GPUs meet: its layout, the same on each of them.

First a word that ends all waiting, then for each block how often it has met others, then what the
others say of themselves, last the places that arrays are sent to. See Note [Meetings] of
``lowering/kernels/collectives.py``.
"""

from __future__ import annotations

from tracegraph.runtime.definition.collective_nodes import MAX_MEMBERS, ONE_SHOT_BYTES

# Blocks of a launch: few where each has little to do, as many as have places on every GPU at once.
SMALL_BLOCKS, BLOCKS = 8, 64

WORD_BYTES = 4
GENERATIONS_OFFSET = 128
COUNTS_OFFSET = GENERATIONS_OFFSET + BLOCKS * WORD_BYTES
PLACES_OFFSET = 8192
assert COUNTS_OFFSET + BLOCKS * MAX_MEMBERS * WORD_BYTES <= PLACES_OFFSET


def count_signal_bytes(members: int) -> int:
    """Returns how many bytes each of some GPUs needs.

    Args:
        members: how many of them meet.

    Example:
        >>> count_signal_bytes(2) >> 10
        1032
    """
    return PLACES_OFFSET + 2 * members * ONE_SHOT_BYTES
