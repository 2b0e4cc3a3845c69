"""What one GPU does of a graph over several: tables of addresses, numbers, bodies of loops."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import pytest

from tracegraph.runtime.definition.collective_nodes import (
    MAX_MEMBERS,
    ONE_SHOT_BYTES,
    CollectiveKind,
    CollectiveNode,
    Exchange,
    NumberNode,
)
from tracegraph.runtime.definition.graph import ArenaSize, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    FillNode,
    KernelCode,
    KernelNode,
    LaunchShape,
)
from tracegraph.runtime.definition.placement import (
    Peers,
    list_exchanged,
    list_groups,
    pack_table,
    place_definition,
)
from tracegraph.runtime.definition.signals import PLACES_OFFSET, count_signal_bytes
from tracegraph.runtime.errors import InternalError

SHAPE = LaunchShape((8, 1, 1), (512, 1, 1))
CODE = KernelCode("exchange", b"image")
SUM = Exchange(CollectiveKind.ALL_REDUCE, "F32", 16, ((0, 2), (1, 3)), "SUM")
SOURCE, TARGET = BufferUse("a", 64, 64), BufferUse("b", 0, 64)
NODE = CollectiveNode("psum", SUM, SOURCE, TARGET, CODE, SHAPE)


def define(*nodes: Node) -> GraphDefinition:
    return GraphDefinition("step", ArenaSize(256), (), (Stage(nodes, ()),), (), ())


def locate(number: int, use: BufferUse) -> int:
    return 4096 * (number + 1) + (128 if use.buffer == "b" else 0) + use.offset


def find_signals(group: Sequence[int]) -> list[int]:
    return [1 << 20 | number for number in group]


def place(number: int, *nodes: Node) -> tuple[Node, ...]:
    return place_definition(define(*nodes), Peers(number, locate, find_signals)).stages[0].nodes


def unpack(table: bytes) -> tuple[list[list[int]], tuple[int, ...]]:
    words = struct.unpack(f"<{3 * MAX_MEMBERS}Q", table[: 24 * MAX_MEMBERS])
    columns = [list(words[i * MAX_MEMBERS : i * MAX_MEMBERS + 2]) for i in range(3)]
    assert sum(map(bool, words)) == 6
    return columns, struct.unpack("<q4i", table[24 * MAX_MEMBERS :])


def test_a_collective_becomes_a_kernel_that_knows_its_group() -> None:
    (kernel,) = place(3, NODE)
    assert isinstance(kernel, KernelNode)
    assert kernel.begins_with_wait
    assert (kernel.code, kernel.shape) == (CODE, SHAPE)
    table, *uses = kernel.parameters
    assert uses == [SOURCE, TARGET]
    assert kernel.results == ("b",)
    assert isinstance(table, bytes)
    columns, rest = unpack(table)
    sources, targets = ([locate(number, use) for number in (1, 3)] for use in (SOURCE, TARGET))
    assert columns == [sources, targets, find_signals((1, 3))]
    # Elements, own place in the group, who sends, whether vectors fit.
    assert rest == (16, 1, -1, 1, 0)


def test_addresses_between_vectors_are_told() -> None:
    table = pack_table(SUM, 0, [4096, 8200], [4096, 8192], [1, 2])
    assert unpack(table)[1][3] == 0


def test_a_permute_knows_who_sends() -> None:
    group = ((0, 1, 2),)
    shift = Exchange(CollectiveKind.PERMUTE, "U8", 16, group, pairs=((2, 0), (0, 1)))
    senders = [
        struct.unpack("<q4i", pack_table(shift, n, [16] * 3, [32] * 3, [1] * 3)[-24:])[2]
        for n in range(3)
    ]
    assert senders == [2, 0, -1]


def test_each_gpu_has_its_number_in_bodies_too() -> None:
    setter = KernelNode("set", CODE, SHAPE, (ConditionHandle.OWN,), (False,))
    inner = Body((NumberNode("index", TARGET), NODE), ((0, 1),))
    loop = ConditionalNode("loop", Construct.WHILE, (inner,), setter)
    (placed,) = place(2, loop)
    assert isinstance(placed, ConditionalNode)
    number, kernel = placed.bodies[0].nodes
    assert number == FillNode("index", TARGET, 2, 4)
    assert isinstance(kernel, KernelNode)
    assert placed.bodies[0].edges == ((0, 1),)
    definition = define(loop, FillNode("zero", BufferUse("c", 0, 4)))
    assert list_exchanged(definition) == {"a", "b"}
    assert list_groups(definition) == [(0, 2), (1, 3)]


def test_a_collective_without_a_kernel_is_a_bug_that_is_named() -> None:
    with pytest.raises(InternalError, match="`psum` has no kernel"):
        place(0, dataclasses.replace(NODE, code=None))


def test_a_gpu_outside_of_all_groups_has_no_part() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        SUM.find_group(4)


@pytest.mark.parametrize("members", [2, MAX_MEMBERS])
def test_signals_have_two_places_for_each_member(members: int) -> None:
    places = count_signal_bytes(members) - PLACES_OFFSET
    assert places == 2 * members * ONE_SHOT_BYTES
