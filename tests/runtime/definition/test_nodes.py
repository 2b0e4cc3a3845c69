"""Byte ranges of buffers."""

from __future__ import annotations

import pytest

from tracegraph.runtime.definition.nodes import (
    BufferUse,
    KernelCode,
    KernelNode,
    LaunchShape,
    TensorMap,
    rename,
)


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


def test_a_renamed_node_is_equal_but_for_its_name():
    one, other = BufferUse("a", 0, 8), BufferUse("b", 8, 8)
    tiles = TensorMap(other, 4, (2,), (), (1,), (1,))
    shape = LaunchShape((1, 1, 1), (32, 1, 1))
    flags = (False, False, True)
    node = KernelNode("k", KernelCode("k", b"code"), shape, (one, b"1234", tiles), flags)
    assert node.uses == ((one, False), (other, True))
    renamed = rename(node, "k@1")
    wanted = KernelNode("k@1", node.code, shape, node.parameters, flags)
    assert (renamed, renamed.uses, renamed.ranges) == (wanted, wanted.uses, wanted.ranges)
    assert node.name == "k"
    # What was found of the ranges is not that of other ranges.
    moved = renamed.move(lambda use: use._replace(offset=use.offset + 64))
    assert moved.uses == ((BufferUse("a", 64, 8), False), (BufferUse("b", 72, 8), True))
