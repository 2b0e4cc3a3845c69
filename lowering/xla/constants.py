"""Constants: XLA leaves their bytes out of the executable; they are the HLO's literals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracegraph.lowering.xla.allow_list import check_listed
from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.packing import pack_bits

_PREFIX = "buffer_for_"

# A literal's field by element type. Fields of numbers are written with the dtype beside them;
# those without one hold the bytes themselves.
_NUMBERS: Mapping[str, tuple[str, str]] = {
    "PRED": ("preds", "u1"),
    "S32": ("s32s", "<i4"),
    "S64": ("s64s", "<i8"),
    "U32": ("u32s", "<u4"),
    "U64": ("u64s", "<u8"),
    "F32": ("f32s", "<f4"),
    "F64": ("f64s", "<f8"),
    "C64": ("c64s", "<f4"),
    "C128": ("c128s", "<f8"),
}
_BYTES: Mapping[str, str] = {
    "S8": "s8s",
    "U8": "u8s",
    "S16": "s16s",
    "U16": "u16s",
    "F16": "f16s",
    "BF16": "bf16s",
    "F8E3M4": "f8e3m4s",
    "F8E4M3": "f8e4m3s",
    "F8E4M3FN": "f8e4m3fns",
    "F8E4M3B11FNUZ": "f8e4m3b11fnuzs",
    "F8E4M3FNUZ": "f8e4m3fnuzs",
    "F8E5M2": "f8e5m2s",
    "F8E5M2FNUZ": "f8e5m2fnuzs",
    "F8E8M0FNU": "f8e8m0fnus",
}
# One byte each in a literal, several to a byte in memory: their bits there.
_PACKED: Mapping[str, tuple[str, int]] = {
    "S4": ("s4s", 4),
    "U4": ("u4s", 4),
    "F4E2M1FN": ("f4e2m1fns", 4),
    "S2": ("s2s", 2),
    "U2": ("u2s", 2),
}


def index_literals(computations: Computations) -> dict[str, list[Any]]:
    """Returns the constant instructions of a program by the symbol that XLA gives them.

    Args:
        computations: of the program.
    """
    found: dict[str, list[Any]] = {}
    for instruction in computations.list_instructions("constant"):
        symbol = _PREFIX + re.sub(r"[^0-9A-Za-z_]", "_", instruction.name)
        found.setdefault(symbol, []).append(instruction)
    return found


def read_constant(entry: Any, nbytes: int, literals: Mapping[str, list[Any]]) -> bytes:
    """Returns the bytes of a constant.

    Args:
        entry: a ``ConstantInfoProto``.
        nbytes: size of its allocation.
        literals: from `index_literals`.

    Raises:
        Refusal: there is not exactly one literal of that symbol, type and size.
    """
    symbol = entry.symbol_name
    if not nbytes:
        return b""
    content = entry.content.data
    if not content:
        candidates = literals.get(symbol, [])
        if len(candidates) != 1:
            raise Refusal(f"has {len(candidates)} literals for its constant `{symbol}`")
        content = read_literal(candidates[0])
    if len(content) != nbytes:
        raise Refusal(f"has {len(content)} bytes for its constant `{symbol}` of {nbytes}")
    return content


def read_literal(instruction: Any) -> bytes:
    """Returns the bytes of a constant instruction, as they lie in memory.

    Raises:
        Refusal: its type or its layout is not known.
    """
    shape, literal = instruction.shape, instruction.literal
    for message in (shape, literal):
        check_listed(message, f" in the constant `{instruction.name}`")
    if shape.element_type != literal.shape.element_type or (
        list(shape.layout.minor_to_major) != list(literal.shape.layout.minor_to_major)
    ):
        raise Refusal(f"keeps the constant `{instruction.name}` in another layout than its literal")
    kind = read_name(shape, "element_type")
    if kind in _NUMBERS:
        field, dtype = _NUMBERS[kind]
        return np.asarray(getattr(literal, field), dtype=dtype).tobytes()
    field, bits = _PACKED.get(kind, ("", 0))
    if field in literal.DESCRIPTOR.fields_by_name and shape.layout.element_size_in_bits == bits:
        return pack_bits(np.frombuffer(getattr(literal, field), np.uint8), bits).tobytes()
    if _BYTES.get(kind) in literal.DESCRIPTOR.fields_by_name:
        return getattr(literal, _BYTES[kind])
    raise Refusal(f"has a constant `{instruction.name}` of {kind}")
