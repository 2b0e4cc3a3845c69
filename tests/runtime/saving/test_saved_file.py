"""Files as a whole: written whole or not at all, read as they were written or refused."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import zlib
from typing import Any

import pytest

from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.saving import saved_file
from tracegraph.runtime.saving.saved_file import (
    FIRST_BYTES,
    MAGIC,
    pack_file,
    parse_file,
    read_file,
    write_file,
)

CONTENT = {"answer": [1, None, "ä", True]}
BLOBS = (b"one", b"", b"three")
DATA = b"".join(pack_file(CONTENT, BLOBS))


def seal(header: bytes, inflated: int, rest: bytes = b"", stored: int | None = None) -> bytes:
    """Returns a file with any header, its checksum right."""
    stored = len(header) if stored is None else stored
    lengths = saved_file._LENGTHS.pack(saved_file.VERSION, 0, stored, inflated)
    return MAGIC + lengths + hashlib.sha256(header + rest).digest() + header + rest


def seal_json(header: Any, rest: bytes = b"") -> bytes:
    plain = header if isinstance(header, bytes) else json.dumps(header).encode()
    return seal(zlib.compress(plain), len(plain), rest)


def catch(data: bytes) -> SavedFileError:
    with pytest.raises(SavedFileError) as caught:
        parse_file(data, "step.tg")
    assert len(str(caught.value).splitlines()) == 4
    return caught.value


def test_a_file_comes_back(tmp_path: pathlib.Path):
    path = tmp_path / "step.tg"
    nbytes = write_file(path, CONTENT, BLOBS)
    found = read_file(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), is_private=True)
    assert (found.content, tuple(map(bytes, found.blobs))) == (CONTENT, BLOBS)
    assert found.nbytes == nbytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["step.tg"]


def test_every_flipped_byte_and_every_cut_is_found():
    for index in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[index] ^= 1 << index % 8
        catch(bytes(damaged))
        catch(DATA[:index])
    catch(DATA + b"x")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "offset 0"),
        (b"PK\x03\x04" + DATA, "offset 0"),
        (DATA[:40], "offset 40"),
        (DATA[:-1], f"offset {FIRST_BYTES} to the end"),
        (seal(b"", 0, stored=1 << 60), "offset 20"),
        (seal(zlib.compress(b"{}"), 1 << 60), "offset 20"),
        (seal(b"no zlib", 7), f"offset {FIRST_BYTES}, the header"),
        (seal(zlib.compress(b"0" * 100_000), 10), f"offset {FIRST_BYTES}, the header"),
        (seal(zlib.compress(b"{}") + b"more", 2), f"offset {FIRST_BYTES}, the header"),
        (seal_json(b'{"blobs": [], "blobs": [], "content": 0}'), "the header"),
        (seal_json(b'{"blobs": [], "content": NaN}'), "the header"),
        (seal_json(b"\xff"), "the header"),
        (seal_json(b"[" * 100_000), "the header"),
        (seal_json(b"1" * 100_000), "the header"),
        (seal_json([]), "the header"),
        (seal_json({"blobs": 3, "content": 0}), "the header"),
        (seal_json({"blobs": [[0, -1]], "content": 0}), "blob 0 in the header"),
        (seal_json({"blobs": [[0, 1 << 70]], "content": 0}), "blob 0 in the header"),
        (seal_json({"blobs": [[0, 2], [1, 2]], "content": 0}, b"123"), "blob 1 in the header"),
        (seal_json({"blobs": [[0, True]], "content": 0}, b"1"), "blob 0 in the header"),
        (seal_json({"blobs": [[0, 1]], "content": 0}, b"12"), "the end"),
    ],
)
def test_files_that_do_not_hold_together(data: bytes, where: str):
    assert where in catch(data).where


def test_another_layout_is_named():
    later = bytearray(DATA)
    later[len(MAGIC)] = 9
    assert catch(bytes(later)).what.startswith("step.tg has layout 9, and this version")


def test_another_file_than_was_asked_for(tmp_path: pathlib.Path):
    path = tmp_path / "step.tg"
    write_file(path, CONTENT, BLOBS)
    with pytest.raises(SavedFileError, match="is not the file that was asked for"):
        read_file(path, sha256="0" * 64)


def test_private_files_are_of_their_owner_alone(tmp_path: pathlib.Path):
    path = tmp_path / "step.tg"
    write_file(path, CONTENT, BLOBS, mode=0o644)
    read_file(path)
    with pytest.raises(SavedFileError, match="is not private"):
        read_file(path, is_private=True)


def test_no_file_and_no_folder(tmp_path: pathlib.Path):
    with pytest.raises(SavedFileError, match="cannot be read: No such file"):
        read_file(tmp_path / "absent.tg")
    with pytest.raises(SavedFileError, match="cannot be written: No such file"):
        write_file(tmp_path / "absent" / "step.tg", CONTENT, BLOBS)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "step.tg"
    write_file(path, CONTENT, BLOBS)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SavedFileError, match="No space left on device"):
        write_file(path, "other", ())
    assert [each.name for each in tmp_path.iterdir()] == ["step.tg"]
    assert read_file(path).content == CONTENT
