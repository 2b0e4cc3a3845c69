"""Convolutions of cuDNN: from XLA's description of one to the tensors that cuDNN is given.

XLA hands cuDNN every array in the order batch, features, spatial dimensions, and says by strides
how its bytes lie. A convolution over one dimension is one over two, of which the last has one
element: cuDNN has none over one. Groups need no field: they follow from the features of input and
filter.

Enum values are read by name from the message's own descriptors, and what is not listed here is
refused: the numbers, the fields and their meaning change between versions of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.lowering.xla.enums import read_name, read_value
from tracegraph.lowering.xla.refusal import Refusal
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

# XLA's element types that its convolutions with cuDNN have, with JAX's names.
DTYPES = {
    "S8": "int8",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
DIRECTIONS = {
    "FORWARD": Direction.FORWARD,
    "BACKWARD_DATA": Direction.BACKWARD_DATA,
    "BACKWARD_FILTER": Direction.BACKWARD_FILTER,
    "FORWARD_BIAS_ACTIVATION": Direction.FORWARD,
}
FUSED = "FORWARD_BIAS_ACTIVATION"
# The tensors of XLA's two operands and of its result.
TENSORS = {
    Direction.FORWARD: (X, W, Y),
    Direction.BACKWARD_DATA: (Y, W, X),
    Direction.BACKWARD_FILTER: (X, Y, W),
}
ACTIVATIONS = {
    "kNone": Activation.NONE,
    "kRelu": Activation.RELU,
    "kRelu6": Activation.RELU6,
    "kElu": Activation.ELU,
    "kLeakyRelu": Activation.LEAKY_RELU,
}
# The highest `jax.lax.Precision` (0 default, 1 high, 2 highest) at which XLA permits TF32.
TF32_PRECISION = 1
MAX_SPATIAL = 3


def decode_convolution(
    message: Any, name: str, use: Callable[[Any], BufferUse], precision: Sequence[int], scratch: Any
) -> CudnnNode:
    """Returns the call that a thunk describes.

    Args:
        message: an ``xla.gpu.ConvolutionThunkProto`` with listed fields only.
        name: of the instruction that it computes.
        use: maps a shaped slice of the thunk to the byte range that it names.
        precision: of each operand, as the program asks for it; empty where that is not known.
        scratch: the byte range of the thunk's scratch buffer.

    Raises:
        Refusal: a value or a combination that cuDNN is not called with.
    """
    descriptor, config = message.conv_descriptor, message.conv_descriptor.backend_config
    kind = read_name(descriptor, "kind")
    direction = read_value(descriptor, "kind", DIRECTIONS)
    is_fused = kind == FUSED
    _check_config(config, is_fused)
    tensors = _read_tensors(descriptor, direction)
    uids = TENSORS[direction]
    if len(message.result_buffers) != 1:
        raise Refusal(f"has {len(message.result_buffers)} results: a convolution has one")
    wanted = (2,) if not is_fused else (3, 4)
    if len(message.operand_buffers) not in wanted:
        raise Refusal(f"has {len(message.operand_buffers)} operands, not {wanted[-1]}")
    inputs = [use(operand) for operand in message.operand_buffers]
    output = use(message.result_buffers[0])
    operands = dict(zip(uids, (*inputs[:2], output), strict=True))
    epilogue = _read_epilogue(config, tensors) if is_fused else None
    if epilogue is not None:
        operands |= _list_fused(epilogue, inputs, output)
        tensors |= {B: epilogue.bias, Z: tensors[Y]}
    for uid, operand in operands.items():
        if operand.nbytes < tensors[uid].nbytes:
            raise Refusal(
                f"has the operand `{chr(uid)}` of {operand.nbytes} bytes: its layout takes "
                f"{tensors[uid].nbytes}"
            )
    call = Convolution(
        direction,
        x=tensors[X],
        w=tensors[W],
        y=tensors[Y],
        window=_read_window(descriptor.window, len(tensors[X].dims) - 2),
        algorithm=_read_algorithm(config, precision),
        workspace_bytes=scratch.nbytes,
        epilogue=epilogue,
    )
    workspace = scratch if scratch.nbytes else None
    return CudnnNode(name, call, tuple(operands.items()), (uids[2],), workspace)


def _check_config(config: Any, is_fused: bool) -> None:
    if config.serialized_graph:
        raise Refusal("is a graph of operations in a form of XLA's own")
    if config.reordered_int8_nchw_vect:
        raise Refusal("reads a filter in cuDNN's own order of int8")
    if not is_fused and config.conv_result_scale != 1:
        raise Refusal(f"scales its result by {config.conv_result_scale}, which cuDNN does not")


def _read_tensors(descriptor: Any, direction: Direction) -> dict[int, Tensor]:
    """Returns the tensors X, W and Y."""
    numbers = descriptor.dnums
    places = {
        X: (
            numbers.input_batch_dimension,
            numbers.input_feature_dimension,
            *numbers.input_spatial_dimensions,
        ),
        W: (
            numbers.kernel_output_feature_dimension,
            numbers.kernel_input_feature_dimension,
            *numbers.kernel_spatial_dimensions,
        ),
        Y: (
            numbers.output_batch_dimension,
            numbers.output_feature_dimension,
            *numbers.output_spatial_dimensions,
        ),
    }
    shapes = (descriptor.operand0_shape, descriptor.operand1_shape, descriptor.result_shape)
    return {
        uid: _read_tensor(shape, places[uid])
        for uid, shape in zip(TENSORS[direction], shapes, strict=True)
    }


def _read_tensor(shape: Any, places: Sequence[int]) -> Tensor:
    """Returns an array with its dimensions in cuDNN's order.

    Args:
        shape: of XLA.
        places: which of its dimensions come first, second...
    """
    dims, order = list(shape.dimensions), list(shape.layout.minor_to_major)
    spatial = len(places) - 2
    if any(shape.is_dynamic_dimension) or not 0 < spatial <= MAX_SPATIAL:
        raise Refusal(f"is over {spatial} dimensions, or over some whose size is not known")
    if len(dims) != len(places):
        raise Refusal(f"has an array of {len(dims)} dimensions, packed for instructions on int8")
    if sorted(places) != list(range(len(dims))) or sorted(order) != sorted(places):
        raise Refusal(f"has an array whose dimensions are {list(places)} in the order {order}")
    if min(dims) < 1:
        raise Refusal(f"has an empty array, of {dims}")
    strides = _make_strides(dims, order)
    found = [(dims[place], strides[place]) for place in places]
    if spatial == 1:
        found.append((1, found[-1][1]))
    return Tensor(
        read_value(shape, "element_type", DTYPES),
        tuple(count for count, _ in found),
        tuple(stride for _, stride in found),
    )


def _make_strides(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Returns the strides of dense dimensions, the innermost named first in `order`."""
    strides, step = [0] * len(dims), 1
    for dim in order:
        strides[dim] = step
        step *= dims[dim]
    return strides


def _read_window(window: Any, spatial: int) -> Window:
    dims = window.dimensions
    if any(d.padding_low != d.padding_high or d.padding_low < 0 for d in dims):
        raise Refusal("pads its two sides differently, which cuDNN does not")
    if any(d.base_dilation != 1 for d in dims):
        raise Refusal("spreads its input, which cuDNN does not")
    if len({d.window_reversal for d in dims}) != 1:
        raise Refusal("reads its filter backwards in some dimensions and not in others")
    missing = spatial - len(dims)
    if missing not in (0, 1) or min((d.stride for d in dims), default=0) < 1:
        raise Refusal(f"has a window of {len(dims)} dimensions for arrays of {spatial}")
    return Window(
        padding=(*(d.padding_low for d in dims), *[0] * missing),
        strides=(*(d.stride for d in dims), *[1] * missing),
        dilation=(*(d.window_dilation for d in dims), *[1] * missing),
        is_flipped=dims[0].window_reversal,
    )


def _read_algorithm(config: Any, precision: Sequence[int]) -> Algorithm:
    algorithm = config.algorithm
    if not config.HasField("algorithm") or algorithm.algo_id < 0:
        # XLA has measured none: it had no GPU, or was asked not to.
        return Algorithm(allows_tf32=all(each <= TF32_PRECISION for each in precision))
    # XLA calls the newer interface alone since it deprecated the field, which it then never sets.
    flag = algorithm.DESCRIPTOR.fields_by_name["is_cudnn_frontend"]
    if not (flag.GetOptions().deprecated or algorithm.is_cudnn_frontend):
        raise Refusal(f"has algorithm {algorithm.algo_id} of cuDNN's older interface")
    return Algorithm(algorithm.algo_id, tuple(sorted(algorithm.tuning_knobs.items())))


def _read_epilogue(config: Any, tensors: dict[int, Tensor]) -> Epilogue:
    y = tensors[Y]
    dims = (1, y.dims[1], *[1] * (len(y.dims) - 2))
    order = sorted(range(len(dims)), key=lambda dim: y.strides[dim])
    activation = read_value(config, "activation_mode", ACTIVATIONS)
    x_dtype = tensors[X].dtype
    bias_dtype = "float32" if x_dtype == "int8" else x_dtype
    return Epilogue(
        Tensor(bias_dtype, dims, tuple(_make_strides(dims, order))),
        activation,
        slope=config.leakyrelu_alpha if activation is Activation.LEAKY_RELU else 0.0,
        scale=config.conv_result_scale,
        side_scale=config.side_input_scale,
    )


def _list_fused(
    epilogue: Epilogue, inputs: Sequence[BufferUse], output: BufferUse
) -> dict[int, BufferUse]:
    """Returns the byte ranges of bias and side input.

    Where the program has no side input, its factor is 0 and cuDNN gets the output in its place.
    """
    has_side_input = len(inputs) > 3
    if epilogue.side_scale and not has_side_input:
        raise Refusal(f"adds {epilogue.side_scale} times a side input that it does not have")
    found = {B: inputs[2]}
    if epilogue.adds_side_input:
        found[Z] = inputs[3] if has_side_input else output
    return found
