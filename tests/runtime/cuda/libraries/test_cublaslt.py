"""cublasLt: what is asked of the bindings, in which order, and what is left after a failure."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import sys
import time
from typing import Any

import pytest

from tests.fakes.fake_nvmath import FakeLt, make_nvmath
from tracegraph.lowering.xla.matmul import (
    ALGORITHM_COMPUTE_TYPES,
    COMPUTE_TYPES,
    DTYPES,
    EPILOGUES,
    RESULT_COMPUTE_TYPES,
)
from tracegraph.runtime.cuda.libraries import cublaslt
from tracegraph.runtime.cuda.libraries.cublaslt import CublasLt
from tracegraph.runtime.cuda.libraries.nvidia_bindings import (
    check_one_library,
    find_loaded_libraries,
    load_nvmath,
    read_memory_map,
)
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import CudaError, UnsupportedError

MAP = "7f0000-7f1000 r-xp 00000000 08:01 42        /opt/cu13/libcublasLt.so.13"
SECOND = "7e0000-7e1000 r--p 00000000 08:01 43        /usr/lib/libcublasLt.so.12"
A = MatrixLayout("float32", 4, 3, 4)
B = MatrixLayout("float32", 3, 2, 3, is_row_order=True, transpose="T")
D = MatrixLayout("float32", 4, 2, 6, batch_count=3, batch_stride=24)
MATMUL = Matmul(
    A, B, D, D, 0.1 + 2j, 0.0, "32F_FAST_TF32", "float32", workspace_limit_bytes=1 << 20
)
ROLES = ("a", "b", "d", "workspace")


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def make_node(roles: tuple[str, ...] = ROLES, **changes: Any) -> MatmulNode:
    uses = tuple((role, BufferUse(role, 0, 4096)) for role in roles)
    return MatmulNode("dot.1", dataclasses.replace(MATMUL, **changes), uses)


def find_address(use: BufferUse) -> int:
    return int.from_bytes(use.buffer.encode()[:6], "big") << 8


def make_library(*algorithms: tuple[int, int], maps: str = MAP) -> tuple[CublasLt, FakeLt]:
    nvmath = make_nvmath()
    nvmath.bindings.cublasLt.algorithms = list(algorithms) or [(0, 0)]
    return CublasLt(lambda: nvmath, lambda: maps), nvmath.bindings.cublasLt


def enqueue(node: MatmulNode, *algorithms: tuple[int, int]) -> FakeLt:
    library, lt = make_library(*algorithms)
    library.enqueue(node, find_address, 77)
    return lt


def test_layouts_are_described_as_given():
    lt = enqueue(make_node())
    assert lt.list_calls("matrix_layout_create") == [
        ("CUDA_R_32F", 4, 3, 4),
        ("CUDA_R_32F", 3, 2, 3),
        ("CUDA_R_32F", 4, 2, 6),
        ("CUDA_R_32F", 4, 2, 6),
    ]
    attributes = [x[1:] for x in lt.list_calls("set") if x[0] == "matrix_layout_create"]
    assert attributes == [
        *(("ORDER", 0), ("BATCH_COUNT", 1), ("STRIDED_BATCH_OFFSET", 0)),
        *(("ORDER", 1), ("BATCH_COUNT", 1), ("STRIDED_BATCH_OFFSET", 0)),
        *(("ORDER", 0), ("BATCH_COUNT", 3), ("STRIDED_BATCH_OFFSET", 24)) * 2,
    ]


def test_the_product_is_described_as_given():
    lt = enqueue(make_node((*ROLES, "bias"), epilogue="BIAS", has_fast_accumulation=True))
    assert lt.list_calls("matmul_desc_create") == [("COMPUTE_32F_FAST_TF32", "CUDA_R_32F")]
    attributes = [x[1:] for x in lt.list_calls("set") if x[0] == "matmul_desc_create"]
    assert attributes == [
        ("POINTER_MODE", lt.PointerMode.HOST),
        ("TRANSA", 0),
        ("TRANSB", 1),
        ("EPILOGUE", lt.Epilogue.BIAS),
        ("FAST_ACCUM", 1),
        ("BIAS_POINTER", find_address(BufferUse("bias", 0, 0))),
    ]


def test_the_product_is_enqueued_on_the_stream():
    (call,) = enqueue(make_node()).list_calls("matmul")
    addresses = {role: find_address(BufferUse(role, 0, 0)) for role in "abd"}
    assert {role: call[role] for role in "abd"} == addresses
    assert call["c"] == 0
    assert call["stream"] == 77


def test_c_is_given_where_it_is_added():
    (call,) = enqueue(make_node((*ROLES, "c"), beta=0.5)).list_calls("matmul")
    assert call["c"] == find_address(BufferUse("c", 0, 0))
    assert call["factors"][1] == 0.5


@pytest.mark.parametrize(
    ("scale_type", "compute_type", "alpha"),
    [("float32", "32F", 0.1), ("float64", "64F", 0.1), ("complex64", "32F", 0.1 + 2j)],
)
def test_factors_have_the_scale_type(scale_type: str, compute_type: str, alpha: complex):
    lt = enqueue(make_node(scale_type=scale_type, compute_type=compute_type))
    ((factor, beta),) = (call["factors"] for call in lt.list_calls("matmul"))
    assert factor.dtype == scale_type
    assert factor == factor.dtype.type(alpha)
    assert beta == 0


def test_auxiliary_output_lies_as_the_result():
    lt = enqueue(make_node((*ROLES, "bias", "aux"), epilogue="GELU_AUX_BIAS"))
    values = {name: value for _, name, value in lt.list_calls("set")}
    assert values["EPILOGUE_AUX_POINTER"] == find_address(BufferUse("aux", 0, 0))
    assert values["EPILOGUE_AUX_LD"] == 6
    assert values["EPILOGUE_AUX_BATCH_STRIDE"] == 24


def test_scales_are_set_by_their_role():
    roles = ("a_scale", "b_scale", "c_scale", "d_scale", "d_amax")
    lt = enqueue(make_node((*ROLES, *roles)))
    values = {name: value for _, name, value in lt.list_calls("set")}
    for role in roles:
        assert values[cublaslt.ADDRESS_ATTRIBUTES[role]] == find_address(BufferUse(role, 0, 0))


def test_addresses_are_set_after_the_algorithm_is_chosen():
    lt = enqueue(make_node((*ROLES, "bias", "a_scale"), epilogue="BIAS"))
    names = [x[1] if name == "set" else name for name, x in lt.calls]
    assert names.index("heuristic") < names.index("BIAS_POINTER") < names.index("matmul")
    assert names.index("heuristic") < names.index("A_SCALE_POINTER")


@pytest.mark.parametrize(
    ("index", "length", "chosen"), [(0, 1, 0), (1, 128, 1), (2, 128, 3), (3, 128, 4)]
)
def test_the_algorithm_is_a_place_among_those_that_work(index: int, length: int, chosen: int):
    algorithms = [(0, 0), (64, 0), (0, 7), (0, 0), (128, 0)]
    lt = enqueue(make_node(algorithm_index=index), *algorithms)
    assert lt.list_calls("heuristic") == [(length, 1 << 20)]
    assert lt.list_calls("matmul")[0]["algorithm"] == chosen


def test_a_list_that_is_too_short_is_an_error():
    library, lt = make_library((0, 0), (0, 3))
    with pytest.raises(CudaError) as raised:
        library.enqueue(make_node(algorithm_index=1), find_address, 0)
    assert raised.value.what == "cublasLt has no algorithm 1 for the matmul `dot.1`"
    assert "1048576 bytes" in raised.value.where
    assert list(lt.alive.values()) == ["create"]


def test_workspace_is_given_where_the_algorithm_needs_it():
    workspace = find_address(BufferUse("workspace", 0, 0))
    assert enqueue(make_node(), (0, 0)).list_calls("matmul")[0]["workspace"] == (0, 0)
    (call,) = enqueue(make_node(), (4096, 0)).list_calls("matmul")
    assert call["workspace"] == (workspace, 4096)
    (call,) = enqueue(make_node(("a", "b", "d")), (0, 0)).list_calls("matmul")
    assert call["workspace"] == (0, 0)


def test_permitted_workspace_keeps_the_algorithm_that_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1:2")
    lt = enqueue(make_node(algorithm_index=1), (4096, 0), (2048, 0))
    assert lt.list_calls("heuristic") == [(128, 1 << 20)]
    (call,) = lt.list_calls("matmul")
    assert call["algorithm"] == 1
    assert call["workspace"][1] == 2048


def test_permitted_workspace_replaces_an_algorithm_that_needs_more(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1:1:1:1")
    lt = enqueue(make_node(algorithm_index=1), (0, 0), (4096, 0), (2048, 0))
    assert lt.list_calls("heuristic") == [(128, 1 << 20), (1, 2048)]
    (call,) = lt.list_calls("matmul")
    assert (call["algorithm"], call["workspace"]) == (0, (0, 0))


def test_no_workspace_permitted_and_none_possible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(CudaError, match="CUBLAS_WORKSPACE_CONFIG"):
        enqueue(make_node(), (4096, 0))


def test_algorithms_are_chosen_once():
    library, lt = make_library((0, 0), (0, 0))
    node = make_node(algorithm_index=1)
    for _ in range(3):
        library.enqueue(node, find_address, 5)
    library.enqueue(make_node(algorithm_index=0), find_address, 5)
    assert len(lt.list_calls("matmul")) == 4
    assert len(lt.list_calls("heuristic")) == 2
    assert len(lt.list_calls("create")) == 1


def test_prepare_chooses_and_enqueues_nothing():
    library, lt = make_library()
    library.prepare(make_node())
    assert (len(lt.list_calls("heuristic")), len(lt.list_calls("matmul"))) == (1, 0)
    library.enqueue(make_node(), find_address, 5)
    assert (len(lt.list_calls("heuristic")), len(lt.list_calls("matmul"))) == (1, 1)
    assert list(lt.alive.values()) == ["create"]


def test_close_destroys_the_handle_once():
    library, lt = make_library()
    library.close()
    assert lt.calls == []
    library.prepare(make_node())
    library.close()
    library.close()
    assert lt.alive == {}
    library.enqueue(make_node(), find_address, 5)
    assert len(lt.list_calls("create")) == 2


def count_calls() -> int:
    node = make_node((*ROLES, "bias"), epilogue="BIAS")
    return len([name for name, _ in enqueue(node).calls if name != "destroy"])


@pytest.mark.parametrize("number", range(1, count_calls() + 1))
def test_a_failure_leaves_nothing_behind(number: int):
    library, lt = make_library()
    node = make_node((*ROLES, "bias"), epilogue="BIAS")
    lt.fail_at = number
    with pytest.raises(CudaError) as raised:
        library.enqueue(node, find_address, 77)
    assert "CUBLAS_STATUS_INVALID_VALUE" in raised.value.what
    assert raised.value.what.startswith("cublasLt")
    assert "arguments (" in raised.value.where
    assert set(lt.alive.values()) <= {"create"}
    lt.fail_at = 0
    library.enqueue(node, find_address, 77)
    assert lt.list_calls("matmul")[-1]["stream"] == 77
    assert list(lt.alive.values()) == ["create"]


def test_threads_share_one_handle_and_take_turns():
    library, lt = make_library((0, 0), (0, 0))
    active = []

    def multiply(*arguments: int) -> None:
        active.append(1)
        time.sleep(0.001)
        assert len(active) == 1
        active.pop()
        lt.record("multiplied")

    lt.matmul = multiply  # pyright: ignore[reportAttributeAccessIssue]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(library.enqueue, make_node(), find_address, i) for i in range(32)]
        for future in futures:
            future.result()
    assert len(lt.list_calls("multiplied")) == 32
    assert len(lt.list_calls("create")) == 1
    assert list(lt.alive.values()) == ["create"]


@pytest.mark.parametrize(("maps", "count"), [("", 0), (f"{MAP}\n{SECOND}", 2)])
def test_another_library_is_refused(maps: str, count: int):
    library, lt = make_library(maps=maps)
    with pytest.raises(CudaError) as raised:
        library.prepare(make_node())
    assert raised.value.what == f"{count} copies of libcublasLt are loaded, not one"
    assert lt.alive == {}
    assert count == 0 or "/usr/lib/libcublasLt.so.12" in raised.value.where


def test_one_file_at_several_places_is_one_library():
    text = f"{MAP}\n{MAP.replace('7f0000', '7f2000')}\n7f3000-7f4000 rw-p 0 00:00 0\n"
    text += "7f5000-7f6000 r-xp 0 08:01 9  /opt/cu13/libcublas.so.13"
    assert find_loaded_libraries("libcublasLt", text) == ["/opt/cu13/libcublasLt.so.13"]
    check_one_library("libcublasLt", text)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/maps")
def test_the_memory_map_of_this_process_is_read():
    assert find_loaded_libraries("libc", read_memory_map()) != []


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with pytest.raises(UnsupportedError) as raised:
        CublasLt(read_maps=lambda: MAP).prepare(make_node())
    assert raised.value.what == "the package `nvmath` is missing"
    assert raised.value.fix == "pip install nvmath-python"


def test_every_name_is_one_of_the_bindings():
    pytest.importorskip("nvmath")
    nvmath = load_nvmath()
    lt, cublas = nvmath.bindings.cublasLt, nvmath.bindings.cublas
    assert {cublaslt.DATA_TYPES[dtype] for dtype in DTYPES.values()} <= set(
        nvmath.CudaDataType.__members__
    )
    compute_types = {*COMPUTE_TYPES.values(), *RESULT_COMPUTE_TYPES.values()}
    compute_types |= set(ALGORITHM_COMPUTE_TYPES.values())
    assert {f"COMPUTE_{name}" for name in compute_types} <= set(cublas.ComputeType.__members__)
    assert set(EPILOGUES.values()) <= set(lt.Epilogue.__members__)
    fake = make_nvmath().bindings.cublasLt
    for name, find_dtype in (
        ("MatmulDescAttribute", lt.get_matmul_desc_attribute_dtype),
        ("MatrixLayoutAttribute", lt.get_matrix_layout_attribute_dtype),
        ("MatmulPreferenceAttribute", lt.get_matmul_preference_attribute_dtype),
    ):
        for attribute in getattr(fake, name):
            dtype = find_dtype(getattr(lt, name)[attribute.name])
            fake_dtype = getattr(fake, find_dtype.__name__)(attribute)
            assert dtype().itemsize == fake_dtype().itemsize, attribute.name
    assert lt.matmul_heuristic_result_dtype.itemsize == fake.matmul_heuristic_result_dtype.itemsize
    assert issubclass(lt.cuBLASLtError, Exception)


def test_missing_bindings_are_not_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    library = CublasLt(lambda: imported.append("nvmath"))
    library.preload()
    assert not imported
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    library.preload()
    assert imported == ["nvmath"]
