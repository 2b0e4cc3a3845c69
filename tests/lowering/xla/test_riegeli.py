"""Riegeli: files from the writer are read back, and every claim that does not hold is refused."""

from __future__ import annotations

import random
import struct

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import riegeli_writer as writer
from tests.fakes.riegeli_writer import BLOCK, Chunk, record_chunk, varint, write_chunks
from tests.oracles.error_lines import match
from tracegraph.lowering.xla.riegeli import read_records
from tracegraph.lowering.xla.varint import read_varint
from tracegraph.runtime.errors import UnsupportedError

NOISE = random.Random(0).randbytes(3 * BLOCK)
CHUNK = "the file, chunk 1 at byte 64"
HUGE = (1 << 63, (1 << 64) - 1)


def catch_refusal(file: bytes) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        read_records(file, "the file")
    return caught.value


def read_or_catch(file: bytes) -> tuple[list[bytes], UnsupportedError | None]:
    """Returns the records or the error; any other end of the reader fails the test."""
    try:
        return read_records(file, "the file"), None
    except UnsupportedError as error:
        return [], error


@pytest.mark.parametrize("compression", ["", "s"])
@pytest.mark.parametrize(
    "records",
    [
        [],
        [b""],
        [b"", b"a", b""],
        [b"one", b"two" * 1000, b"\x00\xff"],
        [NOISE, b"behind two block headers", NOISE[:70000]],
        [b"x"] * 3000,
        [b""] * 70000,
    ],
    ids=["none", "empty", "ends-empty", "few", "many-blocks", "many-small", "padded"],
)
def test_written_records_are_read(records: list[bytes], compression: str) -> None:
    assert read_records(write_chunks(record_chunk(records, compression)), "the file") == records


@pytest.mark.parametrize("before_border", range(60))
def test_a_block_header_may_stand_anywhere(before_border: int) -> None:
    """Moves the border of the first block over the second chunk's header, byte by byte."""
    data = NOISE[: BLOCK - 64 - 40 - before_border]
    first = Chunk("p", data)
    file = write_chunks(first, record_chunk([b"after"], ""), record_chunk([b"last"]))
    assert read_records(file, "the file") == [b"after", b"last"]


@pytest.mark.parametrize("behind_border", [0, 1, 2, 23, 24, 25, 26, 27, 40])
def test_padding_ends_where_a_chunk_may_begin(behind_border: int) -> None:
    """Moves the end of a chunk that is padded to its number of records over a block header."""
    count = BLOCK - 64 + behind_border
    file = write_chunks(record_chunk([b""] * count), record_chunk([b"last"]))
    assert read_records(file, "the file") == [b""] * count + [b"last"]


def test_chunks_without_records_are_skipped() -> None:
    signature, padding, words = Chunk("s"), Chunk("p", b"any"), Chunk("m", b"\x00", 0, 12)
    file = write_chunks(words, padding, record_chunk([b"a"]), signature, record_chunk([b"b"], ""))
    assert read_records(file, "the file") == [b"a", b"b"]


def test_a_file_without_chunks_has_no_records() -> None:
    assert read_records(write_chunks(), "the file") == []


def test_an_error_has_four_lines() -> None:
    match(
        catch_refusal(write_chunks(Chunk("t"))),
        "the program that XLA compiled cannot be read: chunks of kind 't' are not known",
        CHUNK,
        "tracegraph reads the form that XLA writes",
        'pip install "jax[cuda13]>=0.10,<0.13"',
    )


def simple(data: bytes, count: int = 1, decoded: int = 1) -> Chunk:
    return Chunk("r", data, count, decoded)


def snappy_claim(size: int, inner: int | None = None) -> bytes:
    """Returns a chunk's data whose sizes are said to have ``size`` bytes by snappy."""
    part = varint(size) + varint(size if inner is None else inner) + b"\x00a"
    return b"s" + varint(len(part)) + part


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (Chunk("x"), "chunks of kind 'x' are not known"),
        (Chunk("p", record_count=1), "a chunk of kind 'p' claims 1 records"),
        (Chunk("s", record_count=9), "a chunk of kind 's' claims 9 records"),
        (simple(b""), "a chunk of records is empty"),
        (simple(b"b\x00"), "compression Brotli is not known"),
        (simple(b"z\x00"), "compression Zstandard is not known"),
        (simple(b"\x07\x00"), "compression byte 0x07 is not known"),
        (simple(b"\x00"), "no number ends after byte 1"),
        (simple(b"\x00\x80"), "no number ends after byte 1"),
        (simple(b"\x00" + b"\x80" * 10 + b"\x01"), "no number ends after byte 1"),
        (simple(b"\x00" + b"\xff" * 9 + b"\x7f"), "no number ends after byte 1"),
        (simple(b"\x00\x05\x01a"), "5 bytes of sizes in a chunk of 4 bytes"),
        (simple(b"\x00\x01\x02a"), "record 0 of 2 bytes has 1 bytes left"),
        (simple(b"\x00\x01\x81a"), "no number ends after byte 0"),
        (simple(b"\x00\x01\x00a"), "1 records of 0 bytes where 1 records of 1 bytes are declared"),
        (simple(b"\x00\x01\x01a", count=2), "1 records of 1 bytes where 2 records of 1"),
        (simple(b"\x00\x01\x01a", count=0), "1 records of 1 bytes where 0 records of 1"),
        (simple(b"\x00\x01\x01a", decoded=7), "records of 1 bytes where 7 are declared"),
        (simple(b"s\x00"), "no number ends after byte 0"),
        (simple(snappy_claim(1, inner=2)), "bytes of snappy claim to be 1 and 2 bytes"),
        (simple(snappy_claim(HUGE[1])), f"claim to be {HUGE[1]} and {HUGE[1]} bytes"),
        (simple(snappy_claim(1 << 30)), "claim to be 1073741824 and 1073741824 bytes"),
        (simple(snappy_claim(9)), "snappy says: "),
        (Chunk("r", size=9), "9 bytes end at byte 113 of 104"),
        (Chunk("r", size=HUGE[0]), "9223372036854775808 bytes end at byte"),
        (Chunk("r", size=HUGE[1]), "18446744073709551615 bytes end at byte"),
        (Chunk("p", size=70000), "70000 bytes end at byte 70128 of 104"),
        (Chunk("p", record_count=(1 << 56) - 1), "its padding ends at byte"),
    ],
)  # fmt: skip
def test_a_false_claim_is_refused(chunk: Chunk, problem: str) -> None:
    error = catch_refusal(write_chunks(chunk))
    assert problem in error.what
    assert error.where.startswith(CHUNK)


def test_the_place_of_a_later_chunk_is_named() -> None:
    good = record_chunk([b"abc"], "")
    error = catch_refusal(write_chunks(good, Chunk("t")))
    assert error.where == f"the file, chunk 2 at byte {64 + 40 + len(good.data)}"


def test_the_largest_snappy_ratio_is_read() -> None:
    """64 bytes from 3, which is as dense as snappy can be, is not taken for a false claim."""
    record = b"a" * 64 * 4096
    packed = varint(len(record)) + b"\x00a" + b"\xfe\x01\x00" * 4095 + b"\xfa\x01\x00"
    assert bytes(cramjam.snappy.decompress_raw(packed)) == record
    sizes = writer.compress(varint(len(record)), "s")
    data = b"s" + varint(len(sizes)) + sizes + varint(len(record)) + packed
    assert read_records(write_chunks(Chunk("r", data, 1, len(record))), "the file") == [record]


@pytest.mark.parametrize("size", range(64))
def test_a_file_ends_behind_its_signature(size: int) -> None:
    assert catch_refusal(writer.SIGNATURE[:size]).where == "the file, byte 0"


def test_every_shortened_file_is_refused() -> None:
    file = write_chunks(record_chunk([b"one", b"two" * 40]))
    for size in set(range(len(file))) - {64}:
        assert "cannot be read" in catch_refusal(file[:size]).what
    assert read_records(file[:64], "the file") == []


@given(st.lists(st.binary(max_size=300), max_size=8), st.sampled_from(["", "s"]), st.data())
@settings(max_examples=300)
def test_a_damaged_file_is_read_or_catchd(
    records: list[bytes], compression: str, data: st.DataObject
) -> None:
    file = bytearray(write_chunks(record_chunk(records, compression), record_chunk(records)))
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(64, len(file) - 1))
        file[index] = data.draw(st.integers(0, 255))
    found, error = read_or_catch(bytes(file))
    if error is not None:
        assert error.where.startswith("the file, ")
        return
    # Hashes are not compared, so that a chunk may lose its kind or a record its bytes, no more.
    assert len(found) in (0, len(records), len(records) * 2)


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_noise_behind_a_signature_is_read_or_catchd(noise: bytes) -> None:
    _, error = read_or_catch(writer.SIGNATURE + noise)
    assert error is None or error.where.startswith("the file, chunk ")


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=3))
def test_numbers_are_read(value: int, after: bytes) -> None:
    data = varint(value)
    assert read_varint(b"\xff" + data + after, 1, "here") == (value, 1 + len(data))


def test_the_writer_puts_a_header_at_each_block() -> None:
    """Guards the guard: the test files would be easy to read if the writer wrote no headers."""
    file = write_chunks(Chunk("p", NOISE))
    for border in range(BLOCK, len(file), BLOCK):
        assert file[border : border + 24] == writer.BLOCK_HEADER
    assert len(file) == 64 + 40 + len(NOISE) + 3 * 24
    assert struct.unpack_from("<Q", file, 72) == (len(NOISE),)
