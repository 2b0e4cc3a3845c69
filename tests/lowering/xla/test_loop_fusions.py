"""Loop fusions: what contradicts itself is none; `test_merge_loops.py` has real ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf import text_format

from tests.fakes.xla_programs import F32X8, message_class, read_computation
from tracegraph.lowering.xla.loop_fusions import read_loop_fusion


def write(number: int, opcode: str, *operands: int, more: str = "", shape: str = F32X8) -> str:
    ids = " ".join(f"operand_ids: {each}" for each in operands)
    return (
        f'instructions {{ name: "i{number}" id: {number} opcode: "{opcode}" {ids} {more} '
        f"shape {{ {shape} }} }}"
    )


def read(*instructions: str) -> Any:
    head = 'name: "f" opcode: "fusion" called_computation_ids: 7'
    fusion = text_format.Parse(head, message_class("xla.HloInstructionProto")())
    computations: Mapping[int, Mapping[str, Any]] = {7: read_computation(" ".join(instructions))}
    return read_loop_fusion(fusion, computations)


PARAMETER = write(0, "parameter")
FLAGS = write(1, "parameter", more="parameter_number: 1", shape=F32X8.replace("F32", "PRED"))


def test_a_choice_and_a_view_are_read() -> None:
    assert read(PARAMETER, FLAGS, write(2, "select", 1, 0, 0)) is not None
    assert read(PARAMETER, write(2, "add", 0, 0), write(3, "copy", 2)) is not None


@pytest.mark.parametrize(
    "last",
    [
        write(2, "select", 1),
        write(2, "select"),
        write(2, "broadcast"),
        write(2, "copy"),
        write(2, "copy", 0, 0),
        write(2, "add", 0, 9),
    ],
)
def test_what_contradicts_itself_is_left(last: str) -> None:
    assert read(PARAMETER, FLAGS, last) is None
