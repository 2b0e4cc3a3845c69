"""Collectives: what is exchanged, in which order, and which are refused."""

from __future__ import annotations

import re

import pytest

from tests.fakes.xla_programs import Place, make_program, shaped
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind,
    CollectiveNode,
    Exchange,
    NumberNode,
)
from tracegraph.runtime.definition.nodes import BufferUse, FillNode
from tracegraph.runtime.errors import UnsupportedError

KIND = CollectiveKind
FLAT = "COLLECTIVE_OP_GROUP_MODE_FLATTENED_ID"
PAIR = "replica_groups { replica_ids: 0 replica_ids: 1 }"
SUM = "reduction_kind: REDUCTION_KIND_SUM"
ORDER = BufferUse("#order of collectives", 0, 1)


def make_thunk(
    kind: str,
    *buffers: tuple[Place, Place],
    dtype: str = "F32",
    mode: str = FLAT,
    groups: str = PAIR,
    more: str = "",
) -> str:
    types = " ".join(f"operand_element_type: {dtype}" for _ in buffers)
    listed = " ".join(
        f"buffers {{ {shaped('source_buffer', source)} {shaped('destination_buffer', target)} }}"
        for source, target in buffers
    )
    config = f"collective_config {{ {types} {groups} group_mode: {mode} }}"
    return f"{kind}_thunk {{ {config} {listed} {more} }}"


def decode(*thunks: str, partitions: int = 2) -> list[DeviceStep]:
    program = make_program(*thunks)
    program.hlo_module_with_config.config.num_partitions = partitions
    found = decode_executable(program, name="step", partitions=partitions)
    return list(list_device_steps(found.steps))


def refuse(*thunks: str, partitions: int = 2) -> str:
    with pytest.raises(UnsupportedError) as caught:
        decode(*thunks, partitions=partitions)
    return str(caught.value)


IN_PLACE = ((3, 0, 64), (3, 0, 64))


@pytest.mark.parametrize(
    ("thunk", "exchange"),
    [
        (
            make_thunk("all_reduce", IN_PLACE, more=SUM),
            Exchange(KIND.ALL_REDUCE, "F32", 16, ((0, 1),), "SUM"),
        ),
        (
            make_thunk("all_reduce", IN_PLACE, dtype="C64", groups="", more=SUM),
            Exchange(KIND.ALL_REDUCE, "F32", 16, ((0, 1),), "SUM"),
        ),
        (
            make_thunk(
                "all_reduce", IN_PLACE, dtype="PRED", more="reduction_kind: REDUCTION_KIND_MAX"
            ),
            Exchange(KIND.ALL_REDUCE, "U8", 64, ((0, 1),), "MAX"),
        ),
        (
            make_thunk("reduce_scatter", ((3, 0, 64), (3, 64, 32)), dtype="BF16", more=SUM),
            Exchange(KIND.REDUCE_SCATTER, "BF16", 32, ((0, 1),), "SUM"),
        ),
        (
            make_thunk("all_gather", ((3, 0, 32), (3, 64, 64)), dtype="F8E5M2"),
            Exchange(KIND.ALL_GATHER, "U8", 32, ((0, 1),)),
        ),
        (
            make_thunk("all_to_all", ((3, 0, 32), (3, 64, 32)), more="has_split_dimension: true"),
            Exchange(KIND.ALL_TO_ALL, "U8", 32, ((0, 1),)),
        ),
        (
            make_thunk(
                "collective_permute",
                ((3, 0, 32), (3, 64, 32)),
                more="source_target_pairs { target: 1 }",
            ),
            Exchange(KIND.PERMUTE, "U8", 32, ((0, 1),), pairs=((0, 1),)),
        ),
    ],
)
def test_what_is_exchanged(thunk: str, exchange: Exchange) -> None:
    (step,) = decode(thunk)
    assert isinstance(step.node, CollectiveNode)
    assert step.node.exchange == exchange
    assert step.reads == (step.node.source,)
    assert step.writes == (step.node.target, ORDER)


def test_each_comes_after_the_one_before() -> None:
    other = ((3, 128, 64), (3, 128, 64))
    steps = decode(
        make_thunk("all_reduce", IN_PLACE, other, more=SUM),
        make_thunk("all_reduce", IN_PLACE, more=SUM),
    )
    assert [ORDER in step.reads for step in steps] == [False, True, True]
    assert all(ORDER in step.writes for step in steps)


def test_the_number_of_a_device_is_that_of_one_of_several() -> None:
    target = BufferUse("#3", 0, 4)
    place = "dest_buffer { buffer_allocation_index: 3 offset: 0 size: 4 }"
    partition, replica = f"partition_id_thunk {{ {place} }}", f"replica_id_thunk {{ {place} }}"
    number, zero = (step.node for step in decode(partition, replica))
    assert isinstance(number, NumberNode)
    assert number.target == target
    assert isinstance(zero, FillNode)
    assert (zero.target, zero.value) == (target, 0)
    (alone,) = decode(partition, partitions=1)
    assert isinstance(alone.node, FillNode)


TO_ALL = ((3, 0, 32), (3, 64, 32))


@pytest.mark.parametrize(
    ("thunk", "reason"),
    [
        (make_thunk("all_to_all", TO_ALL), "exchanges a tuple of arrays"),
        (
            make_thunk("all_reduce", IN_PLACE, mode="COLLECTIVE_OP_GROUP_MODE_CROSS_REPLICA"),
            "group_mode to COLLECTIVE_OP_GROUP_MODE_CROSS_REPLICA",
        ),
        (
            make_thunk("all_reduce", IN_PLACE, groups="replica_groups { replica_ids: 0 }"),
            r"exchanges in the groups \(\(0,\),\) of 2 devices",
        ),
        (make_thunk("all_reduce", IN_PLACE, dtype="F8E5M2", more=SUM), "joins elements of type"),
        (
            make_thunk(
                "all_reduce", IN_PLACE, dtype="C64", more="reduction_kind: REDUCTION_KIND_MAX"
            ),
            "joins elements of type C64 by max",
        ),
        (make_thunk("all_reduce", IN_PLACE, dtype="F64", more=""), "REDUCTION_KIND_UNSPECIFIED"),
        (
            make_thunk("all_reduce", ((3, 0, 62), (3, 0, 62)), more=SUM),
            "joins 62 bytes of elements of 4",
        ),
        (
            make_thunk("all_reduce", ((3, 0, 64), (3, 32, 64)), more=SUM),
            "writes where other devices still read",
        ),
        (
            make_thunk("all_gather", ((3, 0, 32), (3, 0, 64))),
            "writes where other devices still read",
        ),
        (make_thunk("all_gather", TO_ALL), "makes 32 bytes of 32 on each of 2 devices"),
        (
            make_thunk(
                "collective_permute",
                TO_ALL,
                more="source_target_pairs { target: 1 } source_target_pairs { target: 1 }",
            ),
            "sends from and to",
        ),
        (
            make_thunk("all_reduce", IN_PLACE, more=SUM).replace(
                "group_mode", "use_symmetric_buffer: true group_mode"
            ),
            "registered with NCCL",
        ),
        (
            make_thunk("all_reduce", IN_PLACE, more=SUM).replace(
                "operand_element_type: F32", "operand_element_type: F32 " * 2
            ),
            "names 2 types of 1 arrays",
        ),
    ],
)
def test_what_is_refused(thunk: str, reason: str) -> None:
    text = refuse(thunk)
    assert re.search(reason, text), text


def test_a_program_for_one_device_exchanges_nothing() -> None:
    text = refuse(make_thunk("all_reduce", IN_PLACE, more=SUM), partitions=1)
    assert "exchanges with no other device" in text
