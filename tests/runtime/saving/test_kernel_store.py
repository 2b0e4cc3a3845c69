"""The store of the kernel cache: whole files or none, private, no error whatever the disk does."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

import pytest

from tests.processes import run_copy
from tracegraph.runtime.saving import kernel_store, saved_file
from tracegraph.runtime.saving.kernel_store import KernelStore

KIB = 1024


@pytest.fixture
def store(tmp_path: pathlib.Path) -> KernelStore:
    return KernelStore(tmp_path / "deep" / "kernels", 64 * KIB)


def read(store: KernelStore, key: str) -> Any:
    file = store.find(key)
    return None if file is None else (file.content, [bytes(blob) for blob in file.blobs])


def age(store: KernelStore, key: str, seconds: float) -> None:
    path = store.path / f"{key}{kernel_store.SUFFIX}"
    found = path.stat()
    os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def test_what_is_stored_is_found(store: KernelStore):
    assert read(store, "a") is None
    assert store.add("a", {"x": 1}, [b"blob"])
    assert read(store, "a") == ({"x": 1}, [b"blob"])
    assert store.add("a", {"x": 2}, [])
    assert read(store, "a") == ({"x": 2}, [])
    info = store.read_info()
    assert (info.path, info.entries, info.limit) == (store.path, 1, 64 * KIB)
    assert info.nbytes == (store.path / "a.tgk").stat().st_size


def test_keys_are_known_by_how_they_begin(store: KernelStore):
    assert not store.holds("a")
    store.add("abc", {}, [])
    assert [store.holds(each) for each in ("a", "abc", "b", "abcd")] == [True, True, False, False]
    assert not KernelStore(store.path / "abc.tgk", 64 * KIB).holds("a")


def test_files_are_private(store: KernelStore):
    store.add("a", {}, [])
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert (store.path / "a.tgk").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"another file"),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o644),
        lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
        lambda path: (path.rename(path.with_name("moved")), path.symlink_to("moved")),
    ],
    ids=["truncated", "foreign", "flipped", "empty", "readable", "pipe", "link"],
)
def test_a_damaged_file_is_a_miss_with_one_line(
    damage: Any, store: KernelStore, caplog: pytest.LogCaptureFixture
):
    store.add("a", {}, [b"0123456789"])
    damage(store.path / "a.tgk")
    with caplog.at_level(logging.WARNING, logger="tracegraph"):
        assert store.find("a") is None
        assert store.find("a") is None
    assert len(caplog.records) == 1
    assert not (store.path / "a.tgk").exists()
    assert store.add("a", {"again": 1}, [])
    assert read(store, "a") == ({"again": 1}, [])


def test_what_was_not_used_for_longest_goes_first(store: KernelStore):
    for number in range(4):
        store.add(f"k{number}", number, [os.urandom(15 * KIB)])
        age(store, f"k{number}", 100 - number)
    assert store.find("k0") is not None
    store.add("k4", 4, [os.urandom(15 * KIB)])
    assert {path.stem for path in store.path.iterdir()} == {"k0", "k2", "k3", "k4"}
    assert store.read_info().nbytes <= 64 * KIB


def test_a_file_larger_than_the_limit_takes_no_room_of_others(store: KernelStore):
    store.add("a", 1, [])
    assert not store.add("large", 2, [os.urandom(70 * KIB)])
    assert [path.stem for path in store.path.iterdir()] == ["a"]


def test_files_of_writers_that_are_gone_are_removed(store: KernelStore):
    store.add("a", 1, [])
    for name, seconds in ((".old.tgk.x1", 7200), (".new.tgk.x2", 60)):
        path = store.path / name
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_atime - seconds, path.stat().st_mtime - seconds))
    store.add("b", 1, [])
    assert {path.name for path in store.path.iterdir()} == {"a.tgk", "b.tgk", ".new.tgk.x2"}


def test_clear_removes_all_files_of_ours(store: KernelStore):
    assert store.clear() == 0
    store.add("a", 1, [])
    store.add("b", 1, [])
    (store.path / "notes.txt").write_text("mine")
    assert store.clear() == 2
    assert [path.name for path in store.path.iterdir()] == ["notes.txt"]


def test_a_disk_that_takes_nothing_is_one_line(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_file.os, "fsync", fail)
    assert not store.add("a", 1, [])
    assert not store.add("b", 1, [])
    assert list(store.path.iterdir()) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"the kernel cache stores nothing: {store.path / 'a.tgk'} cannot be written: "
        "No space left on device"
    ]


def test_a_folder_that_is_none_or_that_others_may_write_to(tmp_path: pathlib.Path):
    file = tmp_path / "file"
    file.write_text("no folder")
    assert not KernelStore(file, KIB).add("a", 1, [])
    assert KernelStore(file, KIB).find("a") is None
    assert KernelStore(file, KIB).read_info().entries == 0
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert not KernelStore(folder, KIB).add("a", 1, [])
    assert list(folder.iterdir()) == []


def test_a_file_that_goes_while_it_is_opened_is_a_plain_miss(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store.add("a", 1, [])

    def read_late(path: pathlib.Path, **options: Any) -> Any:
        path.unlink()
        return saved_file.read_file(path, **options)

    monkeypatch.setattr(kernel_store, "read_file", read_late)
    assert store.find("a") is None
    assert not caplog.records


CLOSED = """
import logging, os, pathlib, sys
from tracegraph.runtime.saving.kernel_store import KernelStore
if os.geteuid() == 0:
    os.setuid(12345)
logging.basicConfig(format="%(message)s")
store = KernelStore(pathlib.Path(sys.argv[1]), 1 << 30)
print(store.find("a"), store.find("b"), store.add("a", 1, []), store.read_info().entries)
print(store.clear())
"""


def test_a_folder_that_may_not_be_entered_is_one_line(store: KernelStore):
    store.add("a", 1, [])
    store.path.parent.chmod(0)
    # As another user, for root may enter all folders.
    ran = run_copy(["-c", CLOSED, store.path])
    store.path.parent.chmod(0o700)
    assert ran.stdout.splitlines() == ["None None False 0", "0"], ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("the kernel cache cannot be read: [Errno 13] Permission denied")
    assert store.find("a") is not None


WRITERS = """
import multiprocessing, pathlib, sys
from tracegraph.runtime.saving.kernel_store import KernelStore

def write(name):
    store = KernelStore(pathlib.Path(sys.argv[1]), 1 << 30)
    both.wait()
    for turn in range(60):
        store.add("k", {"from": name, "turn": turn}, [name.encode() * 50_000])
        found = store.find("k")
        assert found is not None
        (blob,) = found.blobs
        assert bytes(blob) == found.content["from"].encode() * 50_000, "a file of two writers"

context = multiprocessing.get_context("fork")
both = context.Barrier(2)
running = [context.Process(target=write, args=(name,)) for name in "xy"]
for each in running:
    each.start()
for each in running:
    each.join(120)
print([each.exitcode for each in running])
"""


def test_two_processes_write_one_key(store: KernelStore):
    ran = run_copy(["-c", WRITERS, store.path])
    assert (ran.returncode, ran.stdout) == (0, "[0, 0]\n"), ran.stderr
    assert "drops" not in ran.stderr
    assert store.find("k") is not None
    assert len(list(store.path.iterdir())) == 1
