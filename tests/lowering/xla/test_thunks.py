"""Thunks of memory and order: memcpys, memsets, sequences, slices at constant offsets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf import text_format

from tests.fakes.xla_programs import (
    F32X8,
    Place,
    make_copy,
    make_kernel,
    make_program,
    name_thunk,
    piece,
    shaped,
)
from tests.fakes.xla_recordings import read_recording, recorded_schema
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.xla import allow_list, thunks
from tracegraph.lowering.xla.allow_list import ALLOWED
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.kernels import decode_custom_kernel
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode
from tracegraph.runtime.errors import UnsupportedError


def decode(*thunks: str) -> tuple[DeviceStep, ...]:
    return tuple(list_device_steps(decode_executable(make_program(*thunks), name="step").steps))


def catch_refusal(*thunks: str) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        decode(*thunks)
    return caught.value


def test_copies_of_device_memory():
    source, target = BufferUse("#1", 4, 24), BufferUse("#3", 256, 24)
    expected = DeviceStep(CopyNode("copy", source, target), (source,), (target,))
    thunk = make_copy((1, 4, 28), (3, 256, 32), 24)
    bare = thunk.replace("device_to_device_copy_thunk {", "", 1)[:-1]
    assert decode(thunk, bare) == (expected, expected)


@pytest.mark.parametrize(
    "thunk",
    [
        make_copy((1, 0, 32), (3, 0, 32), 0),
        make_copy((3, 8, 32), (3, 8, 32), 32),
        f"memzero_thunk {{ {shaped('dest_buffer', (3, 8, 0))} }}",
        f"memset32bit_value_thunk {{ dest_buffer {{ {piece((3, 8, 0))} }} value: 1 }}",
        "async_done_thunk { async_execution_id: 3 }",
        "sequential_thunk { }",
    ],
)
def test_work_that_does_nothing_has_no_step(thunk: str):
    assert decode(thunk) == ()


@pytest.mark.parametrize(
    ("thunk", "node"),
    [
        (
            f"memzero_thunk {{ {shaped('dest_buffer', (3, 8, 32))} }}",
            FillNode("f", BufferUse("#3", 8, 32), 0, 4),
        ),
        (
            f"memzero_thunk {{ {shaped('dest_buffer', (3, 8, 33))} }}",
            FillNode("f", BufferUse("#3", 8, 33), 0, 1),
        ),
        (
            f"memset32bit_value_thunk {{ dest_buffer {{ {piece((3, 8, 4))} }} value: 4294967295 }}",
            FillNode("f", BufferUse("#3", 8, 4), 4294967295, 4),
        ),
        (
            f"replica_id_thunk {{ dest_buffer {{ {piece((3, 8, 4))} }} }}",
            FillNode("f", BufferUse("#3", 8, 4), 0, 4),
        ),
        (
            f"partition_id_thunk {{ dest_buffer {{ {piece((3, 8, 4))} }} }}",
            FillNode("f", BufferUse("#3", 8, 4), 0, 4),
        ),
    ],
)
def test_fills(thunk: str, node: FillNode):
    (step,) = decode(f"{name_thunk('f')} {thunk}")
    assert step == DeviceStep(node, (), (node.target,))


def test_a_thunk_without_a_name_has_its_number():
    (step,) = decode(
        f"thunk_info {{ thunk_id: 9 }} memzero_thunk {{ {shaped('dest_buffer', (3, 0, 4))} }}"
    )
    assert step.name == "thunk 9"


def test_sequences_stand_in_their_place():
    names = [f"c{i}" for i in range(6)]
    copies = [make_copy((1, 0, 4), (3, 256, 4), 4, name=name) for name in names]
    inner = (
        f"async_start_thunk {{ thunks {{ thunks {{ {copies[2]} }} thunks {{ {copies[3]} }} }} }}"
    )
    thunks = (
        copies[0],
        f"sequential_thunk {{ thunks {{ {copies[1]} }} thunks {{ {inner} }} }}",
        copies[4],
        "async_done_thunk { }",
        copies[5],
    )
    assert [step.name for step in decode(*thunks)] == names


def test_refusals_inside_of_sequences_are_all_named():
    inner = " ".join(f"thunks {{ {name_thunk(name)} infeed_thunk {{ }} }}" for name in ("a", "b"))
    error = catch_refusal(
        f"sequential_thunk {{ {inner} }}", f"{name_thunk('c')} infeed_thunk {{ }}"
    )
    assert error.what == "`step` has work that cannot be lowered: infeed (3)"
    assert error.where == "infeed at HLO `a`; infeed at HLO `b`; infeed at HLO `c`"


FAULTS = {
    "no allocation": (make_copy((9, 0, 4), (3, 0, 4), 4), "names allocation #9 of 5"),
    "negative": (make_copy((-1, 0, 4), (3, 0, 4), 4), "names allocation #-1 of 5"),
    "no memory": (make_copy((4, 0, 4), (3, 0, 4), 4), "names allocation #4, which is no device"),
    "beyond": (make_copy((1, 16, 32), (3, 0, 32), 4), "names bytes 16 to 48 of allocation #1"),
    "before": (make_copy((1, -4, 8), (3, 0, 32), 4), "names bytes -4 to 4 of allocation #1"),
    "size": (make_copy((1, 0, -4), (3, 0, 32), 4), "names bytes 0 to -4 of allocation #1"),
    "more than there is": (make_copy((1, 0, 8), (3, 0, 32), 9), "copies 9 bytes of 8 to 32"),
    "less than nothing": (make_copy((1, 0, 8), (3, 0, 8), -1), "copies -1 bytes of 8 to 8"),
    "onto itself": (make_copy((3, 0, 32), (3, 16, 32), 32), "a place that overlaps theirs"),
    "no place": (
        "device_to_device_copy_thunk { copy_thunk { mem_size: 4 } }",
        "names no bytes where an array is needed",
    ),
    "odd memset": (
        f"memset32bit_value_thunk {{ dest_buffer {{ {piece((3, 0, 6))} }} }}",
        "sets 6 bytes at 0 to a value of four",
    ),
    "odd place": (
        f"memset32bit_value_thunk {{ dest_buffer {{ {piece((3, 2, 8))} }} }}",
        "sets 8 bytes at 2 to a value of four",
    ),
    "wide number": (
        f"replica_id_thunk {{ dest_buffer {{ {piece((3, 0, 8))} }} }}",
        "writes its number to 8 bytes",
    ),
}


@pytest.mark.parametrize(("thunk", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults(thunk: str, expected: str):
    assert expected in catch_refusal(make_kernel(), thunk).why


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rng_seed", "rng_seed takes a new seed from the host at each run"),
        ("select_k", "select_k launches kernels of RAFT, which are inside of XLA"),
        ("norm", "norm calls a layer norm of cuDNN"),
        ("gemm", "gemm calls cuBLAS as XLA did before"),
    ],
)
def test_kinds_that_are_refused_say_why(kind: str, reason: str):
    error = catch_refusal(f"{name_thunk('it')} {kind}_thunk {{ }}")
    assert error.what == f"`step` has work that cannot be lowered: {kind} (1)"
    assert reason in error.why


@pytest.mark.parametrize("stream", ["computation", "communication"])
def test_async_regions_are_their_thunks_on_whichever_stream(stream: str):
    copies = [make_copy((1, 0, 8), (3, 8 * i, 8), 8, name=f"copy{i}") for i in range(3)]
    steps = decode(
        f"async_start_thunk {{ async_execution_id: 2 {stream}_stream_id: 1"
        f" thunks {{ thunks {{ {copies[0]} }} }} }}",
        copies[1],
        "async_done_thunk { async_execution_id: 2 }",
        copies[2],
    )
    assert [step.name for step in steps] == ["copy0", "copy1", "copy2"]
    assert steps[0].writes == (BufferUse("#3", 0, 8),)


def test_a_thunk_without_a_kind_is_refused():
    assert catch_refusal(name_thunk("new")).what.endswith("cannot be lowered: unknown (1)")


@pytest.mark.parametrize("kind", ["device_to_host", "host_to_device"])
def test_copies_from_and_to_host_memory(kind: str):
    thunk = make_copy((1, 0, 4), (3, 0, 4), 4)
    assert decode(thunk.replace("device_to_device", kind)) == decode(thunk)


def test_a_field_that_is_not_interpreted_refuses_its_thunk_only():
    program = make_program(make_kernel())
    text = 'custom_kernel { kernel_spec { in_process_symbol { persistent_name: "topk" } } }'
    text_format.Merge(text, program.thunks[0].custom_kernel_thunk)
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(program, name="step")
    assert caught.value.what == "`step` has work that cannot be lowered: custom_kernel (1)"
    assert "KernelLoaderSpecProto.in_process_symbol, whose meaning is not known" in caught.value.why


def test_products_that_are_refused_keep_their_reason():
    program = read_executable(read_recording("mm_f64"), recorded_schema())
    product: Any = program
    product = product.thunks[0].cublas_lt_matmul_thunk
    product.d.slice.size = 8
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(program, name="mm")
    assert caught.value.what == "`mm` has work that cannot be lowered: cublas_lt_matmul (1)"
    assert "has the operand `d` of 8 bytes: its layout takes" in caught.value.why
    product.a.slice.offset = 1 << 40
    with pytest.raises(UnsupportedError, match="cublas_lt_matmul names bytes 1099511627776 to"):
        decode_executable(program, name="mm")


def make_slice_fusion(
    parameter: str = "parameter_number: 1",
    result: str = "update_config { byte_offset: 384 } update_offsets { }",
    places: tuple[Place, ...] = ((3, 0, 512), (1, 0, 32)),
    sizes: tuple[int, ...] = (32, 32),
    copied: int = 32,
) -> str:
    """A copy of a whole parameter into a slice of the scratch, which is also the fusion's first."""
    buffers = " ".join(f"parameter_buffers {{ {piece(place)} }}" for place in places)
    local = " ".join(f"slice_allocations {{ index: {i} size: {n} }}" for i, n in enumerate(sizes))
    return f"""dynamic_slice_fusion_thunk {{
      parameters {{ {parameter} }} results {{ {result} }} {buffers} {local}
      result_buffers {{ {piece((3, 0, 512))} }}
      embedded_thunks {{ thunks {{ {make_copy((0, 0, 32), (1, 0, 32), copied)} }} }}
    }}"""


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        ("update_config { byte_offset: 384 }", 384),
        ("update_config { }", 0),
        ("update_config { byte_offset: 500 }", 480),
        ("update_config { byte_offset: -8 loop_index: 1 }", 0),
    ],
)
def test_slices_at_constant_offsets_are_copies_to_fixed_places(config: str, offset: int):
    thunk = make_slice_fusion(result=f"{config} update_offsets {{ }}")
    (step,) = decode(f"async_start_thunk {{ thunks {{ thunks {{ {thunk} }} }} }}")
    source, target = BufferUse("#1", 0, 32), BufferUse("#3", offset, 32)
    assert step == DeviceStep(CopyNode("copy", source, target), (source,), (target,))


SLICE_FAULTS = {
    "stride": ({"result": "update_config { byte_stride: 8 }"}, "an offset that a loop moves"),
    "offset on the device": ({"result": "update_offsets { }"}, "known on the device only"),
    "part without offset": ({"result": ""}, "known on the device only"),
    "too large": ({"sizes": (32, 513)}, "takes 513 bytes of 512"),
    "negative": ({"sizes": (-1, 32)}, "takes -1 bytes of 32"),
    "places": ({"sizes": (32,)}, "has 2 slices and 1 places"),
    "number": ({"parameter": "parameter_number: 2"}, "names buffer 2 of 2"),
    "result": ({"result": "result_number: 1"}, "names buffer 1 of 1"),
    "inside": ({"copied": 33}, "copies 33 bytes of 32 to 32"),
    "whole of another size": ({"sizes": (16, 32)}, "known on the device only"),
}


def test_kernels_inside_of_slices_prove_nothing_by_their_names():
    copy = f"thunks {{ {make_copy((0, 0, 32), (1, 0, 32), 32)} }}"
    kernel = make_kernel(((0, 0, 32), (0, 0, 16), (1, 0, 32)))
    thunk = make_slice_fusion()
    assert copy in thunk
    (step,) = decode(thunk.replace(copy, f"thunks {{ {kernel} }}"))
    source, part, target = (
        BufferUse("#1", 0, 32),
        BufferUse("#1", 0, 16),
        BufferUse("#3", 384, 32),
    )
    assert (step.reads, step.writes) == ((source, part, target), (target,))


# A loop whose body has the instruction `add`.
LOOP = f"""
hlo_module_with_config {{ hlo_module {{
  computations {{ id: 1 instructions {{ name: "while" called_computation_ids: 2 }} }}
  computations {{ id: 2 instructions {{
    name: "add" id: 12 opcode: "fusion" shape {{ {F32X8} }} operand_ids: 10 operand_ids: 11
  }} }}
}} }}
"""


def test_iterations_are_decoded_as_if_each_were_the_only_one(monkeypatch: pytest.MonkeyPatch):
    fill = f"{name_thunk('add')} memzero_thunk {{ {shaped('dest_buffer', (0, 0, 16))} }}"
    moved = "update_config { byte_stride: 32 } update_offsets { }"
    # It is no thunk of the body itself, and goes on with what those of its name have written.
    behind = f"async_start_thunk {{ thunks {{ thunks {{ {make_kernel()} }} }} }}"
    body = (fill, make_kernel(), make_slice_fusion(result=moved), behind)
    inside = " ".join(f"thunks {{ {each} }}" for each in body)
    thunk = (
        f"{name_thunk('while')} while_thunk {{ trip_count: 3 body_thunk_sequence {{ {inside} }} }}"
    )
    read: list[str] = []

    def decode_kernel(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
        read.append(name)
        return decode_custom_kernel(message, name, scope)

    monkeypatch.setitem(thunks._DECODERS, "custom_kernel", decode_kernel)
    program = make_program(thunk, text=LOOP)
    steps = decode_executable(program, name="step").steps
    assert len(read) == 1 + 3
    slices = [step.writes for step in steps if step.name.startswith("copy")]
    assert slices == [(BufferUse("#3", 32 * index, 32),) for index in range(3)]
    monkeypatch.setattr(thunks, "_SAME_IN_ALL_ITERATIONS", frozenset())
    assert steps == decode_executable(program, name="step").steps
    assert len(read) == 4 + 6
    # Both kernels of an iteration go on with a result that was begun.
    result = BufferUse("#0", 0, 32)
    reading = [result in step.reads for step in steps if step.name.startswith("add@")]
    assert reading == [False, True, True] * 3


@pytest.mark.parametrize(
    ("program", "message", "field"),
    [
        ("mul2", "xla.gpu.ThunkInfoProto", "thunk_id"),
        ("mul2", "xla.gpu.CustomKernelThunkProto", "use_pdl"),
        ("mul2", "xla.ShapedSliceProto", "shape"),
        ("mul2", "xla.buffer_assignment.BufferAllocationSliceProto", "element_type"),
        ("mul2", "stream_executor.gpu.TmaMetadataProto", "arg_index_to_tma_info"),
        ("mm_f64", "xla.gpu.ThunkInfoProto", "thunk_id"),
        ("mm_f64", "xla.ShapedSliceProto", "shape"),
        ("mm_f64", "xla.buffer_assignment.BufferAllocationSliceProto", "element_type"),
    ],
)
def test_every_message_of_a_thunk_is_checked(
    program: str, message: str, field: str, monkeypatch: pytest.MonkeyPatch
):
    executable: Any = read_executable(read_recording(program), recorded_schema())
    if program == "mul2":
        tile = executable.thunks[0].custom_kernel_thunk.tma_metadata.arg_index_to_tma_info[0]
        tile.element_size = 4
    listed = ALLOWED[message]
    reduced = dataclasses.replace(
        listed,
        read=listed.read - {field},
        ignored={name: why for name, why in listed.ignored.items() if name != field},
    )
    monkeypatch.setitem(ALLOWED, message, reduced)
    for cached in ("_is_listed", "_judge"):
        monkeypatch.setattr(allow_list, cached, getattr(allow_list, cached).__wrapped__)
    with pytest.raises(UnsupportedError, match=f"sets {message}.{field}, whose meaning"):
        decode_executable(executable, name="f")


@pytest.mark.parametrize(("changes", "expected"), SLICE_FAULTS.values(), ids=SLICE_FAULTS.keys())
def test_slices_that_are_refused(changes: dict[str, Any], expected: str):
    assert expected in catch_refusal(make_slice_fusion(**changes)).why
