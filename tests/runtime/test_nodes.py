"""Byte ranges of buffers."""

from __future__ import annotations

import pytest

from tracegraph.runtime.nodes import BufferUse


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [
        (BufferUse("a", 4, 8), True),
        (BufferUse("a", 0, 5), True),
        (BufferUse("a", 0, 4), False),
        (BufferUse("a", 12, 4), False),
        (BufferUse("b", 4, 8), False),
        # An empty range has no byte, wherever it stands.
        (BufferUse("a", 6, 0), False),
        (BufferUse("a", 4, 0), False),
    ],
)
def test_ranges_that_overlap_have_a_common_byte(other: BufferUse, is_shared: bool):
    one = BufferUse("a", 4, 8)
    assert one.overlaps(other) is other.overlaps(one) is is_shared
