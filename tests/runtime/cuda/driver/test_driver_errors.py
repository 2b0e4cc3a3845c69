"""CudaDriver: what failed calls and missing parts say."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest

from tests.fakes.fake_bindings import FakeBindings
from tests.oracles import error_lines
from tracegraph.runtime.cuda.driver import calls
from tracegraph.runtime.cuda.driver import driver as driver_module
from tracegraph.runtime.cuda.driver.driver import (
    CudaDriver,
    import_bindings,
    load_driver,
    open_driver,
)
from tracegraph.runtime.errors import CudaError, OutOfMemoryError


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        (b"CUDA_ERROR_INVALID_VALUE", CudaError, "internal error in tracegraph"),
        (b"CUDA_ERROR_ILLEGAL_ADDRESS", CudaError, "restart the process"),
        (b"CUDA_ERROR_NO_BINARY_FOR_GPU", CudaError, "capture again on this GPU"),
        (b"CUDA_ERROR_NO_DEVICE", CudaError, "run on a machine with an NVIDIA GPU"),
        (b"CUDA_ERROR_OUT_OF_MEMORY", OutOfMemoryError, "capture fewer or smaller graphs"),
    ],
)
def test_a_failed_call_has_four_lines(
    api: FakeBindings, name: bytes, kind: type[CudaError], fix: str
) -> None:
    api.errors["cuMemcpyAsync"] = 1
    api.results |= {"cuGetErrorName": (0, name), "cuGetErrorString": (0, b"what CUDA says")}
    with pytest.raises(kind) as caught:
        CudaDriver(api).copy_async(0x7000, 0x8000, 3, 0x9000)
    where = "cuMemcpyAsync(0x7000, 0x8000, 3, 0x9000)"
    error_lines.match(
        caught.value, f"{name.decode()} from cuMemcpyAsync", where, "what CUDA says", fix
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_process_that_was_forked_is_told_so(
    api: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(api)
    monkeypatch.setattr(calls, "_groups", weakref.WeakSet([driver]))
    launch = driver.make_launcher(0x7000, 0x8000)
    launch()
    # As in a new process: here `os.fork` would copy the threads of JAX.
    calls.note_fork()
    api.errors["cuCtxSetCurrent"] = 3
    for action, name in ((launch, "cuGraphLaunch"), (lambda: driver.set_current(1), "cuCtx")):
        with pytest.raises(CudaError) as caught:
            action()
        error_lines.match(
            caught.value, "a forked process uses CUDA", name, "CUDA works in the", "start processes"
        )
    # One that starts CUDA after the fork may use it.
    CudaDriver(api).make_launcher(0x7000, 0x8000)()


def test_an_error_without_a_name_has_a_number(api: FakeBindings) -> None:
    api.errors["cuMemFree"] = 4242
    api.results |= {"cuGetErrorName": (1, None), "cuGetErrorString": (1, None)}
    with pytest.raises(CudaError, match="error 4242 from cuMemFree"):
        CudaDriver(api).free_memory(1)


def test_an_image_is_shown_by_its_size(api: FakeBindings) -> None:
    api.errors["cuLibraryLoadData"] = 209
    with pytest.raises(CudaError, match=r"cuLibraryLoadData\(5000 bytes, \[\], \[\], 0"):
        CudaDriver(api).load_library(b"\x7fELF".ljust(5000, b"x"))


def test_an_error_about_ptx_has_what_its_compiler_says(api: FakeBindings) -> None:
    original = api._record

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuLibraryLoadData":
            _, options, (log, size), count, *others = arguments
            assert [int(each) for each in options] == [5, 6]
            assert (len(log), count, others) == (size, 2, [[], [], 0])
            log[:19] = b"ptxas: no such call"
        return original(name, arguments)

    api._record = record
    api.results["cuLibraryLoadData"] = (0x44,)
    assert CudaDriver(api).load_library(b".version 8.0\0") == 0x44
    api.errors["cuLibraryLoadData"] = 218
    api.results |= {"cuGetErrorName": (0, b"CUDA_ERROR_INVALID_PTX")}
    with pytest.raises(CudaError) as caught:
        CudaDriver(api).load_library(b".version 8.0\0")
    assert "13 bytes of PTX; its compiler says: ptxas: no such call" in caught.value.where


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BINDINGS", "cuda.bindings.absent")
    with pytest.raises(CudaError) as caught:
        import_bindings()
    error_lines.match(
        caught.value,
        "cuda-bindings, the CUDA bindings for Python, are not installed",
        "import cuda.bindings.absent: ",
        "graphs on a GPU are built through the CUDA driver",
        'pip install "tracegraph-jax[cuda13]"',
    )
    load_driver.cache_clear()
    with pytest.raises(CudaError, match="are not installed"):
        load_driver()


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_machine_without_a_driver_is_told_so(
    api: FakeBindings, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise kind("libcuda is not here\nat all")

    monkeypatch.setattr(api, "_record", fail)
    with pytest.raises(CudaError) as caught:
        open_driver(api)
    error_lines.match(
        caught.value,
        "this machine has no CUDA driver",
        "cuInit(0): libcuda is not here",
        "libcuda comes with the NVIDIA driver",
        "install an NVIDIA driver of CUDA 12.4 or later",
    )


def test_an_old_driver_is_refused(api: FakeBindings) -> None:
    api.results["cuDriverGetVersion"] = (12_030,)
    with pytest.raises(CudaError) as caught:
        open_driver(api)
    error_lines.match(
        caught.value,
        "the CUDA driver is too old: CUDA 12.3",
        "cuDriverGetVersion()",
        "graphs need CUDA 12.4 or later",
        "install a newer NVIDIA driver",
    )
    api.results["cuDriverGetVersion"] = (12_040,)
    assert open_driver(api).read_version() == 12_040


def test_no_gpu_is_an_error_of_the_first_call(api: FakeBindings) -> None:
    api.errors["cuInit"] = 100
    api.results["cuGetErrorName"] = (0, b"CUDA_ERROR_NO_DEVICE")
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE from cuInit"):
        open_driver(api)
