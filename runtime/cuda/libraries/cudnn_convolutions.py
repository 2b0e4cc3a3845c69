"""Convolutions as cuDNN's graphs of operations, described as XLA describes them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from tracegraph.runtime.cuda.libraries.cudnn_backend import Attribute, Kind, Values
from tracegraph.runtime.definition.cudnn_calls import (
    Activation,
    B,
    Convolution,
    Direction,
    Epilogue,
    Tensor,
    W,
    X,
    Y,
    Z,
)

# Returns a finalized descriptor.
Make: TypeAlias = Callable[[Kind, dict[Attribute, Values]], int]

# JAX's dtype names, with the numbers of cudnnDataType_t.
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "int8": 3, "int32": 4, "bfloat16": 9}
# What a convolution is summed in, and what follows it is computed in, by the dtype of its input.
SUM_DTYPES = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}
EPILOGUE_DTYPES = {"float16": "float32", "bfloat16": "float32", "int8": "float32"}
# XLA promises cuDNN no more.
ALIGNMENT_BYTES = 32
# Numbers of the tensors between convolution and result.
CONVOLVED, ADDED, BIASED = map(ord, "CAB")

_FLIPPED, _CROSS_CORRELATION = 0, 1
_ADD, _RELU, _ELU = 0, 100, 103
_RELU6_LIMIT = 6.0
_FORWARD = {
    "conv": Attribute.OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
    "alpha": Attribute.OPERATION_CONVOLUTION_FORWARD_ALPHA,
    "beta": Attribute.OPERATION_CONVOLUTION_FORWARD_BETA,
    "x": Attribute.OPERATION_CONVOLUTION_FORWARD_X,
    "w": Attribute.OPERATION_CONVOLUTION_FORWARD_W,
    "y": Attribute.OPERATION_CONVOLUTION_FORWARD_Y,
}
_BACKWARD_DATA = {
    "conv": Attribute.OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
    "alpha": Attribute.OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
    "beta": Attribute.OPERATION_CONVOLUTION_BWD_DATA_BETA,
    "x": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DX,
    "w": Attribute.OPERATION_CONVOLUTION_BWD_DATA_W,
    "y": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DY,
}
_BACKWARD_FILTER = {
    "conv": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
    "alpha": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
    "beta": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_BETA,
    "x": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_X,
    "w": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DW,
    "y": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DY,
}
_OPERATIONS = {
    Direction.FORWARD: (Kind.OPERATION_CONVOLUTION_FORWARD, _FORWARD),
    Direction.BACKWARD_DATA: (Kind.OPERATION_CONVOLUTION_BACKWARD_DATA, _BACKWARD_DATA),
    Direction.BACKWARD_FILTER: (Kind.OPERATION_CONVOLUTION_BACKWARD_FILTER, _BACKWARD_FILTER),
}


def describe_convolution(make: Make, call: Convolution, handle: int) -> int:
    """Returns the graph of operations of a convolution.

    Args:
        make: returns a descriptor with attributes.
        call: the convolution, and what follows it.
        handle: of the context that it is for.

    Raises:
        CudnnError: cuDNN refuses a part of it.
    """
    epilogue = call.epilogue
    x, w = _describe_tensor(make, X, call.x), _describe_tensor(make, W, call.w)
    y = _describe_tensor(make, Y, call.y)
    if epilogue is None:
        operations = [_describe_convolution(make, call, x, w, y)]
    else:
        sum_dtype = SUM_DTYPES.get(call.x.dtype, call.x.dtype)
        summed = dataclasses.replace(call.y, dtype=sum_dtype)
        convolved = _describe_tensor(make, CONVOLVED, summed, is_virtual=True)
        operations = [
            _describe_convolution(make, call, x, w, convolved),
            *_describe_epilogue(make, call, epilogue, convolved, y),
        ]
    return make(
        Kind.OPERATIONGRAPH,
        {
            Attribute.OPERATIONGRAPH_HANDLE: handle,
            Attribute.OPERATIONGRAPH_OPS: operations,
        },
    )


def _describe_tensor(make: Make, uid: int, tensor: Tensor, *, is_virtual: bool = False) -> int:
    return make(
        Kind.TENSOR,
        {
            Attribute.TENSOR_DATA_TYPE: DATA_TYPES[tensor.dtype],
            Attribute.TENSOR_DIMENSIONS: tensor.dims,
            Attribute.TENSOR_STRIDES: tensor.strides,
            Attribute.TENSOR_UNIQUE_ID: uid,
            Attribute.TENSOR_BYTE_ALIGNMENT: ALIGNMENT_BYTES,
            Attribute.TENSOR_IS_VIRTUAL: True if is_virtual else None,
        },
    )


def _describe_convolution(make: Make, call: Convolution, x: int, w: int, y: int) -> int:
    window, dtype = call.window, call.x.dtype
    convolution = make(
        Kind.CONVOLUTION,
        {
            Attribute.CONVOLUTION_COMP_TYPE: DATA_TYPES[SUM_DTYPES.get(dtype, dtype)],
            Attribute.CONVOLUTION_CONV_MODE: (
                _FLIPPED if window.is_flipped else _CROSS_CORRELATION
            ),
            Attribute.CONVOLUTION_SPATIAL_DIMS: len(window.strides),
            Attribute.CONVOLUTION_PRE_PADDINGS: window.padding,
            Attribute.CONVOLUTION_POST_PADDINGS: window.padding,
            Attribute.CONVOLUTION_DILATIONS: window.dilation,
            Attribute.CONVOLUTION_FILTER_STRIDES: window.strides,
        },
    )
    kind, names = _OPERATIONS[call.direction]
    is_double = dtype == "float64"
    values: dict[Attribute, Values] = {
        names["x"]: x,
        names["w"]: w,
        names["y"]: y,
        names["conv"]: convolution,
        names["alpha"]: ctypes.c_double(1.0) if is_double else 1.0,
        names["beta"]: ctypes.c_double(0.0) if is_double else 0.0,
    }
    return make(kind, values)


def _describe_epilogue(
    make: Make, call: Convolution, epilogue: Epilogue, convolved: int, y: int
) -> list[int]:
    """Returns the operations that follow: side input, bias, activation."""
    dtype = EPILOGUE_DTYPES.get(call.x.dtype, call.x.dtype)
    inner = dataclasses.replace(call.y, dtype=dtype)
    operations = []
    if epilogue.adds_side_input:
        side = _describe_tensor(make, Z, call.y)
        added = _describe_tensor(make, ADDED, inner, is_virtual=True)
        factors = epilogue.scale, epilogue.side_scale
        operations.append(_describe_sum(make, dtype, convolved, side, added, factors))
        convolved = added
    has_activation = epilogue.activation is not Activation.NONE
    biased = _describe_tensor(make, BIASED, inner, is_virtual=True) if has_activation else y
    bias = _describe_tensor(make, B, epilogue.bias)
    operations.append(_describe_sum(make, dtype, convolved, bias, biased, (1.0, 1.0)))
    if has_activation:
        activation = _describe_pointwise(make, dtype, _list_activation(epilogue))
        operations.append(
            make(
                Kind.OPERATION_POINTWISE,
                {
                    Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR: activation,
                    Attribute.OPERATION_POINTWISE_XDESC: biased,
                    Attribute.OPERATION_POINTWISE_YDESC: y,
                },
            )
        )
    return operations


def _describe_sum(
    make: Make, dtype: str, x: int, b: int, y: int, factors: tuple[float, float]
) -> int:
    return make(
        Kind.OPERATION_POINTWISE,
        {
            Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR: _describe_pointwise(
                make, dtype, {Attribute.POINTWISE_MODE: _ADD}
            ),
            Attribute.OPERATION_POINTWISE_XDESC: x,
            Attribute.OPERATION_POINTWISE_BDESC: b,
            Attribute.OPERATION_POINTWISE_YDESC: y,
            Attribute.OPERATION_POINTWISE_ALPHA1: factors[0],
            Attribute.OPERATION_POINTWISE_ALPHA2: factors[1],
        },
    )


def _describe_pointwise(make: Make, dtype: str, values: dict[Attribute, Values]) -> int:
    return make(Kind.POINTWISE, {**values, Attribute.POINTWISE_MATH_PREC: DATA_TYPES[dtype]})


def _list_activation(epilogue: Epilogue) -> dict[Attribute, Values]:
    if epilogue.activation is Activation.ELU:
        return {Attribute.POINTWISE_MODE: _ELU}
    limit = _RELU6_LIMIT if epilogue.activation is Activation.RELU6 else None
    slope = epilogue.slope if epilogue.activation is Activation.LEAKY_RELU else None
    return {
        Attribute.POINTWISE_MODE: _RELU,
        Attribute.POINTWISE_RELU_UPPER_CLIP: limit,
        Attribute.POINTWISE_RELU_LOWER_CLIP_SLOPE: slope,
    }
