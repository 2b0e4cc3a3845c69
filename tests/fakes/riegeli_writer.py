"""Writes Riegeli files and split protos, whole or with a planted fault."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import cramjam

from tracegraph.lowering.xla.schema import EXECUTABLE, MANIFEST, OPTIONS, Schema

BLOCK = 1 << 16
# What is in place of a block header, so that a reader that does not skip it fails.
BLOCK_HEADER = b"\xbb" * 24
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f00000000000000004000000000000000 91bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c3727300000000000000 0000000000000000"
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk as it is written; ``size`` is what its header claims, if that is false."""

    kind: str
    data: bytes = b""
    record_count: int = 0
    decoded_bytes: int = 0
    size: int | None = None


def varint(value: int) -> bytes:
    """Returns protobuf's variable-length number."""
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def compress(data: bytes, compression: str) -> bytes:
    """Returns data as a chunk holds it: plain for an empty ``compression``, or by snappy."""
    if not compression:
        return data
    return varint(len(data)) + bytes(cramjam.snappy.compress_raw(data))


def record_chunk(records: Sequence[bytes], compression: str = "s") -> Chunk:
    """Returns a simple chunk."""
    sizes = compress(b"".join(varint(len(record)) for record in records), compression)
    values = b"".join(records)
    head = (compression or "\0").encode() + varint(len(sizes)) + sizes
    return Chunk("r", head + compress(values, compression), len(records), len(values))


def write_chunks(*chunks: Chunk) -> bytes:
    """Returns a Riegeli file."""
    file = bytearray(SIGNATURE)
    for chunk in chunks:
        begin = len(file)
        size = len(chunk.data) if chunk.size is None else chunk.size
        kind_and_count = ord(chunk.kind) | chunk.record_count << 8
        _emit(file, struct.pack("<8xQ8xQQ", size, kind_and_count, chunk.decoded_bytes))
        _emit(file, chunk.data)
        end = begin + chunk.record_count
        while len(file) < end < 8 * BLOCK:  # a false count has no padding
            _emit(file, b"\0")
    return bytes(file)


def _emit(file: bytearray, data: bytes) -> None:
    while data:
        if len(file) % BLOCK == 0:
            file += BLOCK_HEADER
        room = BLOCK - len(file) % BLOCK
        file += data[:room]
        data = data[room:]


def write_split(schema: Schema, type_name: str, pieces: Sequence[Any], compression: str) -> bytes:
    """Returns a Riegeli file with a split proto.

    Args:
        schema: where the manifest's type comes from.
        type_name: the type of the whole.
        pieces: messages to merge, or pairs of a field's number and its bytes.
        compression: of the one chunk: ``s`` for snappy or nothing.
    """
    records = [make_manifest(schema, type_name, pieces).SerializeToString()]
    for piece in pieces:
        records.append(piece[1] if isinstance(piece, tuple) else piece.SerializeToString())
    return write_chunks(record_chunk(records, compression))


def make_manifest(schema: Schema, type_name: str, pieces: Sequence[Any]) -> Any:
    """Returns the first record of a split proto."""
    manifest: Any = schema.message_class(MANIFEST)(result_proto_type=type_name)
    for piece in pieces:
        entry = manifest.records.add()
        if isinstance(piece, tuple):
            entry.field_override_record.field_path.add(field_number=piece[0])
            entry.field_override_record.field_type = 1
        else:
            entry.proto_merge_record.SetInParent()
    return manifest


def write_header(version: int = 3, kind: bytes = b"pjrt_ifrt", rest: bytes = b"") -> bytes:
    """Returns the header of IFRT with its length before it."""
    message = b"\x08" + varint(version) + b"\x12" + varint(len(kind)) + kind + rest
    return varint(len(message)) + message


def write_program(
    schema: Schema, pieces: Sequence[Any], compression: str = "s", header: bytes | None = None
) -> bytes:
    """Returns a serialized program whose executable is in these pieces, as `write_split` says."""
    inner = write_split(schema, EXECUTABLE, pieces, compression)
    rest = schema.message_class(OPTIONS)(pjrt_client_name="cuda")
    outer = write_split(schema, OPTIONS, [(1, inner), rest], compression)
    return (write_header() if header is None else header) + outer
