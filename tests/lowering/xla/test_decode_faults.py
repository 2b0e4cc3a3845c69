"""A field that is wrong, in any of a program's places, is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.xla_programs import (
    make_copy,
    make_kernel,
    make_program,
    merge_text,
    message_class,
    shaped,
)
from tests.lowering.xla.test_decode import catch_refusal
from tests.oracles import error_lines
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.errors import UnsupportedError


def change(path: str, value: Any):
    """Returns a function that sets one field, such as ``buffer_allocations.values[0].color``."""

    def apply(program: Any) -> None:
        exec(f"program.{path} = value", {"program": program, "value": value})

    return apply


def merge(text: str):
    return lambda program: merge_text(program, text)


def make_scatter(opcode: str, element_type: int) -> str:
    """Returns the text of a program whose scatter computes something."""
    shape = text_format.MessageToString(message_class("xla.ShapeProto")(element_type=element_type))
    return f"""hlo_module_with_config {{ hlo_module {{ computations {{ id: 2 instructions {{
      name: "s" id: 4 opcode: "{opcode}" shape {{ {shape} }} called_computation_ids: 9
    }} }} }} }}"""


def drop_output(program: Any) -> None:
    del program.output_info_map[:]


FAULTS = {
    "memory space": (
        change("buffer_allocations.values[3].color", 1),
        "has allocation #3 in memory space 1",
    ),
    "parameter in host memory": (
        change("buffer_allocations.values[1].color", 5),
        "has the parameter #1 in host memory",
    ),
    "numbers": (
        change("buffer_allocations.values[3].index", 7),
        "has allocation #7 of 512 bytes at 3",
    ),
    "size": (change("buffer_allocations.values[3].size", -1), "has allocation #3 of -1 bytes"),
    "tuple parameter": (
        merge("buffer_allocations { values { index: 5 is_entry_computation_parameter: true "
              "parameter_number: 1 parameter_shape_index: 0 } }"),
        "has a parameter 1 that is a tuple",
    ),
    "parameter twice": (
        change("buffer_allocations.values[2].parameter_number", 0),
        "has allocations for parameters [0, 0] of 2",
    ),
    "parameter beyond": (
        change("buffer_allocations.values[2].parameter_number", 2),
        "has allocations for parameters [0, 2] of 2",
    ),
    "no result": (drop_output, "maps the results [] of 1"),
    "result nowhere": (
        change("output_info_map[0].output_info.allocation_index", 9),
        "has result () in allocation #9",
    ),
    "result without memory": (
        change("output_info_map[0].output_info.allocation_index", 4),
        "has result () in allocation #4",
    ),
    "result in a constant": (
        change("buffer_allocations.values[0].is_constant", True),
        "has result () in allocation #0",
    ),
    "alias of another": (
        lambda program: text_format.Merge(
            "alias_config { parameter_number: 1 }", program.output_info_map[0].output_info
        ),
        "updates parameter 1 in allocation #0",
    ),
    "alias of a part": (
        lambda program: text_format.Merge(
            "allocation_index: 1 alias_config { parameter_shape_index: 0 }",
            program.output_info_map[0].output_info,
        ),
        "updates parameter 0 in allocation #1",
    ),
    "dynamic": (
        change("program_shape.parameters[0].is_dynamic_dimension[0]", True),
        "has a parameter of no fixed shape",
    ),
    "four bits": (
        change("program_shape.parameters[0].element_type", 21),
        "has a parameter with elements of 0 bits",
    ),
    "six bits": (
        change("program_shape.parameters[0].element_type", 35),
        "has a parameter of F6E3M2FN",
    ),
    "unknown type": (change("program_shape.result.element_type", 99), "has a result of 99"),
    "element size": (
        change("program_shape.result.layout.element_size_in_bits", 4),
        "has a result with elements of 4 bits",
    ),
    "padding": (
        change("program_shape.result.layout.tail_padding_alignment_in_elements", 16),
        "has a result whose axes lie in the order",
    ),
    "axes": (
        change("program_shape.result.layout.minor_to_major[0]", 1),
        "has a result of 1 axes in the order",
    ),
    "unlisted field": (
        change("program_shape.result.layout.memory_space", 5),
        "sets xla.LayoutProto.memory_space, whose meaning is not known",
    ),
    "scatter of an unknown type": (
        merge(make_scatter("scatter", 999)),
        "has the scatter `s` of the unknown type 999",
    ),
    "scatter of a type below zero": (
        merge(make_scatter("scatter", -1)),
        "has the scatter `s` of the unknown type -1",
    ),
    "scatter of windows": (
        merge(make_scatter("select-and-scatter", 999)),
        "has the select-and-scatter `s` of the unknown type 999",
    ),
    "partitions": (
        change("hlo_module_with_config.config.num_partitions", 4),
        "is for 1 by 4 devices",
    ),
    "devices": (
        change("hlo_module_with_config.config.replica_count", 2),
        "is for 2 by 1 devices",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults(plant: Any, expected: str):
    program = make_program(make_kernel())
    assert isinstance(decode_executable(program, name="step"), XlaProgram)
    plant(program)
    error = catch_refusal(program)
    error_lines.match(
        error,
        f"the compiled program of `step` {expected}",
        "XLA's module `jit_step`",
        "a CUDA graph is built only from what tracegraph can interpret in full",
        'use mode="partial"',
    )
    assert error.anchor == "unsupported"


# Every thunk that is lowered, for the mutations below.
MANY = (
    make_kernel(text="zeroed_output_buffer_indices: 2 use_pdl: true"),
    make_copy((1, 0, 32), (3, 0, 32), 32),
    f"memzero_thunk {{ {shaped('dest_buffer', (3, 0, 8))} }}",
    "memset32bit_value_thunk { dest_buffer { size: 8 } value: 3 }",
    "replica_id_thunk { dest_buffer { size: 4 } }",
    f"async_start_thunk {{ thunks {{ thunks {{ {make_kernel()} }} }} }}",
    "async_done_thunk { }",
)
ODD_NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 5, 31, 33, 2**31 - 1])


def list_leaves(message: Any, found: list[tuple[Any, Any, int]]) -> list[tuple[Any, Any, int]]:
    """Returns every number, flag and enum value below a message, with its place in a list."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else [value]:
                list_leaves(child, found)
        elif field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_DOUBLE):
            count = len(value) if field.is_repeated else 1
            found += [(message, field, index) for index in range(count)]
    return found


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_numbers_there_is_a_program_or_an_error(data: st.DataObject):
    program = make_program(*MANY)
    leaves = list_leaves(program, [])
    for _ in range(data.draw(st.integers(1, 3))):
        message, field, index = data.draw(st.sampled_from(leaves))
        value: Any = data.draw(ODD_NUMBERS)
        if field.cpp_type == field.CPPTYPE_BOOL:
            value = bool(value % 2)
        if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            value = abs(value)
        if field.is_repeated:
            getattr(message, field.name)[index] = value
        else:
            setattr(message, field.name, value)
    try:
        decoded = decode_executable(program, name="step")
    except UnsupportedError:
        return
    sizes = {each.name: each.nbytes for each in decoded.allocations}
    for step in decoded.steps:
        for use in (*step.reads, *step.writes):
            assert 0 <= use.offset <= use.offset + use.nbytes <= sizes[use.buffer]
