"""Protobuf's wire format as a tree of fields that can be changed and written again.

Written fields may have what no writer makes: numbers with more bytes than they need, one field
twice, numbers and types that the schema does not know.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

from tests.fakes.riegeli_writer import varint
from tracegraph.lowering.xla.schema import COMPUTATION
from tracegraph.lowering.xla.varint import read_varint

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_COMPUTATIONS = "xla.HloModuleProto.computations"
WIDTHS = {FIXED64: 8, FIXED32: 4}


@dataclasses.dataclass
class Field:
    """One field as it stands in a message.

    Attributes:
        number: of the field.
        wire_type: how its value is written.
        value: a number, bytes, or the fields of a message.
        descriptor: of the field in its message, None if the schema has none.
        padding: bytes by which the field's last varint (a number or a length) is too long.
    """

    number: int
    wire_type: int
    value: int | bytes | Message
    descriptor: Any = None
    padding: int = 0


Message: TypeAlias = list[Field]


def parse(data: bytes, schema: Any, *, opens_computations: bool = True) -> Message:
    """Returns the fields of a message in their order.

    Args:
        data: a sound message.
        schema: its descriptor.
        opens_computations: computations are messages, not the bytes as which the schema has them.
    """
    fields: Message = []
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at, "tag")
        number, wire_type = tag >> 3, tag & 7
        descriptor = schema.fields_by_number.get(number)
        value: int | bytes | Message
        if wire_type == VARINT:
            value, at = read_varint(data, at, "value")
        else:
            size = WIDTHS.get(wire_type)
            if size is None:
                size, at = read_varint(data, at, "length")
            value, at = data[at : at + size], at + size
        inner = None if descriptor is None else descriptor.message_type
        if opens_computations and descriptor is not None and descriptor.full_name == _COMPUTATIONS:
            inner = descriptor.file.pool.FindMessageTypeByName(COMPUTATION)
        if wire_type == BYTES and inner is not None and isinstance(value, bytes):
            value = parse(value, inner, opens_computations=opens_computations)
        fields.append(Field(number, wire_type, value, descriptor))
    return fields


def write(message: Message) -> bytes:
    """Returns a message as bytes, with the padding of its fields."""
    return b"".join(map(_write_field, message))


def _write_field(field: Field) -> bytes:
    tag = varint(field.number << 3 | field.wire_type)
    if isinstance(field.value, int):
        if field.wire_type == VARINT:
            return tag + pad(varint(field.value), field.padding)
        return tag + struct.pack("<Q", field.value)[: WIDTHS.get(field.wire_type, 8)]
    body = write(field.value) if isinstance(field.value, list) else field.value
    if field.wire_type != BYTES:
        return tag + body
    return tag + pad(varint(len(body)), field.padding) + body


def pad(number: bytes, count: int) -> bytes:
    """Returns a varint of the same value with more bytes than it needs; ten at most."""
    count = min(count, 10 - len(number))
    if count <= 0:
        return number
    return number[:-1] + bytes([number[-1] | 128]) + b"\x80" * (count - 1) + b"\0"


def walk(message: Message) -> Iterator[tuple[Message, Field]]:
    """Yields every field at every depth, with the message that it is in."""
    for field in message:
        yield message, field
        if isinstance(field.value, list):
            yield from walk(field.value)
