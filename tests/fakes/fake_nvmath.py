"""A stand-in for nvmath: records calls, reads what pointers point at, fails at the n-th."""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

RESULT = np.dtype(
    [("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8"), ("state", "<i4")]
    + [("waves_count", "<f4"), ("reserved", "<i4", (4,))]
)
POINTERS = ("BIAS_POINTER", "EPILOGUE_AUX_POINTER", "A_SCALE_POINTER", "B_SCALE_POINTER")
POINTERS += ("C_SCALE_POINTER", "D_SCALE_POINTER", "AMAX_D_POINTER")
INT64 = ("EPILOGUE_AUX_LD", "EPILOGUE_AUX_BATCH_STRIDE", *POINTERS)


class CublasLtFailure(Exception):
    """What the bindings raise when a call fails."""


def name_attributes(*names: str) -> Any:
    return enum.IntEnum("Attributes", [(name, i) for i, name in enumerate(names, start=1)])


def find_dtype(attribute: enum.IntEnum) -> Any:
    if attribute.name in (*INT64, "STRIDED_BATCH_OFFSET", "MAX_WORKSPACE_BYTES"):
        return np.int64
    return np.int8 if attribute.name == "FAST_ACCUM" else np.int32


def read_memory(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


class FakeLt:
    """The module ``cublasLt``.

    Attributes:
        calls: name of each call, and the arguments that matter.
        alive: handles that are not destroyed yet.
        fail_at: number of the call that fails, from 1; destructions do not count.
        algorithms: workspace and status of each entry of the list.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.alive: dict[int, str] = {}
        self.fail_at = 0
        self.algorithms: list[tuple[int, int]] = [(0, 0)]
        self.cuBLASLtError = CublasLtFailure
        self.matmul_heuristic_result_dtype = RESULT
        self.PointerMode = name_attributes("HOST", "DEVICE")
        self.Order = enum.IntEnum("Order", [("COL", 0), ("ROW", 1)])
        self.Epilogue = name_attributes("DEFAULT", "BIAS", "GELU_AUX_BIAS")
        self.MatmulDescAttribute = name_attributes(
            "POINTER_MODE", "TRANSA", "TRANSB", "EPILOGUE", "FAST_ACCUM", *INT64
        )
        self.MatrixLayoutAttribute = name_attributes("ORDER", "BATCH_COUNT", "STRIDED_BATCH_OFFSET")
        self.MatmulPreferenceAttribute = name_attributes("MAX_WORKSPACE_BYTES")
        self.get_matmul_desc_attribute_dtype = find_dtype
        self.get_matrix_layout_attribute_dtype = find_dtype
        self.get_matmul_preference_attribute_dtype = find_dtype

    def record(self, name: str, arguments: Any = ()) -> None:
        self.calls.append((name, arguments))
        if sum(call != "destroy" for call, _ in self.calls) == self.fail_at:
            raise CublasLtFailure("CUBLAS_STATUS_INVALID_VALUE")

    def list_calls(self, name: str) -> list[Any]:
        return [arguments for call, arguments in self.calls if call == name]

    def make(self, name: str, arguments: Any = ()) -> int:
        self.record(name, arguments)
        handle = 1000 + len(self.calls)
        self.alive[handle] = name
        return handle

    def create(self) -> int:
        return self.make("create")

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        return self.make("matmul_desc_create", (compute_type.name, scale_type.name))  # pyright: ignore[reportAttributeAccessIssue]

    def matrix_layout_create(self, kind: int, rows: int, columns: int, leading: int) -> int:
        return self.make("matrix_layout_create", (kind.name, rows, columns, leading))  # pyright: ignore[reportAttributeAccessIssue]

    def matmul_preference_create(self) -> int:
        return self.make("matmul_preference_create")

    def set_attribute(self, handle: int, attribute: Any, address: int, size: int) -> None:
        assert handle in self.alive
        dtype = np.dtype(find_dtype(attribute))
        assert size == dtype.itemsize
        value = np.frombuffer(read_memory(address, size), dtype)[0]
        self.record("set", (self.alive[handle], attribute.name, int(value)))

    matmul_desc_set_attribute = set_attribute
    matrix_layout_set_attribute = set_attribute
    matmul_preference_set_attribute = set_attribute

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        *handles, length, results, found = arguments
        assert [self.alive[handle] for handle in handles] == [
            "create",
            "matmul_desc_create",
            *["matrix_layout_create"] * 4,
            "matmul_preference_create",
        ]
        limit = self.list_calls("set")[-1][2]
        self.record("heuristic", (length, limit))
        made = np.zeros(length, RESULT)
        entries = [(i, *entry) for i, entry in enumerate(self.algorithms) if entry[0] <= limit]
        entries = entries[:length]
        for place, (number, workspace_bytes, state) in enumerate(entries):
            made["algo"]["data_"][place, :] = number
            made["workspace_size"][place] = workspace_bytes
            made["state"][place] = state
        ctypes.memmove(results, made.ctypes.data, made.nbytes)
        ctypes.memmove(found, np.array([len(entries)], np.int32).ctypes.data, 4)

    def matmul(self, *arguments: int) -> None:
        handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout = (
            arguments[:12]
        )
        algorithm, workspace, workspace_bytes, stream = arguments[12:]
        assert {handle, product, a_layout, b_layout, c_layout, d_layout} <= set(self.alive)
        scale = np.dtype(SCALES[self.list_calls("matmul_desc_create")[-1][1]])
        factors = [np.frombuffer(read_memory(x, scale.itemsize), scale)[0] for x in (alpha, beta)]
        number = np.frombuffer(read_memory(algorithm, 64), np.uint64)
        assert len(set(number)) == 1
        self.record(
            "matmul",
            {"factors": factors, "a": a, "b": b, "c": c, "d": d, "algorithm": int(number[0])}
            | {"workspace": (workspace, workspace_bytes), "stream": stream},
        )

    def destroy(self, handle: int) -> None:
        self.calls.append(("destroy", self.alive.pop(handle)))

    matmul_desc_destroy = destroy
    matrix_layout_destroy = destroy
    matmul_preference_destroy = destroy


SCALES = {"CUDA_R_32F": np.float32, "CUDA_R_64F": np.float64, "CUDA_C_32F": np.complex64}


def make_nvmath() -> Any:
    """Returns a module with a fresh `FakeLt`."""
    cublas = SimpleNamespace(
        ComputeType=name_attributes("COMPUTE_32F", "COMPUTE_64F", "COMPUTE_32F_FAST_TF32"),
        Operation=enum.IntEnum("Operation", [("N", 0), ("T", 1), ("C", 2)]),
    )
    return SimpleNamespace(
        bindings=SimpleNamespace(cublasLt=FakeLt(), cublas=cublas),
        CudaDataType=name_attributes(*SCALES, "CUDA_R_16BF", "CUDA_R_8F_E4M3"),
    )
