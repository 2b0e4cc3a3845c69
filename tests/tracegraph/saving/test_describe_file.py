"""What `python -m tracegraph show` prints of a saved graph."""

from __future__ import annotations

import hashlib
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.__main__ import run_command
from tracegraph.lowering import saved_lowering
from tracegraph.runtime.saving.saved_file import pack_file, read_file

WEIGHTS = jnp.ones((512, 1024))


def save(path: pathlib.Path, **options: Any) -> pathlib.Path:
    @tg.capture(donate_argnums=0, static_argnums=2)
    def step(state: dict[str, Any], batch: Any, count: int) -> Any:
        new = {"w": state["w"] - 0.1 * batch, "key": state["key"]}
        return new, (state["w"] * batch).sum() + WEIGHTS[0, 0] + count

    for size in (4, 8):
        step({"w": jnp.ones(size), "key": jax.random.key(0)}, jnp.ones(size), 3)
    step.save(path, **options)
    return path


def test_a_file_is_described_without_loading_its_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = save(tmp_path / "step.tg", constants=False)

    def refuse(*_: Any) -> None:
        raise AssertionError("code was loaded")

    monkeypatch.setattr(saved_lowering, "load_executable", refuse)
    lines = run_command(["show", str(path)]).splitlines()
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert lines[0] == f"`step`: {len(data):,} bytes, sha256 {digest}"
    assert lines[1].startswith(f"saved with cpu ({platform.machine()}), JAX {jax.__version__}")
    assert lines[2:4] == [
        "closed-over arrays: 1, 2,097,152 bytes, to be given to tg.load",
        "  WEIGHTS: f32[512,1024]",
    ]
    assert lines[5:14] == [
        "signature 0",
        "arguments: 2, leaves: 3, static: 1",
        "  state['key']: key<fry>[], donated",
        "  state['w']: f32[8], donated",
        "  batch: f32[8]",
        "results: 3, fresh",
        "nodes: 1 graph: 1 call; 0 edges",
        "memory: 2,129,920 bytes",
        "verification: 3 of 3 results equal XLA's executable bit for bit",
    ]
    assert "signature 1" in lines


def test_kernels_are_counted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    capture_for_gpu(monkeypatch)
    text = run_command(["show", str(save(tmp_path / "step.tg"))])
    assert "saved with " in text
    assert "code: 1 images, " in text
    assert "nodes: 1 graph: 1 kernel; 0 edges" in text


def test_files_that_are_none(tmp_path: pathlib.Path):
    path = save(tmp_path / "step.tg")
    for data, place in (
        (b"no file of ours", "offset 0"),
        (path.read_bytes()[:-1], "to the end"),
        (b"".join(pack_file({"format": 1}, [])), "the header"),
    ):
        (tmp_path / "other.tg").write_bytes(data)
        with pytest.raises(tg.SavedFileError) as caught:
            run_command(["show", str(tmp_path / "other.tg")])
        assert place in caught.value.where
    with pytest.raises(tg.SavedFileError, match="cannot be read"):
        run_command(["show", str(tmp_path / "none.tg")])
    file = read_file(path)
    content = {**file.content, "lowered": [{"executables": 3, "lowered": 4}] * 2}
    path.write_bytes(b"".join(pack_file(content, [bytes(blob) for blob in file.blobs])))
    with pytest.raises(tg.SavedFileError) as caught:
        run_command(["show", str(path)])
    assert "signature 0" in caught.value.where
