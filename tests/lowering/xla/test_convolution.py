"""Convolutions: XLA's description becomes what cuDNN is given, or is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf import text_format

from tests.fakes.xla_programs import edit_computation, make_program, name_thunk, piece
from tests.fakes.xla_recordings import read_files
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.schema import build_schema
from tracegraph.runtime.definition.cudnn_calls import (
    Activation,
    Algorithm,
    B,
    Convolution,
    Direction,
    Epilogue,
    Tensor,
    W,
    Window,
    X,
    Y,
    Z,
)
from tracegraph.runtime.definition.library_nodes import CudnnNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError

SIZE = 4096
ALLOCATIONS = "".join(f"values {{ index: {index} size: {SIZE} }} " for index in (5, 6, 7, 8, 9))
TEXT = f"buffer_allocations {{ {ALLOCATIONS} }}"
LAST, FIRST = (3, 2, 1, 0), (1, 3, 2, 0)
# Batch, features, height, width as `NHWC`; of the filter, output and input features and its size.
X_SHAPE, W_SHAPE, Y_SHAPE = (2, 6, 5, 4), (8, 3, 3, 4), (2, 6, 5, 8)
DNUMS = """
  input_batch_dimension: 0 input_feature_dimension: 3 input_spatial_dimensions: [1, 2]
  kernel_output_feature_dimension: 0 kernel_input_feature_dimension: 3
  kernel_spatial_dimensions: [1, 2]
  output_batch_dimension: 0 output_feature_dimension: 3 output_spatial_dimensions: [1, 2]
"""
SIDE = "size: 3 stride: 1 padding_low: 1 padding_high: 1 window_dilation: 1 base_dilation: 1"
CHOSEN = (
    "algo_id: 67 is_cudnn_frontend: true math_type: TENSOR_OP_MATH workspace_size { value: 64 }"
    " tuning_knobs { key: 9 value: 0 } tuning_knobs { key: 3 value: 7 }"
)
TENSORS = {
    X: Tensor("float32", (2, 4, 6, 5), (120, 1, 20, 4)),
    W: Tensor("float32", (8, 4, 3, 3), (36, 1, 12, 4)),
    Y: Tensor("float32", (2, 8, 6, 5), (240, 1, 40, 8)),
}
ONE_BY_ONE = Window((1, 1), (1, 1), (1, 1))


def shape(dims: tuple[int, ...], order: tuple[int, ...] = (), kind: str = "F32") -> str:
    """Returns the text of a shape; the innermost dimension first, by default the last."""
    places = order or tuple(reversed(range(len(dims))))
    texts = [
        f"element_type: {kind}",
        *(f"dimensions: {each} is_dynamic_dimension: false" for each in dims),
        f"layout {{ {' '.join(f'minor_to_major: {each}' for each in places)} }}",
    ]
    return " ".join(texts)


def make_thunk(
    kind: str = "FORWARD",
    shapes: tuple[str, str, str] = (shape(X_SHAPE), shape(W_SHAPE), shape(Y_SHAPE)),
    *,
    config: str = f"conv_result_scale: 1 algorithm {{ {CHOSEN} }}",
    window: str = f"dimensions {{ {SIDE} }} dimensions {{ {SIDE} }}",
    dnums: str = DNUMS,
    operands: int = 2,
    text: str = "",
) -> str:
    """Returns the text of a convolution of #5 and #6 to #7, with scratch in #3."""
    numbers = (5, 6, 8, 9)[:operands]
    uses = " ".join(
        f"operand_buffers {{ slice {{ {piece((number, 0, SIZE))} }} }}" for number in numbers
    )
    operand0, operand1, result = shapes
    return f"""{name_thunk("conv")} convolution_thunk {{
      conv_descriptor {{
        kind: {kind} backend_config {{ {config} }} window {{ {window} }} dnums {{ {dnums} }}
        operand0_shape {{ {operand0} }} operand1_shape {{ {operand1} }}
        result_shape {{ {result} }} feature_group_count: 1 scratch_size: 64
      }}
      {uses}
      result_buffers {{ slice {{ {piece((7, 0, SIZE))} }} }}
      scratch_buffer {{ {piece((3, 0, 64))} }}
      {text}
    }}"""


def decode(thunk: str, text: str = TEXT, check: Any = None) -> DeviceStep:
    program = make_program(thunk, text=text)
    decoded = decode_executable(program, name="step", check_call=check)
    (step,) = list_device_steps(decoded.steps)
    return step


def read_call(thunk: str, text: str = TEXT) -> Convolution:
    node = decode(thunk, text).node
    assert isinstance(node, CudnnNode)
    assert isinstance(node.call, Convolution)
    return node.call


def use(index: int) -> BufferUse:
    return BufferUse(f"#{index}", 0, SIZE)


def test_forward_has_tensors_window_and_algorithm() -> None:
    step = decode(make_thunk())
    scratch = BufferUse("#3", 0, 64)
    assert step.node == CudnnNode(
        "conv",
        Convolution(
            Direction.FORWARD,
            TENSORS[X],
            TENSORS[W],
            TENSORS[Y],
            ONE_BY_ONE,
            Algorithm(67, ((3, 7), (9, 0))),
            workspace_bytes=64,
        ),
        ((X, use(5)), (W, use(6)), (Y, use(7))),
        written=(Y,),
        workspace=scratch,
    )
    assert (step.reads, step.writes) == ((use(5), use(6)), (use(7), scratch))


@pytest.mark.parametrize(
    ("kind", "direction", "order"),
    [
        ("BACKWARD_DATA", Direction.BACKWARD_DATA, (Y, W, X)),
        ("BACKWARD_FILTER", Direction.BACKWARD_FILTER, (X, Y, W)),
    ],
)
def test_gradients_have_their_operands_in_the_place_of_the_forward_ones(
    kind: str, direction: Direction, order: tuple[int, int, int]
) -> None:
    by_uid = {X: shape(X_SHAPE), W: shape(W_SHAPE), Y: shape(Y_SHAPE)}
    step = decode(make_thunk(kind, (by_uid[order[0]], by_uid[order[1]], by_uid[order[2]])))
    node = step.node
    assert isinstance(node, CudnnNode)
    assert isinstance(node.call, Convolution)
    assert node.call.direction is direction
    assert (node.call.x, node.call.w, node.call.y) == (TENSORS[X], TENSORS[W], TENSORS[Y])
    assert node.operands == tuple(zip(order, (use(5), use(6), use(7)), strict=True))
    assert node.written == (order[2],)
    assert step.writes[0] == use(7)


def test_strides_follow_the_layout() -> None:
    dnums = """
      input_batch_dimension: 0 input_feature_dimension: 1 input_spatial_dimensions: [2, 3]
      kernel_output_feature_dimension: 0 kernel_input_feature_dimension: 1
      kernel_spatial_dimensions: [2, 3]
      output_batch_dimension: 0 output_feature_dimension: 1 output_spatial_dimensions: [2, 3]
    """
    shapes = (
        shape((2, 4, 6, 5), kind="BF16"),
        shape((8, 4, 3, 3), kind="BF16"),
        shape((2, 8, 6, 5), (1, 3, 2, 0), kind="BF16"),
    )
    call = read_call(make_thunk(shapes=shapes, dnums=dnums))
    assert call.x == Tensor("bfloat16", (2, 4, 6, 5), (120, 30, 5, 1))
    assert call.w == Tensor("bfloat16", (8, 4, 3, 3), (36, 9, 3, 1))
    assert call.y == Tensor("bfloat16", (2, 8, 6, 5), (240, 1, 40, 8))


def test_one_dimension_is_two_of_which_the_last_has_one_element() -> None:
    dnums = """
      input_feature_dimension: 2 input_spatial_dimensions: [1]
      kernel_input_feature_dimension: 2 kernel_spatial_dimensions: [1]
      output_feature_dimension: 2 output_spatial_dimensions: [1]
    """
    side = SIDE.replace("stride: 1", "stride: 2")
    shapes = (shape((2, 9, 4)), shape((8, 3, 4)), shape((2, 5, 8)))
    call = read_call(make_thunk(shapes=shapes, dnums=dnums, window=f"dimensions {{ {side} }}"))
    assert call.x == Tensor("float32", (2, 4, 9, 1), (36, 1, 4, 4))
    assert call.y == Tensor("float32", (2, 8, 5, 1), (40, 1, 8, 8))
    assert call.window == Window((1, 0), (2, 1), (1, 1))


def test_three_dimensions_and_a_flipped_filter() -> None:
    dnums = """
      input_feature_dimension: 4 input_spatial_dimensions: [1, 2, 3]
      kernel_input_feature_dimension: 4 kernel_spatial_dimensions: [1, 2, 3]
      output_feature_dimension: 4 output_spatial_dimensions: [1, 2, 3]
    """
    sides = f"dimensions {{ {SIDE.replace('window_dilation: 1', 'window_dilation: 3')}" + (
        " window_reversal: true }"
    )
    shapes = (shape((1, 5, 4, 3, 2)), shape((2, 3, 3, 3, 2)), shape((1, 5, 4, 3, 2)))
    call = read_call(make_thunk(shapes=shapes, dnums=dnums, window=sides * 3))
    assert call.x.dims == (1, 2, 5, 4, 3)
    assert call.window == Window((1,) * 3, (1,) * 3, (3,) * 3, is_flipped=True)


@pytest.mark.parametrize(
    ("precision", "allows_tf32"),
    [("DEFAULT", True), ("HIGH", True), ("HIGHEST", False)],
)
def test_where_xla_has_measured_no_engine_the_precision_counts(
    precision: str, allows_tf32: bool
) -> None:
    instruction = (
        f'name: "conv" id: 99 precision_config {{ operand_precision: [DEFAULT, {precision}] }}'
    )
    program = make_program(
        make_thunk(config="conv_result_scale: 1 algorithm { algo_id: -1 }"), text=TEXT
    )
    with edit_computation(program) as computation:
        text_format.Parse(instruction, computation.instructions.add())
    (step,) = list_device_steps(decode_executable(program, name="step").steps)
    assert isinstance(step.node, CudnnNode)
    assert isinstance(step.node.call, Convolution)
    assert step.node.call.algorithm == Algorithm(None, (), allows_tf32)


FUSED = "FORWARD_BIAS_ACTIVATION"
BIAS = Tensor("float32", (1, 8, 1, 1), (8, 1, 8, 8))


@pytest.mark.parametrize(
    ("config", "epilogue"),
    [
        ("conv_result_scale: 1 activation_mode: kRelu", Epilogue(BIAS, Activation.RELU)),
        (
            "conv_result_scale: 2 activation_mode: kLeakyRelu leakyrelu_alpha: 0.5",
            Epilogue(BIAS, Activation.LEAKY_RELU, 0.5, 2.0),
        ),
    ],
)
def test_bias_and_activation_follow_the_convolution(config: str, epilogue: Epilogue) -> None:
    step = decode(make_thunk(FUSED, config=config, operands=3))
    node = step.node
    assert isinstance(node, CudnnNode)
    assert isinstance(node.call, Convolution)
    assert node.call.epilogue == epilogue
    # The side input has the factor 0: its place is the output's, and it is not read.
    assert dict(node.operands) == {X: use(5), W: use(6), Y: use(7), B: use(8), Z: use(7)}
    assert step.reads == (use(5), use(6), use(8))


def test_an_activation_that_needs_no_side_input_has_none() -> None:
    config = "conv_result_scale: 1 activation_mode: kElu"
    node = decode(make_thunk(FUSED, config=config, operands=3)).node
    assert isinstance(node, CudnnNode)
    assert Z not in dict(node.operands)


def test_a_side_input_in_the_place_of_the_result_is_read() -> None:
    config = "conv_result_scale: 1 side_input_scale: 0.5 activation_mode: kNone"
    thunk = make_thunk(FUSED, config=config, operands=4)
    thunk = thunk.replace("buffer_allocation_index: 9", "buffer_allocation_index: 7")
    step = decode(thunk)
    assert step.reads == (use(5), use(6), use(8), use(7))
    assert isinstance(step.node, CudnnNode)
    assert dict(step.node.operands)[Z] == use(7)


def change(old: str, new: str, **arguments: Any) -> str:
    thunk = make_thunk(**arguments)
    assert old in thunk
    return thunk.replace(old, new)


@pytest.mark.parametrize(
    ("thunk", "reason"),
    [
        (change("kind: FORWARD", "kind: FORWARD_GRAPH"), "kind to FORWARD_GRAPH"),
        (change("kind: FORWARD", "kind: INVALID"), "kind to INVALID"),
        (change("F32", "S16"), "element_type to S16"),
        (change("padding_high: 1", "padding_high: 2"), "pads its two sides differently"),
        (
            change("padding_low: 1 padding_high: 1", "padding_low: -1 padding_high: -1"),
            "pads its two sides differently",
        ),
        (change("base_dilation: 1", "base_dilation: 2"), "spreads its input"),
        (
            make_thunk(
                window=f"dimensions {{ {SIDE} }} dimensions {{ {SIDE} window_reversal: true }}"
            ),
            "reads its filter backwards in some dimensions",
        ),
        (make_thunk(window=f"dimensions {{ {SIDE} }} " * 3), "a window of 3 dimensions"),
        (change("stride: 1", "stride: 0"), "a window of 2 dimensions"),
        (make_thunk(config="conv_result_scale: 2"), "scales its result by 2.0"),
        (
            make_thunk(config='conv_result_scale: 1 serialized_graph: "1:[f32]conv();"'),
            "a graph of operations in a form of XLA's own",
        ),
        (
            make_thunk(config="conv_result_scale: 1 reordered_int8_nchw_vect: true"),
            "cuDNN's own order of int8",
        ),
        (
            make_thunk(shapes=(shape((2, 6, 5, 1, 4)), shape(W_SHAPE), shape(Y_SHAPE))),
            "has an array of 5 dimensions, packed",
        ),
        (
            make_thunk(shapes=(shape((2, 0, 5, 4)), shape(W_SHAPE), shape(Y_SHAPE))),
            "has an empty array",
        ),
        (
            make_thunk(shapes=(shape(X_SHAPE, (3, 2, 2, 0)), shape(W_SHAPE), shape(Y_SHAPE))),
            "in the order [3, 2, 2, 0]",
        ),
        (
            make_thunk(shapes=(shape((20, 6, 5, 4)), shape(W_SHAPE), shape(Y_SHAPE))),
            "has the operand `x` of 4096 bytes: its layout takes 9600",
        ),
        (make_thunk(operands=3), "has 3 operands, not 2"),
        (make_thunk(FUSED, operands=2), "has 2 operands, not 4"),
        (
            make_thunk(FUSED, operands=3, config="conv_result_scale: 1 side_input_scale: 1"),
            "adds 1.0 times a side input that it does not have",
        ),
        (
            make_thunk(FUSED, operands=3, config="conv_result_scale: 1 activation_mode: kTanh"),
            "activation_mode to kTanh",
        ),
        (make_thunk(text=f"result_buffers {{ slice {{ {piece((9, 0, 8))} }} }}"), "has 2 results"),
        (make_thunk(dnums=""), "is over 0 dimensions"),
    ],
)
def test_what_cudnn_is_not_called_with_is_refused(thunk: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be lowered: convolution") as raised:
        decode(thunk)
    assert reason in raised.value.why


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("is_deprecated", [True, False])
def test_the_newer_interface_is_named_only_where_xla_still_has_both(
    is_deprecated: bool, is_set: bool
) -> None:
    files = read_files().file
    messages = [message for file in files for message in file.message_type]
    (field,) = (
        field
        for message in messages
        for field in message.field
        if field.name == "is_cudnn_frontend"
    )
    field.options.deprecated = is_deprecated
    schema = build_schema(files, "a schema")
    chosen = CHOSEN if is_set else CHOSEN.replace("is_cudnn_frontend: true", "")
    thunk = make_thunk(config=f"conv_result_scale: 1 algorithm {{ {chosen} }}")
    written = make_program(thunk, text=TEXT).SerializeToString()
    program = schema.message_class("xla.gpu.GpuExecutableProto").FromString(written)
    if not is_deprecated and not is_set:
        with pytest.raises(UnsupportedError) as raised:
            decode_executable(program, name="step")
        assert "has algorithm 67 of cuDNN's older interface" in raised.value.why
        return
    (step,) = list_device_steps(decode_executable(program, name="step").steps)
    assert isinstance(step.node, CudnnNode)
    assert isinstance(step.node.call, Convolution)
    assert step.node.call.algorithm == Algorithm(67, ((3, 7), (9, 0)))


def test_an_engine_that_the_device_refuses_is_named_with_the_op() -> None:
    calls = []

    def check(call: Any) -> str:
        calls.append(call)
        return "is forward, by engine 67, which cuDNN 9.1.0 refuses"

    with pytest.raises(UnsupportedError) as raised:
        decode(make_thunk(), check=check)
    assert "convolution is forward, by engine 67, which cuDNN" in raised.value.why
    assert "conv" in raised.value.where
    assert raised.value.refused[0].kind == "convolution"
    assert dataclasses.replace(calls[0], workspace_bytes=0).workspace_bytes == 0
