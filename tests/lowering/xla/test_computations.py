"""Computations: each is read when it is looked into, and what is read has no unknown field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.xla_programs import F32X8, edit_computation, make_kernel, make_program
from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.schema import COMPUTATION
from tracegraph.runtime.errors import UnsupportedError

FUSED = f"""hlo_module_with_config {{ hlo_module {{ computations {{
  id: 2 root_id: 5
  instructions {{ name: "s" id: 4 opcode: "scatter" shape {{ {F32X8} }} called_computation_ids: 2 }}
  instructions {{ name: "sum" id: 5 opcode: "add" shape {{ {F32X8} }} }}
}} computations {{ id: 3 instructions {{ name: "named scatter" id: 6 opcode: "add" }} }} }} }}"""
# Number 2: an instruction whose first field is of a wire type that there is not.
BROKEN = b"\x12\x01\x0f\x28\x02"
UNKNOWN = b"\xf8\x3f\x01"


def read_module(program: Any) -> Any:
    return program.hlo_module_with_config.hlo_module


def test_instructions_are_found_by_computation_and_name() -> None:
    module = read_module(make_program(text=FUSED))
    computations = Computations(module)
    assert list(computations) == [1, 2, 3]
    assert len(computations) == 3
    assert set(computations[module.entry_computation_id]) == {"p0", "p1", "add", "square"}
    assert computations[2]["sum"].id == 5
    assert computations.get(4, {}) == {}
    assert computations[2] is computations[2]


def test_instructions_are_listed_by_opcode() -> None:
    computations = Computations(read_module(make_program(text=FUSED)))
    assert [each.name for each in computations.list_instructions("scatter")] == ["s"]
    assert [each.name for each in computations.list_instructions("add", "scatter")] == [
        "s",
        "sum",
        "named scatter",
    ]
    assert computations.list_instructions("sort") == []


def test_what_is_not_looked_into_is_not_read() -> None:
    program = make_program(make_kernel())
    read_module(program).computations.append(BROKEN)
    assert decode_executable(program, name="f").steps
    computations = Computations(read_module(program))
    assert computations[1]
    for _ in range(2):
        with pytest.raises(UnsupportedError) as caught:
            computations[2]
        assert caught.value.where == f"{COMPUTATION} 2"


def test_an_unknown_field_is_refused_where_it_is_read() -> None:
    program = make_program(make_kernel(), text=FUSED)
    for place in (0, 2):
        with edit_computation(program, place) as computation:
            computation.instructions[0].metadata.MergeFromString(UNKNOWN)
        computations = Computations(read_module(program))
        with pytest.raises(UnsupportedError, match="field 1023 is not in the schema") as caught:
            computations[(1, 2, 3)[place]]
        assert caught.value.where.endswith(".instructions[0].metadata[0]")
    with pytest.raises(UnsupportedError, match="field 1023 is not in the schema"):
        decode_executable(program, name="f")


def test_what_is_no_computation_is_refused() -> None:
    module = read_module(make_program())
    module.computations.append(b"\x0f")
    with pytest.raises(UnsupportedError) as caught:
        Computations(module)
    assert caught.value.where == "xla.HloModuleProto.computations[1]"
