"""Compiled programs decode to steps, or to one error that names all that is not lowered."""

from __future__ import annotations

import types
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.compilers import make_compiler
from tests.fakes.xla_programs import (
    make_copy,
    make_kernel,
    make_program,
    message_class,
    name_thunk,
    shaped,
)
from tests.fakes.xla_recordings import read_recording, recorded_schema
from tests.oracles import error_lines
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla import decode
from tracegraph.lowering.xla.decode import decode_executable, read_program
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.library_nodes import MatmulNode
from tracegraph.runtime.nodes import BufferUse, KernelNode, LaunchShape


def catch_refusal(program: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(program, name="step")
    return caught.value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "load_schema", recorded_schema)


@pytest.mark.usefixtures("recorded")
def test_recorded_kernel():
    program = read_program(read_recording("mul2"), name="mul2")
    assert program.allocations == (
        Allocation("#0", 20, AllocationKind.OUTPUT),
        Allocation("#1", 20, AllocationKind.PARAMETER, 0),
    )
    assert (program.name, program.outputs) == ("jit__lambda", ("#0",))
    (step,) = list_device_steps(program.steps)
    assert step.reads == (BufferUse("#1", 0, 20),)
    assert step.writes == (BufferUse("#0", 0, 20),)
    node = step.node
    assert isinstance(node, KernelNode)
    assert node.name == node.code.symbol == "loop_multiply_fusion"
    assert node.code.cubin.startswith(b"\x7fELF")
    assert node.shape == LaunchShape((1, 1, 1), (5, 1, 1))
    assert node.parameters == (*step.reads, *step.writes)
    assert node.written == (False, True)
    assert node.begins_with_wait


@pytest.mark.usefixtures("recorded")
def test_recorded_product():
    program = read_program(read_recording("mm_f64"), name="mm_f64")
    (step,) = list_device_steps(program.steps)
    assert isinstance(step.node, MatmulNode)
    operands = dict(step.node.operands)
    assert set(step.reads) == {operands["a"], operands["b"]}
    assert set(step.writes) == {operands["d"], operands["workspace"]}
    kinds = [each.kind.value for each in program.allocations]
    assert sorted(kinds) == ["output", "parameter", "parameter", "temporary"]


def test_allocations_by_what_they_hold():
    program = decode_executable(make_program(make_kernel()), name="step")
    assert [each.kind.value for each in program.allocations] == [
        "output",
        "parameter",
        "parameter",
        "unused",
        "unused",
    ]
    assert [each.parameter for each in program.allocations] == [None, 0, 1, None, None]


def test_a_donated_parameter_is_updated_in_place():
    text = (
        "output_info_map { output_info { allocation_index: 1 alias_config { kind: MAY_ALIAS } } }"
    )
    program = make_program(make_kernel(((2, 0, 32), (1, 0, 32)), (False, True)))
    del program.output_info_map[:]
    text_format.Merge(text, program)
    decoded = decode_executable(program, name="step")
    assert decoded.outputs == ("#1",)
    assert decoded.allocations[1].kind is AllocationKind.PARAMETER
    assert decoded.allocations[0].kind is AllocationKind.UNUSED


def test_results_of_a_tuple_in_their_order():
    program = make_program(make_kernel())
    result = program.program_shape.result
    array = type(result)()
    array.CopyFrom(result)
    result.Clear()
    result.element_type = (
        result.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_name["TUPLE"].number
    )
    result.tuple_shapes.extend([array, array, array])
    text = " ".join(
        f"output_info_map {{ shape_index {{ indexes: {index} }}"
        f" output_info {{ allocation_index: {number} }} }}"
        for index, number in ((2, 0), (0, 3), (1, 0))
    )
    text_format.Merge(text, program)
    assert decode_executable(program, name="step").outputs == ("#3", "#0", "#0")
    program.output_info_map.pop()
    assert "maps the results [(), (0,), (2,)] of 3" in catch_refusal(program).what


def test_all_that_is_not_lowered_is_in_one_error():
    call = 'custom_call_thunk { target_name: "cusolver_potrf_ffi" }'
    thunks = [
        f"{name_thunk('add')} {call}",
        f"{name_thunk('elsewhere')} infeed_thunk {{ }}",
        f"{name_thunk('square')} {call}",
        make_kernel(),
        make_copy((1, 0, 32), (3, 500, 32), 32, name="too_far"),
    ]
    error = catch_refusal(make_program(*thunks))
    error_lines.match(
        error,
        "`step` has work that cannot be lowered: custom_call (2), infeed (1), "
        "device_to_device_copy",
        "custom_call at /home/me/train.py:7 in step, jit(step)/add, HLO `add`; infeed at HLO "
        "`elsewhere`; "
        "custom_call at HLO `square`; device_to_device_copy at HLO `too_far`",
        "a CUDA graph is built here from kernels, memcpys, memsets, calls, branches and loops; "
        "custom_call calls cusolver_potrf_ffi through the interface before jax.ffi "
        "(api_version_unspecified), whose functions say neither what they enqueue nor that they "
        "failed; device_to_device_copy names bytes 500 to 532 of allocation #3",
        'use mode="partial"',
    )


def test_many_thunks_are_counted_not_listed():
    error = catch_refusal(
        make_program(*[f"{name_thunk(f'w{i}')} while_thunk {{ }}" for i in range(20)])
    )
    assert "while (20)" in error.what
    assert error.where.endswith("HLO `w7`; and 12 more")


def test_many_thunks_of_one_kind_hide_no_other():
    thunks = [f"{name_thunk(f'w{i}')} while_thunk {{ }}" for i in range(200)]
    call = 'custom_call_thunk { target_name: "cusolver_potrf_ffi" }'
    error = catch_refusal(make_program(*thunks, f"{name_thunk('square')} {call}"))
    assert error.where.endswith("HLO `w6`; custom_call at HLO `square`; and 193 more")
    assert len(error.refused) == 201


def change(path: str, value: Any):
    """Returns a function that sets one field, such as ``buffer_allocations.values[0].color``."""

    def apply(program: Any) -> None:
        exec(f"program.{path} = value", {"program": program, "value": value})

    return apply


def merge(text: str):
    return lambda program: text_format.Merge(text, program)


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


@pytest.mark.parametrize(
    ("dimensions", "order", "is_dense"),
    [
        ((2, 3, 4), (2, 1, 0), True),
        ((2, 3, 4), (0, 1, 2), False),
        ((2, 1, 4), (1, 2, 0), True),
        ((1, 1), (0, 1), True),
        ((0, 3), (0, 1), True),
        ((), (), True),
    ],
)
def test_arrays_lie_in_rows(dimensions: Any, order: Any, is_dense: bool):
    program = make_program(make_kernel())
    shape = program.program_shape.result
    shape.ClearField("dimensions")
    shape.ClearField("is_dynamic_dimension")
    shape.dimensions.extend(dimensions)
    shape.layout.ClearField("minor_to_major")
    shape.layout.minor_to_major.extend(order)
    if is_dense:
        assert decode_executable(program, name="step").outputs == ("#0",)
        return
    assert "whose axes lie in the order [0, 1, 2], innermost first" in catch_refusal(program).what


def test_a_parameter_that_is_not_donated_is_never_written():
    error = catch_refusal(make_program(make_kernel(((2, 0, 32), (1, 0, 32)), (False, True))))
    assert "writes into the parameter #1 at `add`" in error.what


def test_a_constant_is_never_written():
    constant = "buffer_allocations { values { index: 5 size: 4 is_constant: true } }"
    constant += ' constants { symbol_name: "c" allocation_index: 5 content { data: "abcd" } }'
    program = make_program(make_kernel(), make_copy((1, 0, 4), (5, 0, 4), 4), text=constant)
    assert "writes into the constant #5 at `copy`" in catch_refusal(program).what


@pytest.mark.parametrize("count", [0, 2])
def test_a_constant_has_one_entry(count: int):
    text = "buffer_allocations { values { index: 5 size: 4 is_constant: true } }"
    entry = ' constants { symbol_name: "c" allocation_index: 5 content { data: "abcd" } }'
    read = make_copy((5, 0, 4), (3, 0, 4), 4)
    program = make_program(make_kernel(), read, text=text + entry * count)
    assert f"has {count} constants for allocation #5" in catch_refusal(program).what
    unread = make_program(make_kernel(), text=text + entry * count)
    kinds = [each.kind for each in decode_executable(unread, name="step").allocations]
    assert kinds[5] is AllocationKind.UNUSED


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


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("setting", "nbytes"), [(None, None), (":64:1", 64 << 10), (":0:0", 0)])
def test_no_more_workspace_is_planned_than_is_permitted(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, nbytes: int | None
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    runtime = types.SimpleNamespace(serialize=lambda: read_recording("mm_f64"))
    executable = types.SimpleNamespace(runtime_executable=lambda: runtime)
    region: Any = types.SimpleNamespace(name="mm_f64")
    compiler = make_compiler(takes_kernels=True)
    (step,) = list_device_steps(compile_gpu._read(executable, region, compiler).steps)
    assert isinstance(step.node, MatmulNode)
    workspace = dict(step.node.operands)["workspace"]
    assert workspace.nbytes > 1 << 20 if nbytes is None else workspace.nbytes == nbytes
