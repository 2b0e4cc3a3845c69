"""Kernel thunks: launches, parameters, what they overwrite."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from tests.fakes.machine_code import make_waiting_image
from tests.fakes.xla_programs import make_kernel, make_program, name_thunk, piece
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.kernels import find_overwritten
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    FillNode,
    KernelCode,
    KernelNode,
    LaunchShape,
    Swizzle,
    TensorMap,
)
from tracegraph.runtime.errors import UnsupportedError

A, B, OUT = BufferUse("#1", 0, 32), BufferUse("#2", 0, 32), BufferUse("#0", 0, 32)


def decode(*thunks: str, text: str = "") -> Any:
    return decode_executable(make_program(*thunks, text=text), name="step")


def decode_kernel(program: Any) -> Any:
    """Returns the only step of a program; its node is a KernelNode."""
    (step,) = list_device_steps(decode_executable(program, name="step").steps)
    assert isinstance(step.node, KernelNode)
    return step


def decode_node(thunk: str) -> KernelNode:
    node = decode(thunk).steps[-1].node
    assert isinstance(node, KernelNode)
    return node


def catch_refusal(*thunks: str, text: str = "") -> str:
    with pytest.raises(UnsupportedError) as caught:
        decode(*thunks, text=text)
    return caught.value.why


def edit(path: str, value: Any = None, *, thunk: str = "") -> Any:
    """Returns a program with one kernel in which a field is set, or cleared."""
    program = make_program(thunk or make_kernel())
    kernel = program.thunks[0].custom_kernel_thunk
    *parents, field = path.split(".")
    for parent in parents:
        kernel = getattr(kernel, parent)
    if value is None:
        kernel.ClearField(field)
    else:
        setattr(kernel, field, value)
    return program


def catch_refused_edit(path: str, value: Any = None) -> str:
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(edit(path, value), name="step")
    return caught.value.why


def test_a_kernel_with_all_that_it_may_have():
    text = """use_pdl: true custom_kernel {
      shared_memory_bytes: 100000 cluster_dim { coordinates { x: 2 y: 1 z: 1 } } }"""
    image = make_waiting_image("add_kernel")
    waiting = edit("custom_kernel.kernel_spec.cubin.data", image, thunk=make_kernel(text=text))
    (step,) = list_device_steps(decode_executable(waiting, name="step").steps)
    assert step.node == KernelNode(
        "add",
        KernelCode("add_kernel", image),
        LaunchShape((4, 1, 1), (8, 1, 1), (2, 1, 1), 100000),
        (A, B, OUT),
        (False, False, True),
        begins_with_wait=True,
    )
    assert (step.reads, step.writes) == ((A, B), (OUT,))
    # Both say so: XLA, and the code.
    assert not decode_node(make_kernel(text="use_pdl: true")).begins_with_wait
    silent = edit("custom_kernel.kernel_spec.cubin.data", image, thunk=make_kernel())
    (step,) = list_device_steps(decode_executable(silent, name="step").steps)
    assert isinstance(step.node, KernelNode)
    assert not step.node.begins_with_wait


def test_equal_kernels_are_one():
    first, second, other = decode(make_kernel(), make_kernel(), make_kernel(name="square")).steps
    assert first.node.code is second.node.code
    assert first.node.code != other.node.code


def test_kernels_of_one_code_keep_their_own_launch():
    wider = "custom_kernel { block_dims { coordinates { x: 9 y: 1 z: 1 } } }"
    first, second = decode(make_kernel(), make_kernel(text=wider)).steps
    assert first.node.code is second.node.code
    assert (first.node.shape.grid, second.node.shape.grid) == ((4, 1, 1), (9, 1, 1))


def test_one_description_for_another_number_of_arguments():
    """Without a packing, it does not say how many there are."""
    program = make_program(make_kernel(), make_kernel(((1, 0, 32), (0, 0, 32)), (False, True)))
    for thunk in program.thunks:
        spec = thunk.custom_kernel_thunk.custom_kernel.kernel_spec
        spec.ClearField("kernel_args_packing_spec")
        spec.arity = 0
    steps: Any = decode_executable(program, name="step").steps
    assert [step.node.parameters for step in steps] == [(A, B, OUT), (A, OUT)]


def test_each_of_two_equal_kernels_is_refused():
    large = make_kernel(text="custom_kernel { shared_memory_bytes: 300000 }")
    with pytest.raises(UnsupportedError) as caught:
        decode(large, large)
    assert "custom_kernel (2)" in caught.value.what
    assert "has 300000 bytes of shared memory" in caught.value.why


def test_parameters_of_plain_bytes_and_in_another_order():
    program = make_program(make_kernel())
    spec = program.thunks[0].custom_kernel_thunk.custom_kernel.kernel_spec
    entries = spec.kernel_args_packing_spec.kernel_arguments
    entries[0].relocations[0].argument_index = 2
    entries[2].relocations[0].argument_index = 0
    text_format.Merge('kernel_arguments { data: "\\007\\000" }', spec.kernel_args_packing_spec)
    spec.arity = 4
    step = decode_kernel(program)
    assert step.node.parameters == (OUT, B, A, b"\7\0")
    assert step.node.written == (True, False, False, False)
    assert (step.reads, step.writes) == ((B, A), (OUT,))


def test_without_a_packing_all_arguments_are_parameters():
    program = edit("custom_kernel.kernel_spec.kernel_args_packing_spec")
    step = decode_kernel(program)
    assert step.node.parameters == (A, B, OUT)


def test_an_empty_argument_is_passed_and_of_no_consequence():
    places = ((1, 16, 0), (2, 0, 32), (0, 0, 32))
    step = decode_kernel(make_program(make_kernel(places)))
    assert step.node.parameters[0] == BufferUse("#1", 16, 0)
    assert (step.reads, step.writes) == ((B,), (OUT,))


@pytest.mark.parametrize(
    ("place", "element_bytes"), [((0, 0, 32), 4), ((3, 0, 30), 1), ((3, 2, 32), 1)]
)
def test_zeroed_outputs_are_filled_first_and_read(place: Any, element_bytes: int):
    thunk = make_kernel(
        ((1, 0, 32), (2, 0, 32), place), text="zeroed_output_buffer_indices: 2"
    )  # fmt: skip
    fill, kernel = decode(thunk).steps
    target = BufferUse(f"#{place[0]}", *place[1:])
    assert fill.node == FillNode("add", target, 0, element_bytes)
    assert (fill.reads, fill.writes) == ((), (target,))
    assert (kernel.reads, kernel.writes) == ((A, B, target), (target,))


OVERWRITTEN = {
    "plain": (((1, 0, 32), (2, 0, 32), (0, 0, 32)), (0, 0, 1), "add", {2}),
    "equal operands share": (((1, 0, 32), (0, 0, 32)), (0, 1), "square", {1}),
    "equal operands apart": (((1, 0, 32), (1, 0, 32), (0, 0, 32)), (0, 0, 1), "square", {2}),
    "unknown instruction": (((1, 0, 32), (2, 0, 32), (0, 0, 32)), (0, 0, 1), "other", set()),
    "argument missing": (((1, 0, 32), (0, 0, 32)), (0, 1), "add", set()),
    "argument too many": (((1, 0, 32),) * 3 + ((0, 0, 32),), (0, 0, 0, 1), "add", set()),
    "in place": (((0, 0, 32), (2, 0, 32), (0, 0, 32)), (1, 0, 1), "add", set()),
    "overlap": (((0, 0, 16), (2, 0, 32), (0, 8, 24)), (0, 0, 1), "add", set()),
    "operand written": (((3, 0, 32), (2, 0, 32), (0, 0, 32)), (1, 0, 1), "add", set()),
    "result not written": (((1, 0, 32), (2, 0, 32), (0, 0, 32)), (0, 0, 0), "add", set()),
}


@pytest.mark.parametrize(
    ("places", "written", "name", "expected"), OVERWRITTEN.values(), ids=OVERWRITTEN.keys()
)
def test_only_what_is_proven_counts_as_overwritten(
    places: Any, written: Any, name: str, expected: set[int]
):
    flags = [bool(flag) for flag in written]
    (step,) = decode(make_kernel(places, flags, name=name)).steps
    uses = [BufferUse(f"#{index}", offset, size) for index, offset, size in places]
    assert set(step.writes) == {use for use, flag in zip(uses, flags, strict=True) if flag}
    assert set(step.reads) == {use for i, use in enumerate(uses) if i not in expected}


def test_results_of_a_tuple_count_one_by_one():
    instruction = Computations(make_program().hlo_module_with_config.hlo_module)[1]["add"]
    array = type(instruction.shape)()
    array.CopyFrom(instruction.shape)
    instruction.shape.Clear()
    instruction.shape.tuple_shapes.extend([array, array])
    uses = [A, B, OUT, BufferUse("#3", 0, 32)]
    flags = [False, False, True, True]
    assert find_overwritten(instruction, uses, flags) == {2, 3}
    assert find_overwritten(instruction, [A, B, A, OUT], flags) == {3}
    instruction.shape.tuple_shapes[0].tuple_shapes.extend([array])
    assert find_overwritten(instruction, uses, flags) == frozenset()


TILE = """tma_metadata { arg_index_to_tma_info { key: 1 value {
  element_size: 4 global_dims: 4 global_dims: 2 global_strides: 16 box_dims: 2 box_dims: 2
  element_strides: 1 element_strides: 1 swizzle: SWIZZLE_BYTES64 interleave: INTERLEAVE_BYTES16
  l2_promotion: L2_PROMOTION_BYTES256 float_oob_fill: FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA } } }"""


def test_tensor_maps_stand_for_their_argument():
    step = decode_kernel(make_program(make_kernel(text=TILE)))
    tile = TensorMap(B, 4, (4, 2), (16,), (2, 2), (1, 1), 1, Swizzle.BYTES_64, 3, True)
    assert step.node.parameters == (A, tile, OUT)
    assert (step.reads, step.writes) == ((A, B), (OUT,))


TILE_FAULTS = {
    "argument": ("key: 1", "key: 3", "describes a tile of argument 3 of 3"),
    "element": ("element_size: 4", "element_size: 3", "describes a tile of dims (4, 2)"),
    "rank": ("global_strides: 16", "", "describes a tile of dims (4, 2), strides ()"),
    "box": ("box_dims: 2", "box_dims: 0", "describes a tile of dims"),
    "extent": ("global_strides: 16", "global_strides: 32", "tiled array of 48 bytes in an"),
    "swizzle": ("SWIZZLE_BYTES64", "77", "TmaDescriptorProto.swizzle to 77"),
}


@pytest.mark.parametrize(("old", "new", "expected"), TILE_FAULTS.values(), ids=TILE_FAULTS.keys())
def test_tensor_maps_that_do_not_hold_together(old: str, new: str, expected: str):
    assert expected in catch_refusal(make_kernel(text=TILE.replace(old, new, 1)))


FAULTS = {
    "no code": ("custom_kernel.kernel_spec.cubin", None, "has no compiled kernel"),
    "no symbol": ("custom_kernel.kernel_spec.kernel_name", None, "has no compiled kernel"),
    "arity": ("custom_kernel.kernel_spec.arity", 2, "packs 3 parameters for a kernel that takes 2"),
    "no grid": ("custom_kernel.block_dims", None, "has a grid of (0, 0, 0)"),
    "grid": ("custom_kernel.block_dims.coordinates.y", 65536, "has a grid of (4, 65536, 1)"),
    "block": ("custom_kernel.thread_dims.coordinates.x", 2048, "has a block of (2048, 1, 1)"),
    "threads": ("custom_kernel.thread_dims.coordinates.y", 512, "has a block of 4096 threads"),
    "cluster": ("custom_kernel.cluster_dim.coordinates.x", 17, "has a cluster of (17, 0, 0)"),
    "shared": ("custom_kernel.shared_memory_bytes", -8, "has -8 bytes of shared memory"),
}


@pytest.mark.parametrize(("path", "value", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_launches_that_do_not_hold_together(path: str, value: Any, expected: str):
    assert f"custom_kernel {expected}" in catch_refused_edit(path, value)


@pytest.mark.parametrize("text", [".version 7.8", ".version 7.8\\0"])
def test_ptx_ends_with_a_nul_for_the_driver(text: str):
    ptx = f'custom_kernel {{ kernel_spec {{ ptx {{ data: "{text}" }} }} }}'
    assert decode_node(make_kernel(text=ptx)).code == KernelCode("add_kernel", b".version 7.8\0")


def test_empty_ptx():
    ptx = 'custom_kernel { kernel_spec { ptx { data: "" } } }'
    assert "has no compiled kernel" in catch_refusal(make_kernel(text=ptx))


def test_code_that_only_xla_can_find():
    thunk = make_kernel(
        text='custom_kernel { kernel_spec { in_process_symbol { persistent_name: "topk" } } }'
    )
    expected = "sets stream_executor.KernelLoaderSpecProto.in_process_symbol, whose meaning"
    assert expected in catch_refusal(thunk)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kernel_arguments { }", "a parameter without an argument and without bytes"),
        ("kernel_arguments { relocations { argument_index: 0 } }", "kind to KIND_UNSPECIFIED"),
        (
            "kernel_arguments { relocations { kind: KIND_BITS64_ABSOLUTE argument_index: 3 } }",
            "passes argument 3 of 3",
        ),
        (
            "kernel_arguments { relocations { kind: KIND_BITS64_ABSOLUTE } "
            "relocations { kind: KIND_BITS64_ABSOLUTE } }",
            "mixes addresses and bytes",
        ),
        (
            'kernel_arguments { relocations { kind: KIND_BITS64_ABSOLUTE } data: "0123456789" }',
            "mixes addresses and bytes",
        ),
    ],
)
def test_parameters_that_do_not_hold_together(text: str, expected: str):
    packing = f"custom_kernel {{ kernel_spec {{ kernel_args_packing_spec {{ {text} }} }} }}"
    assert expected in catch_refusal(make_kernel(text=packing))


def test_flags_and_zeroed_arguments_that_do_not_hold_together():
    assert "has 3 arguments and says of 2 whether" in catch_refusal(
        make_kernel(written=(False, True))
    )
    for index in (1, 3, -1):
        thunk = make_kernel(text=f"zeroed_output_buffer_indices: {index}")
        assert f"zeroes argument {index}, which is no output" in catch_refusal(thunk)


OLD = f"""{name_thunk("add")} kernel_thunk {{
  args {{ {piece((1, 0, 32))} }} args {{ {piece((2, 0, 32))} }} args {{ {piece((0, 0, 32))} }}
  written: false written: false written: true kernel_name: "add_1" shmem_bytes: 64
  launch_dimensions {{
    block_counts {{ coordinates {{ x: 2 y: 1 z: 1 }} }}
    thread_counts_per_block {{ coordinates {{ x: 4 y: 1 z: 1 }} }}
  }}
}}"""


def test_kernels_of_the_program_s_own_image():
    (step,) = decode(OLD, text='binary: "image"').steps
    assert step.node == KernelNode(
        "add",
        KernelCode("add_1", b"image"),
        LaunchShape((2, 1, 1), (4, 1, 1), shared_bytes=64),
        (A, B, OUT),
        (False, False, True),
    )
    assert (step.reads, step.writes) == ((A, B), (OUT,))


def test_an_image_that_may_refer_to_constants_is_not_used():
    assert "has no compiled kernel" in catch_refusal(OLD)
    constant = 'binary: "image" constants { symbol_name: "c" allocation_index: -1 }'
    assert "has no compiled kernel" in catch_refusal(OLD, text=constant)
