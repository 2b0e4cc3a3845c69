"""What `save` and `tg.load` refuse, in four lines that name the file and the reason."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import struct
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.host import device as host_device
from tracegraph.runtime.saving import saved_file
from tracegraph.runtime.saving.saved_file import parse_file, write_file
from tracegraph.runtime.streams.stream_capture import thread_state
from tracegraph.saving import saved_target


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of a small function."""
    return save(tmp_path / "step.tg", lambda x: x * 2)


def save(path: pathlib.Path, function: Callable[..., Any], **options: Any) -> pathlib.Path:
    step = tg.capture(function, name="step", **options)
    step(jnp.ones(2))
    step.save(path)
    return path


def change(path: pathlib.Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the header of a file; its checksum fits again."""
    file = parse_file(path.read_bytes(), str(path))
    edit(file.content)
    write_file(path, file.content, [bytes(blob) for blob in file.blobs])


def assert_four_lines(error: tg.TracegraphError) -> None:
    lines = str(error).splitlines()
    assert [line[:9] for line in lines[1:]] == ["  where: ", "  why:   ", "  fix:   "], str(error)


def refuse(path: pathlib.Path, message: str, **options: Any) -> tg.SavedFileError:
    with pytest.raises(tg.SavedFileError, match=message) as raised:
        tg.load(path, **options)
    assert_four_lines(raised.value)
    assert str(path) in str(raised.value)
    return raised.value


def test_a_file_of_something_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a graph")
    refuse(path, "does not begin as a saved file of tracegraph does")
    refuse(tmp_path / "missing.tg", "cannot be read: No such file")
    refuse(tmp_path, "cannot be read: Is a directory")


def test_truncated_and_changed_bytes(path: pathlib.Path) -> None:
    data = path.read_bytes()
    for size in (20, 70, len(data) - 1):
        path.write_bytes(data[:size])
        assert "offset" in refuse(path, "cannot be loaded").where
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refuse(path, "its checksum does not fit")
    path.write_bytes(data + b"x")
    refuse(path, "its checksum does not fit")


def test_a_newer_layout_and_a_newer_format(path: pathlib.Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:16] + struct.pack("<I", 9) + data[20:])
    refuse(path, "has layout 9, and this version of tracegraph reads 1")
    path.write_bytes(data)
    change(path, lambda content: content.update(format=7, function=None, more=1))
    error = refuse(path, "has format 7, and this version of tracegraph reads 1")
    assert f"saved with tracegraph {tg.__version__}" in error.where


def test_a_pinned_file(path: pathlib.Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    np.testing.assert_array_equal(tg.load(path, sha256=digest)(jnp.ones(2)), [2, 2])
    tg.load(path, sha256=f" {digest.upper()}\n")
    error = refuse(path, "is not the file that was asked for", sha256="0" * 64)
    assert digest in error.where


def test_no_permission(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert path.stat().st_mode & 0o777 == 0o600

    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", raise_error)
        refuse(path, "cannot be read: Permission denied")
    step = tg.capture(lambda x: x + 1)
    step(jnp.ones(2))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(saved_file.tempfile, "mkstemp", raise_error)
        with pytest.raises(tg.SavedFileError, match="cannot be written: Permission denied"):
            step.save(path)
    with pytest.raises(tg.SavedFileError, match="cannot be written: No such file"):
        step.save(path.parent / "missing" / "step.tg")
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_file(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    step = tg.capture(lambda x: x + 1)
    step(jnp.ones(2))

    def raise_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saved_file.os, "fsync", raise_full)
    with pytest.raises(tg.SavedFileError, match="cannot be written: No space left") as raised:
        step.save(path)
    assert_four_lines(raised.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_saves_at_once_are_whole(path: pathlib.Path) -> None:
    steps = [tg.capture(lambda x, n=n: x * n) for n in range(4)]
    for step in steps:
        step(jnp.ones(2))
    threads = [threading.Thread(target=step.save, args=(path,)) for step in steps * 4]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert float(tg.load(path)(jnp.ones(2))[0]) in (0, 1, 2, 3)
    for thread in threads:
        thread.join()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (CodeTarget("cuda", "9.0", "NVIDIA H200"), r"capability 9.0 \(NVIDIA H200\), and here"),
        (CodeTarget("cpu", "arm128", "cpu"), "is for a CPU of .*, and here is a CPU of arm128"),
        (CodeTarget("cpu", os.uname().machine, "cpu"), "is for a CPU with .*, and here is one wi"),
    ],
)
def test_another_machine(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, target: CodeTarget, message: str
) -> None:
    if target.platform == "cuda":
        # The file is of the GPU.
        def edit(content: Any) -> None:
            content["origin"]["target"].update(
                platform="cuda", architecture="9.0", name="NVIDIA H200"
            )

        change(path, edit)
    else:
        monkeypatch.setattr(host_device, "read_target", lambda device: target)
    error = refuse(path, message)
    assert "machine code" in error.why


def test_another_gpu_and_an_older_driver(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_state, "streams", [])
    device = capture_for_gpu(monkeypatch)
    monkeypatch.setattr(type(device), "target", make_gpu("9.0", 13_000))
    path = save(tmp_path / "step.tg", lambda x: x * 2)
    monkeypatch.setattr(type(device), "target", make_gpu("9.0", 12_090))
    error = refuse(path, "is for a driver of CUDA 13.0 or later, and here is one of CUDA 12.9")
    assert "install a newer NVIDIA driver" in error.fix
    monkeypatch.setattr(type(device), "target", make_gpu("8.0", 13_000))
    refuse(path, r"capability 9.0 \(NVIDIA H200\), and here is a GPU of compute capability 8.0")


def make_gpu(architecture: str, driver: int) -> property:
    target = CodeTarget("cuda", architecture, "NVIDIA H200", compiler=13_010, driver=driver)
    return property(lambda device: target)


def test_checking_mode_copies_what_programs_of_other_modes_update(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(step: Any) -> list[float]:
        state, _ = step(jnp.ones(2))
        state, _ = step(state)
        state, total = step(state)
        return [*map(float, state), float(total)]

    wanted = [8, 8, 8]
    for saved, loaded in (("1", "0"), ("1", "1"), ("0", "0"), ("0", "1")):
        monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", saved)
        step = tg.capture(lambda s: (s * 2, s.sum()), donate_argnums=0)
        assert call(step) == wanted
        step.save(tmp_path / "step.tg")
        monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", loaded)
        if (saved, loaded) == ("0", "1"):
            refuse(tmp_path / "step.tg", "was not saved in checking mode, and is loaded in it")
        else:
            assert call(tg.load(tmp_path / "step.tg")) == wanted


def test_other_versions(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(saved_target, "_JAXLIB", "0.99.1")
        error = refuse(path, "is for jaxlib .*, and here is jaxlib 0.99.1")
        assert "pip install jaxlib==" in error.fix
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.99.1")
        refuse(
            path, f"is for JAX {jax.__version__.replace('0.99.1', '')}.*, and here is JAX 0.99.1"
        )
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", f"{jax.__version__}.post1")
        tg.load(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.clear(),
        lambda content: content.update(format="1"),
        lambda content: content.update(more=1),
        lambda content: content.update(origin={}),
        lambda content: content["origin"].update(jax=1),
        lambda content: content["origin"]["target"].update(driver="x"),
        lambda content: content["origin"]["target"].update(features=[1]),
        lambda content: content.update(function=[]),
        lambda content: content["function"]["rows"].pop(),
        lambda content: content.update(lowered=[]),
        lambda content: content.update(lowered={}),
        lambda content: content.update(lowered=[None]),
        lambda content: content["lowered"].append(content["lowered"][0]),
        lambda content: content["lowered"][0].pop("executables"),
    ],
)
def test_headers_that_nothing_writes(path: pathlib.Path, edit: Callable[[Any], None]) -> None:
    change(path, edit)
    refuse(path, "cannot be loaded")


def edit_rows(kind: str, field: str, value: Any) -> Callable[[Any], None]:
    """Returns what changes a field of all records of a kind in the function."""

    def edit(content: Any) -> None:
        types = content["function"]["types"]
        number = next(i for i, names in enumerate(types) if names[0] == kind)
        for row in content["function"]["rows"]:
            if row[0] == number:
                row[types[number].index(field)] = value

    return edit


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("SavedLeaf", "shape", ["t", 3]),
        ("SavedLeaf", "shape", ["t", -2]),
        ("SavedLeaf", "dtype", ["y", "int32"]),
        ("SavedLeaf", "dtype", 3),
        ("SavedCall", "names", ["t"]),
        ("SavedCall", "names", ["t", "x", "y"]),
        ("SavedCall", "positions", ["t", 1]),
        ("SavedCall", "settings", ["t"]),
        ("SavedArgument", "key", 1),
        ("SavedArgument", "key", "x"),
        ("SavedResults", "aliases", ["t", ["t", 0, 0]]),
        ("SavedResults", "avals", ["t"]),
        ("SavedResults", "outputs", "live"),
        ("SavedEntry", "constants", ["t", ["t", "%c0", 0]]),
        ("SavedParameter", "kind", "NONE"),
        ("SavedParameter", "name", "1x"),
        ("SavedFunction", "entries", ["t"]),
        ("Setting", "name", "jax_of_tomorrow"),
    ],
)
def test_records_that_no_function_has(
    path: pathlib.Path, kind: str, field: str, value: Any
) -> None:
    change(path, edit_rows(kind, field, value))
    if (kind, field, value) == ("SavedCall", "settings", ["t"]):
        # All settings are then as they are in this process.
        tg.load(path)
        return
    refuse(path, "cannot be loaded")


def test_a_function_without_graphs(tmp_path: pathlib.Path) -> None:
    step = tg.capture(lambda x: x * 2, name="step")
    for _ in range(2):
        with pytest.raises(tg.SavedFileError, match="`step` has nothing to save") as raised:
            step.save(tmp_path / "step.tg")
        assert_four_lines(raised.value)
        step.lower(jnp.ones(2))
    assert list(tmp_path.iterdir()) == []


def read_value(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x


def call_back(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x)


def make_event_step() -> Callable[..., Any]:
    event = tg.Event(external=True)

    def record(x: Any) -> Any:
        y = x * 2
        event.record()
        return y + 1

    return record


@pytest.mark.parametrize(
    ("make", "options", "call", "message"),
    [
        (lambda: read_value, {"mode": "partial"}, (jnp.ones(2),), "it reads values in Python"),
        (lambda: call_back, {"mode": "partial"}, (jnp.ones(2),), "runs as Python between"),
        (lambda: lambda x: x * 2, {"debug_nans": True}, (jnp.ones(2),), "debug_nans=True calls"),
        (
            lambda: lambda x, f: f(x),
            {"static_argnums": 1},
            (jnp.ones(2), lambda x: x),
            "static argument f: <function .*, and no module has it by a name",
        ),
        (
            lambda: lambda x: x + jax.random.normal(tg.random.next_key(), x.shape),
            {},
            (jnp.ones(2),),
            "it draws keys from generators",
        ),
        (make_event_step, {}, (jnp.ones(2),), "it records an event of this process"),
    ],
)
def test_functions_that_no_file_holds(
    tmp_path: pathlib.Path, make: Any, options: Any, call: Any, message: str
) -> None:
    step: Any = tg.capture(make(), name="step", **options)
    step(*call)
    with pytest.raises(tg.SavedFileError, match=f"`step` cannot be saved: .*{message}") as raised:
        step.save(tmp_path / "step.tg")
    assert_four_lines(raised.value)
    assert list(tmp_path.iterdir()) == []
