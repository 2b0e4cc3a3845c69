"""Calls of handlers: XLA's description becomes the call that the handler gets, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fakes.xla_programs import make_program
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.ffi.c_api import DataType
from tracegraph.runtime.ffi.call import (
    ArrayAttribute,
    ArrayType,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)

ATTRIBUTES = """
  attrs { key: "b" value { scalar { b: true } } }
  attrs { key: "i8" value { scalar { i8: -7 } } }
  attrs { key: "u64" value { scalar { u64: 9223372036854775808 } } }
  attrs { key: "f32" value { scalar { f32: 0.5 } } }
  attrs { key: "text" value { str: "a b" } }
  attrs { key: "many" value { array { i32 { values: 1 values: -2 } } } }
  attrs { key: "wide" value { array { f64 { values: 0.25 } } } }
  attrs { key: "inner" value { dict { attrs { key: "x" value { scalar { i64: 3 } } } } } }
"""


def array(field: str, allocation: int, size: int, kind: str = "F32", dims: str = "8") -> str:
    shape = "".join(f"dimensions: {each} is_dynamic_dimension: false " for each in dims.split())
    return (
        f"{field} {{ shaped_slice {{ slice {{ size: {size} buffer_allocation_index: {allocation} }}"
        f" shape {{ element_type: {kind} {shape} }} }} }}"
    )


def call(body: str = "", version: str = "API_VERSION_TYPED_FFI") -> str:
    return f'custom_call_thunk {{ target_name: "solve" api_version: {version} {body} }}'


def decode(text: str, check: Any = None) -> DeviceStep:
    program = decode_executable(make_program(text), name="step", check_call=check)
    (step,) = list_device_steps(program.steps)
    return step


def test_call_has_the_types_and_places_of_the_thunk() -> None:
    body = (
        array("operands", 1, 32)
        + " operands { } "
        + array("operands", 3, 8, "S16", "2 2")
        + array("results", 3, 8, "S16", "2 2")
        + array("results", 0, 32)
        + f" attributes {{ {ATTRIBUTES} }} use_pdl: true execution_state {{ }}"
    )
    step = decode(call(body))
    x, half, y = BufferUse("#1", 0, 32), BufferUse("#3", 0, 8), BufferUse("#0", 0, 32)
    f32, s16 = ArrayType(DataType.F32, (8,)), ArrayType(DataType.S16, (2, 2))
    attributes = DictionaryAttribute(
        (
            ("b", ScalarAttribute(DataType.PRED, True)),
            ("f32", ScalarAttribute(DataType.F32, 0.5)),
            ("i8", ScalarAttribute(DataType.S8, -7)),
            ("inner", DictionaryAttribute((("x", ScalarAttribute(DataType.S64, 3)),))),
            ("many", ArrayAttribute(DataType.S32, (1, -2))),
            ("text", b"a b"),
            ("u64", ScalarAttribute(DataType.U64, 1 << 63)),
            ("wide", ArrayAttribute(DataType.F64, (0.25,))),
        )
    )
    wanted = FfiCall("solve", (f32, ArrayType(DataType.TOKEN), s16), (s16, f32), attributes)
    node = FfiCallNode(step.name, wanted, (x, None, half), (half, y))
    assert step == DeviceStep(node, (x, half), (half, y))
    assert node.arguments == ("#1", "#3", "#0")
    assert node.results == ("#3", "#0")
    moved = node.move(lambda use: use._replace(offset=use.offset + 64))
    assert moved.operands == (x._replace(offset=64), None, half._replace(offset=64))
    assert moved.outputs == (half._replace(offset=64), y._replace(offset=64))


def test_each_part_of_the_call_is_checked_by_the_device() -> None:
    seen: list[FfiCall] = []

    def refuse(each: FfiCall) -> str:
        seen.append(each)
        return "which is planted"

    with pytest.raises(UnsupportedError, match="custom_call calls solve, which is planted"):
        decode(call(array("operands", 1, 32)), refuse)
    assert seen == [FfiCall("solve", (ArrayType(DataType.F32, (8,)),), ())]


@pytest.mark.parametrize(
    ("thunk", "reason"),
    [
        (call(version="API_VERSION_STATUS_RETURNING"), "calls solve through the interface before"),
        (call(version="API_VERSION_UNSPECIFIED"), "calls solve through the interface before"),
        (call('opaque: "x"'), "calls solve through the interface before"),
        (call('called_computation: "c"'), "calls solve with a computation"),
        (call(array("operands", 1, 16)), "F32[8] in 16 bytes"),
        (call(array("operands", 1, 32, "U4")), "values of U4"),
        (call(array("operands", 9, 32)), "names allocation #9"),
        (
            call(array("operands", 1, 32).replace("dimension: false", "dimension: true")),
            "a shape that is known on the device only",
        ),
        (
            call('attributes { attrs { key: "a" value { } } }'),
            "the attribute `a` of a kind that is not known",
        ),
        (
            call('attributes { attrs { key: "a" value { scalar { } } } }'),
            "the attribute `a` of a type that is not known",
        ),
        (call(array("results", 1, 32)), "writes into the parameter #1"),
    ],
)
def test_what_no_handler_can_be_given_is_refused(thunk: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        decode(thunk)
