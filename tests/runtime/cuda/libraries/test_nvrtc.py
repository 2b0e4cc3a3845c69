"""NVRTC: its calls, its errors, and what happens without it."""

# ruff: noqa: N802, N815  the names are those of NVIDIA's bindings

from __future__ import annotations

import itertools
import pathlib
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.oracles.error_lines import match
from tracegraph.runtime.cuda.libraries import kept_sources, nvrtc
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.saving.saved_file import read_file, write_file


class FakeNvrtc(types.ModuleType):
    """Stands for `cuda.bindings.nvrtc`: machine code is the source with its options."""

    nvrtcResult = types.SimpleNamespace(NVRTC_SUCCESS=0)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self.programs: dict[int, bytes] = {}
        self.numbers = itertools.count()
        self.result = 0

    def nvrtcVersion(self) -> Any:
        return 0, 12, 9

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *rest: Any) -> Any:
        assert rest == (0, [], [])
        assert name == b"kernel.cu"
        program = next(self.numbers)
        self.programs[program] = source
        return 0, program

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> Any:
        assert count == len(options)
        self.programs[program] += b"".join(options)
        return (self.result,)

    def nvrtcGetProgramLogSize(self, program: int) -> Any:
        del program
        return 0, 20

    def nvrtcGetProgramLog(self, program: int, log: bytearray) -> Any:
        del program
        log[:] = b"line 3: no such name\nsecond\n\0"
        return (0,)

    def nvrtcGetCUBINSize(self, program: int) -> Any:
        return 0, len(self.programs[program])

    def nvrtcGetCUBIN(self, program: int, code: bytearray) -> Any:
        code[:] = self.programs[program]
        return (0,)

    def nvrtcGetPTXSize(self, program: int) -> Any:
        return 0, len(self.programs[program]) + 1

    def nvrtcGetPTX(self, program: int, code: bytearray) -> Any:
        code[:] = self.programs[program].upper() + b"\0"
        return (0,)

    def nvrtcDestroyProgram(self, program: int) -> Any:
        del self.programs[program]
        return (0,)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvrtc]:
    module = FakeNvrtc()
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    _forget()
    yield module
    _forget()


def _forget() -> None:
    nvrtc._compile_cached.cache_clear()
    nvrtc._load.cache_clear()
    kept_sources._find_version.cache_clear()


def test_a_source_becomes_machine_code_once(fake: FakeNvrtc) -> None:
    for _ in range(2):
        code = nvrtc.compile_source("9.0", "source", ("--fmad=false",))
        assert code.cubin == b"source--gpu-architecture=sm_90a--fmad=false"
        assert code.ptx == "SOURCE--GPU-ARCHITECTURE=SM_90A--FMAD=FALSE"
    assert fake.programs == {}
    assert nvrtc._compile_cached.cache_info().misses == 1
    assert b"sm_100" in nvrtc.compile_source("10.0", "source", ()).cubin


def test_threads_compile_a_source_once_and_others_beside_it(
    fake: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, compiled = threading.Barrier(2, timeout=60), []

    def compile_beside_another(program: int, count: int, options: list[bytes]) -> Any:
        begun.wait()
        compiled.append(fake.programs[program])
        return FakeNvrtc.nvrtcCompileProgram(fake, program, count, options)

    monkeypatch.setattr(fake, "nvrtcCompileProgram", compile_beside_another)
    sources = ["one", "other"] * 4
    with ThreadPoolExecutor(len(sources)) as threads:
        codes = list(threads.map(lambda each: nvrtc.compile_source("9.0", each, ()), sources))
    assert sorted(compiled) == [b"one", b"other"]
    assert {(each, code.cubin) for each, code in zip(sources, codes, strict=True)} == {
        ("one", b"one--gpu-architecture=sm_90a"),
        ("other", b"other--gpu-architecture=sm_90a"),
    }


def test_a_source_that_is_refused_is_said_with_the_log(fake: FakeNvrtc) -> None:
    fake.result = 6
    with pytest.raises(CudaError) as caught:
        nvrtc.compile_source("9.0", "source", ())
    match(
        caught.value,
        "nvrtcCompileProgram failed: line 3: no such name",
        "a kernel of tracegraph's own, options --gpu-architecture=sm_90a",
        "NVRTC says: line 3: no such name; second",
        "report this text",
    )
    # Nothing is left of it, and the next one works.
    assert fake.programs == {}
    fake.result = 0
    assert nvrtc.compile_source("9.0", "source", ()).cubin.startswith(b"source")


@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_without_nvrtc_that_is_said(missing: str, fake: FakeNvrtc, monkeypatch: Any) -> None:
    def fail() -> Any:
        raise RuntimeError('Failure finding "libnvrtc.so"\nsearched everywhere')

    if missing == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    else:
        monkeypatch.setattr(fake, "nvrtcVersion", fail)
    with pytest.raises(UnsupportedError) as caught:
        nvrtc.compile_source("9.0", "source", ())
    match(
        caught.value,
        "NVRTC is missing",
        "the compilation of a kernel",
        "kernels are compiled for the GPU that is there: ",
        'pip install "jax[cuda13]"',
    )
    assert "\n" not in caught.value.why


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    set_version(monkeypatch, "12.9.86")
    return tmp_path / "kernels"


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    packages = {"nvidia-cuda-nvrtc-cu12": version} if version else {}
    monkeypatch.setattr(kept_sources, "list_packages", lambda: packages)
    monkeypatch.setattr(kept_sources, "find_libraries", lambda names: dict.fromkeys(names, ""))
    _forget()


def compile_in_new_process(source: str = "source", options: tuple[str, ...] = ()) -> CompiledSource:
    _forget()
    return nvrtc.compile_source("9.0", source, options)


def test_another_process_reads_what_was_compiled(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_in_new_process()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    # NVRTC itself is not even loaded.
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    assert compile_in_new_process() == first
    for source, options in (("other", ()), ("source", ("--fmad=false",))):
        with pytest.raises(UnsupportedError):
            compile_in_new_process(source, options)
    set_version(monkeypatch, "12.9.87")
    with pytest.raises(UnsupportedError):
        compile_in_new_process()


def test_with_a_version_that_is_not_known_nothing_is_kept(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_version(monkeypatch, "")
    compile_in_new_process()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "blobs"),
    [({"ptx": "text"}, [b"code"]), ({"key": "", "ptx": 1}, [b"code"]), ({"key": ""}, []), ([], [])],
)
def test_a_file_of_another_kind_is_made_anew(
    content: Any, blobs: list[bytes], folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = compile_in_new_process()
    (file,) = folder.iterdir()
    if isinstance(content, dict) and "key" in content:
        content["key"] = file.stem
    write_file(file, content, blobs)
    assert compile_in_new_process() == first
    assert "it is not what NVRTC made of this source" in caplog.text
    assert read_file(file).content["key"] == file.stem


def test_what_is_refused_is_not_kept(folder: pathlib.Path, fake: FakeNvrtc) -> None:
    fake.result = 6
    with pytest.raises(CudaError):
        compile_in_new_process()
    assert not folder.exists()
