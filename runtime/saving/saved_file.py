"""Saved files: a header of JSON and byte strings, with a checksum over both.

Note [Layout of a file]. All numbers are little-endian. ::

    16 bytes   MAGIC
     4         version of the layout
     4         0
     8         bytes of the header as stored
     8         bytes of the header after it is inflated
    32         SHA-256 of all that follows
               the header, deflated by zlib: JSON with `blobs`, a list of [offset, bytes] that
               counts from the first one, and `content`
               the blobs, one after the other

The checksum finds damage, not malice: who writes a file can write its checksum. So every length is
compared with what is there before it is used, and reading gives a header of JSON and bytes, or an
error that says where the file is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from tracegraph.runtime.errors import SavedFileError

MAGIC = b"tracegraph\r\n\x1a\n\x00\x89"
VERSION = 1
_LENGTHS = struct.Struct("<IIQQ")
_DIGEST = hashlib.sha256().digest_size
FIRST_BYTES = len(MAGIC) + _LENGTHS.size + _DIGEST
# More than any graph needs; a header that claims more is not inflated.
MAX_HEADER_BYTES = 1 << 28
ANCHOR = "saved-file"


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """What a file holds.

    Attributes:
        source: what messages call it.
        content: of its header.
        blobs: byte strings, which share the memory of the file.
        nbytes: of the whole file.
        checksum: of all that it holds, in hexadecimal digits.
    """

    source: str
    content: Any = dataclasses.field(repr=False)
    blobs: tuple[memoryview, ...] = dataclasses.field(repr=False)
    nbytes: int
    checksum: str


def write_file(
    path: str | os.PathLike[str], content: Any, blobs: Sequence[bytes], *, mode: int = 0o600
) -> int:
    """Writes a file as a whole or not at all, and returns its bytes.

    Two processes that write one path at once both write whole files; the last one stays.

    Args:
        path: of the file; its folder exists.
        content: JSON's own types.
        blobs: byte strings.
        mode: who may read it.

    Raises:
        SavedFileError: the file cannot be written.
    """
    path = _take_path(path)
    parts = pack_file(content, blobs)
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file():
            raise SavedFileError(
                f"{path} cannot be written: it is a folder, a device or a pipe",
                where=str(path),
                why="the file takes the place of what is there, as a whole",
                fix="choose the name of a file",
                anchor=ANCHOR,
            )
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.writelines(parts)
            file.flush()
            os.fsync(descriptor)
        pathlib.Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise SavedFileError(
            f"{path} cannot be written: {error.strerror or error}",
            where=str(path),
            why="it is written beside its place and then moved there, so nothing of it is left",
            fix="choose a folder that exists, that you may write to, and with room on its disk",
            anchor=ANCHOR,
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                pathlib.Path(temporary).unlink()
    return sum(map(len, parts))


def _take_path(path: Any) -> pathlib.Path:
    try:
        text = os.fspath(path)
        is_path = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if is_path:
        return pathlib.Path(path)
    raise SavedFileError(
        f"{path!r} is not a path",
        where="argument `path`",
        why="a file is named by a text or a pathlib.Path, in characters that the system has",
        fix="pass the path of a file, as 'step.tg'",
        anchor=ANCHOR,
    )


def pack_file(content: Any, blobs: Sequence[bytes]) -> list[bytes]:
    """Returns the parts of a file, see Note [Layout of a file]."""
    places, offset = [], 0
    for blob in blobs:
        places.append([offset, len(blob)])
        offset += len(blob)
    plain = json.dumps({"blobs": places, "content": content}, separators=(",", ":")).encode()
    header = zlib.compress(plain, 6)
    digest = hashlib.sha256(header)
    for blob in blobs:
        digest.update(blob)
    lengths = _LENGTHS.pack(VERSION, 0, len(header), len(plain))
    return [MAGIC, lengths, digest.digest(), header, *blobs]


def read_file(
    path: str | os.PathLike[str], *, sha256: str | None = None, is_private: bool = False
) -> SavedFile:
    """Reads a file.

    Args:
        path: of the file.
        sha256: of the whole file, in hexadecimal digits; None takes any.
        is_private: True to refuse a file that others may write or read, or that is another user's.

    Raises:
        SavedFileError: it is not there, not private, or not as it was written.
    """
    path = _take_path(path)
    try:
        with path.open("rb") as file:
            if is_private:
                _check_owner(path, os.fstat(file.fileno()))
            data = file.read()
    except OSError as error:
        raise SavedFileError(
            f"{path} cannot be read: {error.strerror or error}",
            where=str(path),
            why="there is no such file, or this user may not read it",
            fix="check the path, and who owns the file: ls -l",
            anchor=ANCHOR,
        ) from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256.strip().lower():
        raise SavedFileError(
            f"{path} is not the file that was asked for",
            where=f"{path}, sha256 {hashlib.sha256(data).hexdigest()}",
            why=f"sha256={sha256!r} names another one, and a file holds code that is run",
            fix="get the file again from where that sum was published, or ask why it changed",
            anchor=ANCHOR,
        )
    return parse_file(data, str(path))


def parse_file(data: bytes, source: str) -> SavedFile:
    """Returns what the bytes of a file hold.

    Args:
        data: the whole file.
        source: what messages call it.

    Raises:
        SavedFileError: they are not as `pack_file` writes them; the offset is named.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise_damage(source, "offset 0", "it does not begin as a saved file of tracegraph does")
    if len(data) < FIRST_BYTES:
        raise_damage(source, f"offset {len(data)}", "it ends within its first lengths")
    version, reserved, stored, inflated = _LENGTHS.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise SavedFileError(
            f"{source} has layout {version}, and this version of tracegraph reads {VERSION}",
            where=f"{source}, offset {len(MAGIC)}",
            why="another version of tracegraph has written it",
            fix="load it with that version, or save it again with this one",
            anchor=ANCHOR,
        )
    if reserved or stored > len(data) - FIRST_BYTES or inflated > MAX_HEADER_BYTES:
        raise_damage(source, f"offset {len(MAGIC) + 4}", "its header is longer than the file is")
    view = memoryview(data)
    digest = data[FIRST_BYTES - _DIGEST : FIRST_BYTES]
    if hashlib.sha256(view[FIRST_BYTES:]).digest() != digest:
        place = f"offset {FIRST_BYTES} to the end, {len(data)} bytes in all"
        raise_damage(source, place, "its checksum does not fit: it is truncated or damaged")
    header = _read_header(view[FIRST_BYTES : FIRST_BYTES + stored], inflated, source)
    blobs = tuple(_cut_blobs(header["blobs"], view[FIRST_BYTES + stored :], source))
    return SavedFile(source, header["content"], blobs, len(data), digest.hex())


def _read_header(stored: memoryview, inflated: int, source: str) -> dict[str, Any]:
    place = f"offset {FIRST_BYTES}, the header"
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(stored, inflated + 1)
    except zlib.error as error:
        raise_damage(source, place, f"it cannot be inflated: {error}")
    if len(plain) != inflated or not inflater.eof or inflater.unused_data:
        raise_damage(source, place, f"it does not inflate to {inflated} bytes")
    try:
        header = json.loads(plain, object_pairs_hook=_make_object, parse_constant=_raise_constant)
    except (ValueError, RecursionError) as error:
        raise_damage(source, place, f"it is no JSON: {error}")
    if not isinstance(header, dict) or header.keys() != {"blobs", "content"}:
        raise_damage(source, place, "it has not blobs and a content")
    return header


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is twice in an object")
    return found


def _raise_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _cut_blobs(places: Any, rest: memoryview, source: str) -> Iterator[memoryview]:
    """Yields the blobs; together they are all of the rest, in order."""
    if not isinstance(places, list):
        raise_damage(source, "the header", "its blobs are not a list")
    end = 0
    for number, place in enumerate(places):
        is_pair = isinstance(place, list) and [type(each) for each in place] == [int, int]
        if not is_pair or place[0] != end or not 0 <= place[1] <= len(rest) - end:
            raise_damage(source, f"blob {number} in the header", "it is not where it should be")
        yield rest[end : end + place[1]]
        end += place[1]
    if end != len(rest):
        raise_damage(source, "the end", f"{len(rest) - end} bytes belong to no blob")


def raise_damage(source: str, place: str, problem: str) -> NoReturn:
    """Raises the error of a file that is not as it was written.

    Args:
        source: what messages call the file.
        place: offset, or row and field.
        problem: what is wrong there.
    """
    raise SavedFileError(
        f"{source} cannot be loaded: {problem}",
        where=f"{source}, {place}",
        why="what a file says is checked before it is used, since a graph made of it runs as it is",
        fix="copy or save it again; if it was saved by this version, please report this text",
        anchor=ANCHOR,
    )


def _check_owner(path: pathlib.Path, found: os.stat_result) -> None:
    others = stat.S_IMODE(found.st_mode) & 0o077
    if found.st_uid == os.geteuid() and not others and stat.S_ISREG(found.st_mode):
        return
    raise SavedFileError(
        f"{path} is not private: its owner is user {found.st_uid}, its mode {found.st_mode:o}",
        where=str(path),
        why=f"it holds machine code, and others than user {os.geteuid()} may have written it",
        fix=f"remove it, or make it yours and private: chmod 600 {path}",
        anchor=ANCHOR,
    )
