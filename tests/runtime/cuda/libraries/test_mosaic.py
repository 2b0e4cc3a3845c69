"""Kernels of Mosaic GPU: which are launched, how often they are compiled, and with what."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tracegraph.runtime.cuda.libraries import mosaic
from tracegraph.runtime.cuda.libraries.mosaic import TARGET, MosaicHandler, find_mosaic
from tracegraph.runtime.ffi.c_api import DataType, ExecutionStage
from tracegraph.runtime.ffi.call import (
    ArrayType,
    CallAttribute,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)
from tracegraph.runtime.ffi.context import CallContext, InterfaceError
from tracegraph.runtime.ffi.frames import Frame
from tracegraph.runtime.ffi.states import States

FLOATS = ArrayType(DataType.F32, (4,))
NO = ScalarAttribute(DataType.PRED, False)
YES = ScalarAttribute(DataType.PRED, True)
PLAIN: dict[str, CallAttribute] = {
    "kernel_hash": b"k",
    "module": b"one",
    "use_custom_barrier": NO,
    "uses_xla_collective_metadata": NO,
}
HANDLER = MosaicHandler(0xC0, "plugin.so")


def make_call(**attributes: Any) -> FfiCall:
    items = tuple(sorted((PLAIN | attributes).items()))
    return FfiCall(TARGET, (FLOATS, FLOATS), (FLOATS,), DictionaryAttribute(items))


@dataclasses.dataclass
class FakePlugin:
    """Compiles modules, unless they are bad; its launches are noted."""

    compiled: list[bytes]
    launches: list[tuple[int, int, list[int]]]

    def compile(self, module: bytes, nbytes: int) -> Any:
        assert len(module) == nbytes
        self.compiled.append(module)
        launcher = ctypes.cast(self.launcher, ctypes.c_void_p).value
        return None if module == b"bad" else [0xF0 + len(self.compiled), launcher]

    def __post_init__(self) -> None:
        def launch(function: int, stream: int, buffers: Any) -> None:
            self.launches.append((function, stream, buffers[:3]))

        self.launcher = mosaic._LAUNCH(launch)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlugin]:
    fake = FakePlugin([], [])
    monkeypatch.setattr(mosaic, "_load_compiler", lambda _: fake.compile)
    mosaic._compile.cache_clear()
    yield fake
    mosaic._compile.cache_clear()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", mosaic.VERSIONS[-1])
    monkeypatch.setattr(mosaic, "find_library", lambda: "plugin.so")


def run(stage: ExecutionStage, addresses: list[int], stream: int = 7, **attributes: Any) -> None:
    frame = Frame(make_call(**attributes), addresses[:2], addresses[2:])
    HANDLER.run(stage, frame, CallContext(States(), stream))


@pytest.mark.usefixtures("known")
def test_a_kernel_of_one_gpu_is_launched() -> None:
    assert find_mosaic(make_call(), 0xC0) == HANDLER
    assert find_mosaic(make_call(skip_device_barrier=NO), 0xC0) == HANDLER


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"use_custom_barrier": YES}, "use_custom_barrier"),
        ({"uses_xla_collective_metadata": YES}, "uses_xla_collective_metadata"),
        ({"xla_replica_ids": b"0,1"}, "xla_replica_ids"),
    ],
)
def test_a_kernel_of_several_gpus_is_refused(attributes: Any, named: str) -> None:
    found = find_mosaic(make_call(**attributes), 0xC0)
    assert isinstance(found, str)
    assert found.startswith("whose kernel is for several GPUs: ")
    assert found.endswith(named)


@pytest.mark.usefixtures("known")
def test_a_call_without_a_module_is_refused() -> None:
    assert find_mosaic(make_call(module=NO), 0xC0) == "which has no module"


@pytest.mark.usefixtures("known")
def test_another_jax_is_refused_and_a_plugin_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mosaic, "find_library", lambda: None)
    assert "does not export the compiler" in str(find_mosaic(make_call(), 0xC0))
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    assert "with JAX 0.11.2 only" in str(find_mosaic(make_call(), 0xC0))


def test_it_is_compiled_once_and_launched_with_all_addresses(plugin: FakePlugin) -> None:
    assert [stage for stage in ExecutionStage if HANDLER.has(stage)] == [
        ExecutionStage.INSTANTIATE,
        ExecutionStage.EXECUTE,
    ]
    for stage in ExecutionStage:
        run(stage, [1, 2, 3])
    run(ExecutionStage.EXECUTE, [4, 5, 6], stream=8)
    run(ExecutionStage.EXECUTE, [7, 8, 9], module=b"other")
    assert plugin.compiled == [b"one", b"other"]
    assert plugin.launches == [
        (0xF1, 7, [1, 2, 3]),
        (0xF1, 8, [4, 5, 6]),
        (0xF2, 7, [7, 8, 9]),
    ]


def test_what_cannot_be_compiled_is_said_and_tried_again(plugin: FakePlugin) -> None:
    for _ in range(2):
        with pytest.raises(InterfaceError, match="cannot be compiled"):
            run(ExecutionStage.INSTANTIATE, [1, 2, 3], module=b"bad")
    assert plugin.compiled == [b"bad"] * 2


def test_the_plugin_is_found_where_it_exports_the_compiler() -> None:
    mosaic.find_library.cache_clear()
    found = mosaic.find_library()
    is_installed = importlib.util.find_spec("jax_plugins") is not None
    assert (found is not None) == is_installed
    assert found is None or found.endswith("xla_cuda_plugin.so")
