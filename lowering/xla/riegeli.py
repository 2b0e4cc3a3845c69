"""Riegeli: the record files that XLA's compiled programs are stored in.

A file is a sequence of chunks, and at each multiple of 64 KiB a block header of 24 bytes comes in
between, also in the middle of a chunk. Only what XLA writes is read: simple chunks, plain or
compressed with snappy. The hashes (HighwayHash, which has no well-kept package) are not compared:
the bytes come straight from the compiler in this process, and a new graph is verified by replay.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

from tracegraph.lowering.xla.refusal import make_unreadable_error
from tracegraph.lowering.xla.varint import read_varint

# The first chunk of each file, together with the block header before it.
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f 0000000000000000 4000000000000000 91bac23c9287e1a9"
    "0000000000000000 e19f13c0e9b1c372 7300000000000000 0000000000000000"
)
_BLOCK_BYTES = 1 << 16
_BLOCK_HEADER_BYTES = 24
_USABLE_BYTES = _BLOCK_BYTES - _BLOCK_HEADER_BYTES
_CHUNK_HEADER = struct.Struct("<8xQ8xQQ")
# Three bytes of snappy stand for 64 bytes at most, so a larger claim is false before it is tried.
_SNAPPY_RATIO = 22
_COMPRESSIONS = {ord("b"): "Brotli", ord("z"): "Zstandard"}


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """One chunk without block headers; ``where`` says where it is, for errors."""

    kind: str
    record_count: int
    decoded_bytes: int
    data: bytes
    where: str


def read_records(file: bytes, layer: str) -> list[bytes]:
    """Returns all records of a Riegeli file.

    Args:
        file: the whole file.
        layer: what the file is, for errors.

    Raises:
        UnsupportedError: it is no Riegeli file, is damaged, or uses what XLA does not.
    """
    if file[: len(SIGNATURE)] != SIGNATURE:
        raise make_unreadable_error(
            "it does not begin with Riegeli's signature", f"{layer}, byte 0"
        )
    records: list[bytes] = []
    for chunk in _read_chunks(file, layer):
        records.extend(_read_chunk_records(chunk))
    return records


def _read_chunks(file: bytes, layer: str) -> Iterator[_Chunk]:
    """Yields the chunks behind the signature; each has at least 40 bytes, so this ends."""
    begin, number = len(SIGNATURE), 1
    while begin < len(file):
        where = f"{layer}, chunk {number} at byte {begin}"
        header, position = _take(file, begin, _CHUNK_HEADER.size, where)
        data_bytes, kind_and_count, decoded_bytes = _CHUNK_HEADER.unpack(header)
        data, position = _take(file, position, data_bytes, where)
        kind, record_count = chr(kind_and_count & 255), kind_and_count >> 8
        # A chunk is padded so that it has as many bytes as records.
        end = max(position, _round_up_to_chunk_begin(begin + record_count))
        if end > len(file):
            raise make_unreadable_error(f"its padding ends at byte {end} of {len(file)}", where)
        yield _Chunk(kind, record_count, decoded_bytes, data, where)
        begin, number = end, number + 1


def _take(file: bytes, position: int, count: int, where: str) -> tuple[bytes, int]:
    """Returns ``count`` bytes without the block headers between them, and the position after."""
    headers = (count + (position + _USABLE_BYTES - 1) % _BLOCK_BYTES) // _USABLE_BYTES
    end = position + count + headers * _BLOCK_HEADER_BYTES
    if end > len(file):
        raise make_unreadable_error(f"{count} bytes end at byte {end} of {len(file)}", where)
    pieces = []
    while position < end:
        position += 0 if position % _BLOCK_BYTES else _BLOCK_HEADER_BYTES
        stop = min(end, position - position % _BLOCK_BYTES + _BLOCK_BYTES)
        pieces.append(file[position:stop])
        position = stop
    return b"".join(pieces), end


def _round_up_to_chunk_begin(position: int) -> int:
    """Returns the next place for a chunk: neither inside nor immediately after a block header."""
    return position + max(0, -position % _BLOCK_BYTES - (_USABLE_BYTES - 1))


def _read_chunk_records(chunk: _Chunk) -> list[bytes]:
    if chunk.kind == "r":
        return _read_simple_chunk(chunk)
    if chunk.kind not in ("s", "p", "m"):
        raise make_unreadable_error(f"chunks of kind {chunk.kind!r} are not known", chunk.where)
    if chunk.record_count:
        problem = f"a chunk of kind {chunk.kind!r} claims {chunk.record_count} records"
        raise make_unreadable_error(problem, chunk.where)
    return []  # another signature, padding, or words about the file


def _read_simple_chunk(chunk: _Chunk) -> list[bytes]:
    """Returns the records of a chunk: a list of sizes, then all bytes one after the other."""
    if not chunk.data:
        raise make_unreadable_error("a chunk of records is empty", chunk.where)
    compression = chunk.data[0]
    sizes_bytes, begin = read_varint(chunk.data, 1, chunk.where)
    if sizes_bytes > len(chunk.data) - begin:
        problem = f"{sizes_bytes} bytes of sizes in a chunk of {len(chunk.data)} bytes"
        raise make_unreadable_error(problem, chunk.where)
    middle = begin + sizes_bytes
    sizes = _decompress(compression, chunk.data[begin:middle], chunk.where)
    values = _decompress(compression, chunk.data[middle:], chunk.where)
    if len(values) != chunk.decoded_bytes:
        problem = f"records of {len(values)} bytes where {chunk.decoded_bytes} are declared"
        raise make_unreadable_error(problem, chunk.where)
    return _cut_records(sizes, values, chunk)


def _cut_records(sizes: bytes, values: bytes, chunk: _Chunk) -> list[bytes]:
    """Returns the records; together they are exactly ``values``."""
    records: list[bytes] = []
    at = begin = 0
    while at < len(sizes):
        size, at = read_varint(sizes, at, f"{chunk.where}, size of record {len(records)}")
        if size > len(values) - begin:
            problem = f"record {len(records)} of {size} bytes has {len(values) - begin} bytes left"
            raise make_unreadable_error(problem, chunk.where)
        records.append(values[begin : begin + size])
        begin += size
    if len(records) != chunk.record_count or begin != len(values):
        problem = (
            f"{len(records)} records of {begin} bytes where {chunk.record_count} records of "
            f"{len(values)} bytes are declared"
        )
        raise make_unreadable_error(problem, chunk.where)
    return records


def _decompress(compression: int, data: bytes, where: str) -> bytes:
    if compression == 0:
        return data
    if compression != ord("s"):
        name = _COMPRESSIONS.get(compression, f"byte {compression:#04x}")
        raise make_unreadable_error(f"compression {name} is not known", where)
    declared, begin = read_varint(data, 0, where)
    inner, _ = read_varint(data, begin, where)
    if inner != declared or declared > _SNAPPY_RATIO * len(data):
        problem = f"{len(data)} bytes of snappy claim to be {declared} and {inner} bytes"
        raise make_unreadable_error(problem, where)
    cramjam = load_cramjam()
    try:
        result = bytes(cramjam.snappy.decompress_raw(data[begin:]))
    except cramjam.DecompressionError as error:
        raise make_unreadable_error(f"snappy says: {error}", where) from error
    if len(result) != declared:
        raise make_unreadable_error(f"snappy gave {len(result)} of {declared} bytes", where)
    return result


def load_cramjam() -> Any:
    """Returns what decompresses: loaded where a program is read, not by `import tracegraph`."""
    import cramjam

    return cramjam
