"""Calls of `jax.ffi`: from XLA's description of one to the call that a handler gets.

XLA passes shapes without layouts, so neither are they here: a handler is written for the layouts
that its program asks for. The state of a handler's first stage is not taken from the program, which
holds it only for handlers of XLA's own: the stage is run again, from the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tracegraph.lowering.xla.allow_list import check_listed
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.ffi.c_api import DataType
from tracegraph.runtime.ffi.call import (
    ITEM_BYTES,
    ArrayAttribute,
    ArrayType,
    CallAttribute,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)

# Returns why a call cannot be in a graph, or an empty text.
CheckCall: TypeAlias = Callable[[FfiCall | CudnnCall], str]

# XLA's fields of a number, with its types.
NUMBERS = {
    "b": DataType.PRED,
    "i8": DataType.S8,
    "i16": DataType.S16,
    "i32": DataType.S32,
    "i64": DataType.S64,
    "u8": DataType.U8,
    "u16": DataType.U16,
    "u32": DataType.U32,
    "u64": DataType.U64,
    "f32": DataType.F32,
    "f64": DataType.F64,
}
TYPED = "API_VERSION_TYPED_FFI"


def decode_ffi_call(
    message: Any, name: str, use: Callable[[Any], BufferUse], check: CheckCall | None
) -> FfiCallNode:
    """Returns the call that a thunk describes.

    Args:
        message: an ``xla.gpu.CustomCallThunkProto`` with listed fields only.
        name: of the instruction that it computes.
        use: maps a shaped slice of the thunk to the byte range that it names.
        check: of the device; None where there is none to ask.

    Raises:
        Refusal: the call is of the older interface, or needs what no graph has, or the device
            refuses it.
    """
    target = message.target_name
    version = read_name(message, "api_version")
    if version != TYPED or message.opaque:
        raise Refusal(
            f"calls {target} through the interface before jax.ffi ({version.lower()}), whose "
            "functions say neither what they enqueue nor that they failed"
        )
    if message.called_computation:
        raise Refusal(f"calls {target} with a computation, which only XLA can run for it")
    operands = [_read_array(each, target, use) for each in message.operands]
    results = [_read_array(each, target, use) for each in message.results]
    call = FfiCall(
        target,
        tuple(kind for kind, _ in operands),
        tuple(kind for kind, _ in results),
        _read_dictionary(message.attributes),
    )
    problem = check(call) if check is not None else ""
    if problem:
        raise Refusal(f"calls {target}, {problem}")
    return FfiCallNode(
        name, call, tuple(each for _, each in operands), tuple(each for _, each in results)
    )


def _read_array(
    piece: Any, target: str, use: Callable[[Any], BufferUse]
) -> tuple[ArrayType, BufferUse | None]:
    if not piece.HasField("shaped_slice"):
        return ArrayType(DataType.TOKEN), None
    shape = piece.shaped_slice.shape
    check_listed(shape)
    word = read_name(shape, "element_type")
    dtype = DataType.__members__.get(word)
    if dtype is None or dtype not in ITEM_BYTES:
        raise Refusal(f"calls {target} with values of {word}, which have less than a byte each")
    if any(shape.is_dynamic_dimension):
        raise Refusal(f"calls {target} with a shape that is known on the device only")
    kind, found = ArrayType(dtype, tuple(shape.dimensions)), use(piece.shaped_slice)
    if kind.nbytes > found.nbytes:
        raise Refusal(f"calls {target} with {kind} in {found.nbytes} bytes")
    return kind, found


def _read_dictionary(message: Any) -> DictionaryAttribute:
    return DictionaryAttribute(
        tuple((key, _read_attribute(message.attrs[key], key)) for key in sorted(message.attrs))
    )


def _read_attribute(message: Any, key: str) -> CallAttribute:
    kind = message.WhichOneof("value")
    if kind == "str":
        return bytes(message.str) if isinstance(message.str, bytes) else message.str.encode()
    if kind == "dict":
        return _read_dictionary(message.dict)
    if kind not in ("scalar", "array"):
        raise Refusal(f"has the attribute `{key}` of a kind that is not known to this version")
    value = getattr(message, kind)
    word = value.WhichOneof("value")
    if word not in NUMBERS:
        raise Refusal(f"has the attribute `{key}` of a type that is not known to this version")
    number = getattr(value, word)
    if kind == "scalar":
        return ScalarAttribute(NUMBERS[word], number)
    return ArrayAttribute(NUMBERS[word], tuple(number.values))
