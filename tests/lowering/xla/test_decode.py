"""Compiled programs decode to steps, or to one error that names all that is not lowered."""

from __future__ import annotations

import types
from typing import Any

import pytest
from google.protobuf import text_format

from tests.fakes.compilers import make_compiler
from tests.fakes.xla_programs import make_copy, make_kernel, make_program, name_thunk
from tests.fakes.xla_recordings import read_recording, recorded_schema
from tests.oracles import error_lines
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.read_region import read_region
from tracegraph.lowering.xla import decode
from tracegraph.lowering.xla.decode import decode_executable, read_program
from tracegraph.lowering.xla.program import Allocation, AllocationKind
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode, LaunchShape
from tracegraph.runtime.errors import UnsupportedError


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
    (step,) = list_device_steps(read_region(executable, region, compiler).steps)
    assert isinstance(step.node, MatmulNode)
    workspace = dict(step.node.operands)["workspace"]
    assert workspace.nbytes > 1 << 20 if nbytes is None else workspace.nbytes == nbytes
