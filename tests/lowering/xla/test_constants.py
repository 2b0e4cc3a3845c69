"""Constants: the bytes of HLO literals, for every element type and layout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import text_format

from tests.fakes.xla_programs import make_copy, make_kernel, make_program, message_class
from tracegraph.lowering.xla.constants import read_literal
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.schema import COMPUTATION
from tracegraph.runtime.definition.packing import pack_bits
from tracegraph.runtime.errors import UnsupportedError

LAYOUT = "layout { minor_to_major: 0 tail_padding_alignment_in_elements: 1 }"


def make_instruction(kind: str, literal: str, *, shape: str = LAYOUT, name: str = "c.1") -> Any:
    text = f"""name: "{name}" opcode: "constant" shape {{ element_type: {kind} {shape} }}
      literal {{ shape {{ element_type: {kind} {shape} }} {literal} }}"""
    return text_format.Parse(text, message_class("xla.HloInstructionProto")())


def escape(array: Any) -> str:
    return "".join(f"\\{byte:03o}" for byte in array.tobytes())


def numbers(field: str, values: Any) -> str:
    return " ".join(f"{field}: {value}" for value in values)


WORDS = np.array([1, -2, 300], np.int16)
WIDE = np.array([1.5, -2, 3e38], ml_dtypes.bfloat16)
CASES = {
    "PRED": ("preds: true preds: false", np.array([True, False])),
    "S8": (f's8s: "{escape(np.array([1, -2], np.int8))}"', np.array([1, -2], np.int8)),
    "U8": (f'u8s: "{escape(np.array([1, 200], np.uint8))}"', np.array([1, 200], np.uint8)),
    "S16": (f's16s: "{escape(WORDS)}"', WORDS),
    "U16": (f'u16s: "{escape(WORDS)}"', WORDS),
    "S32": (numbers("s32s", [1, -(2**31)]), np.array([1, -(2**31)], np.int32)),
    "S64": (numbers("s64s", [1, -(2**63)]), np.array([1, -(2**63)], np.int64)),
    "U32": (numbers("u32s", [1, 2**32 - 1]), np.array([1, 2**32 - 1], np.uint32)),
    "U64": (numbers("u64s", [1, 2**64 - 1]), np.array([1, 2**64 - 1], np.uint64)),
    "F16": (f'f16s: "{escape(np.array([1, -2], np.float16))}"', np.array([1, -2], np.float16)),
    "BF16": (f'bf16s: "{escape(WIDE)}"', WIDE),
    "F32": (numbers("f32s", ["1.5", "nan", "-inf"]), np.array([1.5, np.nan, -np.inf], np.float32)),
    "F64": (numbers("f64s", ["1e300", "-0.0"]), np.array([1e300, -0.0])),
    "C64": (numbers("c64s", [1, 2, 3, 4]), np.array([1 + 2j, 3 + 4j], np.complex64)),
    "C128": (numbers("c128s", [1, 2]), np.array([1 + 2j])),
    "F8E4M3FN": (f'f8e4m3fns: "{escape(np.array([8, 9], np.uint8))}"', np.array([8, 9], np.uint8)),
    "F8E5M2": (f'f8e5m2s: "{escape(np.array([8, 9], np.uint8))}"', np.array([8, 9], np.uint8)),
    "F8E8M0FNU": (f'f8e8m0fnus: "{escape(np.array([8], np.uint8))}"', np.array([8], np.uint8)),
}


@pytest.mark.parametrize("kind", CASES)
def test_every_type_has_its_bytes(kind: str):
    literal, expected = CASES[kind]
    assert read_literal(make_instruction(kind, literal)) == expected.tobytes()


def test_bytes_follow_the_literal_s_own_layout():
    order = "dimensions: 2 dimensions: 2 layout { minor_to_major: 0 minor_to_major: 1 }"
    instruction = make_instruction("S32", numbers("s32s", [1, 3, 2, 4]), shape=order)
    assert read_literal(instruction) == np.array([[1, 2], [3, 4]], np.int32).T.tobytes()


@pytest.mark.parametrize("kind", ["S4", "U4", "F4E2M1FN"])
def test_nibbles_share_bytes(kind: str):
    packed = "layout { minor_to_major: 0 element_size_in_bits: 4 }"
    literal = f'{kind.lower()}s: "{escape(np.array([255, 1, 3], np.uint8))}"'
    assert read_literal(make_instruction(kind, literal, shape=packed)) == b"\x1f\x03"
    with pytest.raises(Refusal, match=rf"has a constant `c.1` of {kind}"):
        read_literal(make_instruction(kind, literal))


@pytest.mark.parametrize("count", range(6))
def test_packed_nibbles_unpack_to_themselves(count: int):
    values = bytes(range(7, 7 + count))
    packed = pack_bits(np.frombuffer(values, np.uint8), 4).tobytes()
    unpacked = [each for byte in packed for each in (byte & 15, byte >> 4)]
    assert bytes(unpacked[:count]) == values
    assert not any(unpacked[count:])


def test_literals_that_are_refused():
    with pytest.raises(Refusal, match=r"has a constant `c\.1` of TOKEN"):
        read_literal(make_instruction("TOKEN", ""))
    with pytest.raises(Refusal, match=r"sets xla\.LiteralProto\.sparse_indices in the constant"):
        read_literal(make_instruction("S32", "s32s: 1 sparse_indices: 0"))
    with pytest.raises(Refusal, match=r"sets xla\.LayoutProto\.tiles in the constant"):
        read_literal(make_instruction("S32", "s32s: 1", shape="layout { tiles { } }"))
    turned = make_instruction("S32", "s32s: 1")
    turned.shape.layout.minor_to_major[0] = 1
    with pytest.raises(Refusal, match="in another layout than its literal"):
        read_literal(turned)


def make_constant_program(*instructions: Any, symbol: str = "buffer_for_c_1", size: int = 8) -> Any:
    text = f"""buffer_allocations {{ values {{ index: 5 size: {size} is_constant: true }} }}
      constants {{ symbol_name: "{symbol}" allocation_index: 5 }}"""
    read = make_copy((5, 0, size), (3, 0, size), size)
    program = make_program(make_kernel(), read, text=text)
    computation = message_class(COMPUTATION)(id=7, instructions=instructions)
    program.hlo_module_with_config.hlo_module.computations.append(computation.SerializeToString())
    return program


def test_a_constant_is_found_by_its_symbol():
    wanted = make_instruction("S32", "s32s: 1 s32s: 2", name="c.1")
    other = make_instruction("S32", "s32s: 3 s32s: 4", name="c_2")
    program = decode_executable(make_constant_program(wanted, other), name="step")
    assert program.allocations[5].content == np.array([1, 2], np.int32).tobytes()


def test_an_empty_constant_needs_no_literal():
    program = make_constant_program(size=0)
    del program.thunks[1]
    program.thunks[0].custom_kernel_thunk.args[0].slice.buffer_allocation_index = 5
    program.thunks[0].custom_kernel_thunk.args[0].slice.size = 0
    assert decode_executable(program, name="step").allocations[5].content == b""


def test_a_constant_whose_bytes_the_program_has():
    program = make_constant_program()
    program.constants[0].content.data = b"12345678"
    assert decode_executable(program, name="step").allocations[5].content == b"12345678"


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ([], "has 0 literals for its constant `buffer_for_c_1`"),
        (
            [
                make_instruction("S32", "s32s: 1 s32s: 2", name="c.1"),
                make_instruction("S32", "s32s: 3 s32s: 4", name="c-1"),
            ],
            "has 2 literals for its constant `buffer_for_c_1`",
        ),
        (
            [make_instruction("S32", "s32s: 1")],
            "has 4 bytes for its constant `buffer_for_c_1` of 8",
        ),
    ],
)
def test_constants_that_are_refused(instructions: Any, expected: str):
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(make_constant_program(*instructions), name="step")
    assert expected in caught.value.what
