"""From the bytes of XLA's ``serialize()`` to its ``GpuExecutableProto``.

The bytes are three layers: a header of IFRT, JAX's layer above the runtime; a Riegeli file with the
split proto ``xla.ExecutableAndOptionsProto`` (JAX 0.10 has that message whole); and in it a Riegeli
file with the split proto ``xla.gpu.GpuExecutableProto``. A split proto is a message in pieces: its
first record, the manifest, says for each other record whether it is merged into the message or
replaces one field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tracegraph.lowering.xla.refusal import make_unreadable_error
from tracegraph.lowering.xla.riegeli import SIGNATURE, read_records
from tracegraph.lowering.xla.schema import EXECUTABLE, MANIFEST, OPTIONS, Schema
from tracegraph.lowering.xla.varint import read_varint
from tracegraph.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Functions import protobuf themselves: a process that reads no program need not load it.

_HEADER = "IFRT header"
_HEADER_VERSION = 3
_HEADER_KIND = b"pjrt_ifrt"
_OVERRIDE_TEXT = 1  # FieldDescriptorType.TYPE_STRING: text or bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


def read_executable(serialized: bytes, schema: Schema) -> Message:
    """Returns the compiled program that ``serialized`` holds.

    Args:
        serialized: what ``compiled.runtime_executable().serialize()`` returned.
        schema: the message types of the XLA that wrote it.

    Returns:
        A complete ``xla.gpu.GpuExecutableProto`` without unknown fields; what its computations
        hold is looked at where `Computations` reads them.

    Raises:
        UnsupportedError: the bytes are not exactly that; it names the layer, byte and record.
    """
    begin = _read_header(serialized)
    options = _read_options(serialized[begin:], begin, schema)
    executable = options.serialized_executable
    if not executable.startswith(SIGNATURE):
        problem = "it holds no GPU program; it was compiled for another device"
        raise make_unreadable_error(problem, f"{OPTIONS}, field serialized_executable")
    return _read_split_proto(executable, EXECUTABLE, schema)


def read_message(kind: type[Message], encoded: bytes, where: str) -> Message:
    """Returns a message without unknown fields.

    Args:
        kind: its type.
        encoded: as XLA wrote it.
        where: what the message is, for errors.

    Raises:
        UnsupportedError: it is none of that type, or a field is set, at any depth, that the schema
            does not have.
    """
    return _check_known_fields(lambda: parse_message(kind, encoded, where), where)


def parse_message(kind: type[Message], encoded: bytes, where: str) -> Message:
    """Returns a message that may have fields that the schema does not have.

    Args:
        kind: as for `read_message`.
        encoded: as for `read_message`.
        where: as for `read_message`.

    Raises:
        UnsupportedError: it is none of that type.
    """
    message = kind()
    _merge(message, encoded, where)
    return message


def _check_known_fields(read: Callable[[], Message], where: str) -> Message:
    """Returns what was read, if it has no field that the schema does not have."""
    message = read()
    nbytes = message.ByteSize()
    message.DiscardUnknownFields()
    # How the writer wrote it does not matter: both sizes are of our own encoding. They are compared
    # because a walk in Python is a hundred times slower.
    if message.ByteSize() != nbytes:
        raise _make_unknown_error(read(), where)
    return message


def _make_unknown_error(message: Message, where: str) -> UnsupportedError:
    """Returns the error that a message has a field that the schema does not have."""
    path, number = next(_find_unknown_fields(message, ""), ("", 0))
    return make_unreadable_error(f"field {number} is not in the schema", f"{where}{path}")


def _find_unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """Yields the path and number of each unknown field, depth first."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    for unknown in UnknownFieldSet(message):
        yield path, unknown.field_number
    for field, value in message.ListFields():
        for index, child in enumerate(_find_children(value)):
            yield from _find_unknown_fields(child, f"{path}.{field.name}[{index}]")


def _find_children(value: Any) -> list[Message]:
    """Returns the messages in a field's value: itself, those of a list, or those of a map."""
    from google.protobuf.message import Message

    if isinstance(value, Message):
        return [value]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return []
    items = value.values() if hasattr(value, "values") else value
    return [item for item in items if isinstance(item, Message)]


def _read_header(serialized: bytes) -> int:
    """Returns the offset behind the header."""
    size, begin = read_varint(serialized, 0, f"{_HEADER}, byte 0")
    end = begin + size
    if end > len(serialized):
        problem = f"the header ends at byte {end} of {len(serialized)}"
        raise make_unreadable_error(problem, f"{_HEADER}, byte {begin}")
    found = dict[int, int | bytes]()
    for number, value, offset in _read_header_fields(serialized[begin:end], begin):
        if number in found and number in (1, 2):
            raise make_unreadable_error(f"field {number} occurs twice", f"{_HEADER}, byte {offset}")
        found[number] = value
    if found.get(1) != _HEADER_VERSION or found.get(2) != _HEADER_KIND:
        raise make_unreadable_error(
            f"version {found.get(1)!r} of {found.get(2)!r}, "
            f"not version {_HEADER_VERSION} of {_HEADER_KIND!r}",
            f"{_HEADER}, byte {begin}",
        )
    return end


def _read_header_fields(header: bytes, base: int) -> Iterator[tuple[int, int | bytes, int]]:
    """Yields number, value and offset of each field, by protobuf's wire format."""
    offset = 0
    while offset < len(header):
        begin, where = offset, f"{_HEADER}, byte {base + offset}"
        tag, offset = read_varint(header, offset, where)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, offset = read_varint(header, offset, where)
            yield number, value, base + begin
            continue
        if wire_type == _BYTES:
            size, offset = read_varint(header, offset, where)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise make_unreadable_error(f"wire type {wire_type} is not known", where)
        if size > len(header) - offset:
            problem = f"field {number} of {size} bytes has {len(header) - offset} bytes left"
            raise make_unreadable_error(problem, where)
        yield number, header[offset : offset + size], base + begin
        offset += size


def _read_options(data: bytes, begin: int, schema: Schema) -> Any:
    """Returns the program with its compile options, which follow the header."""
    if data.startswith(SIGNATURE):
        return _read_split_proto(data, OPTIONS, schema)
    kind, where = schema.message_class(OPTIONS), f"byte {begin}, behind the {_HEADER}"
    return _check_known_fields(lambda: parse_message(kind, data, where), OPTIONS)


def _read_split_proto(file: bytes, type_name: str, schema: Schema) -> Any:
    """Returns the message whose pieces are the records of a Riegeli file."""
    records = read_records(file, type_name)
    if not records:
        raise make_unreadable_error("there is no manifest", f"{type_name}, record 0")
    where = f"{type_name}, record 0 (manifest)"
    manifest: Any = read_message(schema.message_class(MANIFEST), records[0], where)
    if manifest.result_proto_type != type_name:
        problem = f"the manifest is of {manifest.result_proto_type!r}, not {type_name!r}"
        raise make_unreadable_error(problem, where)
    if len(manifest.records) != len(records) - 1:
        problem = f"{len(records) - 1} records where {len(manifest.records)} are declared"
        raise make_unreadable_error(problem, where)
    pieces = list(zip(manifest.records, records[1:], strict=True))
    return _check_known_fields(lambda: _join_pieces(type_name, pieces, schema), type_name)


def _join_pieces(type_name: str, pieces: Sequence[tuple[Any, bytes]], schema: Schema) -> Message:
    message = schema.message_class(type_name)()
    for number, (entry, record) in enumerate(pieces, 1):
        _apply_record(message, entry, record, f"{type_name}, record {number}")
    return message


def _apply_record(message: Message, entry: Any, record: bytes, where: str) -> None:
    """Puts one record into the message as its entry in the manifest says."""
    kind = entry.WhichOneof("record_type")
    if kind == "proto_merge_record":
        _merge(message, record, where)
    elif kind == "field_override_record":
        _override(message, entry.field_override_record, record, where)
    else:
        raise make_unreadable_error(f"the manifest gives it the kind {kind}", where)


def _merge(message: Message, record: bytes, where: str) -> None:
    from google.protobuf.message import DecodeError

    try:
        message.MergeFromString(record)
    except (DecodeError, UnicodeDecodeError) as error:
        # The second is of protobuf's form in Python, for text that is no UTF-8.
        raise make_unreadable_error(f"it is no {message.DESCRIPTOR.full_name}", where) from error


def _override(message: Message, override: Any, record: bytes, where: str) -> None:
    """Makes ``record`` the value of one text or bytes field of the message itself."""
    path = override.field_path
    type_name = message.DESCRIPTOR.full_name
    if len(path) != 1 or path[0].WhichOneof("index") is not None:
        raise make_unreadable_error(f"it replaces a part inside a field of {type_name}", where)
    field = message.DESCRIPTOR.fields_by_number.get(path[0].field_number)
    if field is None:
        problem = f"it replaces field {path[0].field_number}, which {type_name} does not have"
        raise make_unreadable_error(problem, where)
    old = getattr(message, field.name)
    if override.field_type != _OVERRIDE_TEXT or not isinstance(old, (str, bytes)):
        raise make_unreadable_error(
            f"it replaces {field.name!r}, which is neither text nor bytes", where
        )
    try:
        setattr(message, field.name, record.decode() if isinstance(old, str) else record)
    except UnicodeDecodeError as error:
        raise make_unreadable_error(f"{field.name!r} is no UTF-8 text", where) from error
