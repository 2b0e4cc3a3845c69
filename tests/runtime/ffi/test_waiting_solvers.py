"""Waiting solvers: which calls of cuSOLVER are known to wait for the GPU."""

from __future__ import annotations

import pytest

from tracegraph.runtime.ffi.c_api import DataType
from tracegraph.runtime.ffi.call import (
    ArrayType,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)
from tracegraph.runtime.ffi.waiting_solvers import find_wait


def make_call(solver: str, dims: tuple[int, ...], algorithm: int | None = None) -> FfiCall:
    items = () if algorithm is None else (("algorithm", ScalarAttribute(DataType.U8, algorithm)),)
    matrix = ArrayType(DataType.F32, dims)
    return FfiCall(f"cusolver_{solver}_ffi", (matrix,), (matrix,), DictionaryAttribute(items))


@pytest.mark.parametrize(
    ("solver", "dims", "algorithm"),
    [
        ("syevd", (4, 4), 0),
        ("syevd", (32, 32), None),
        ("syevd", (1, 4, 4), 0),
        ("syevd", (48, 48), 2),
        ("syevd", (3, 48, 48), 2),
        ("gesvdj", (4, 4), None),
        ("gesvdj", (3, 33, 4), None),
        ("gesvd", (3, 4, 4), None),
        ("gesvdp", (48, 48), None),
    ],
)
def test_it_waits(solver: str, dims: tuple[int, ...], algorithm: int | None) -> None:
    why = find_wait(make_call(solver, dims, algorithm))
    assert "waits for the GPU" in why
    assert ("EighImplementation.QR" if solver == "syevd" else "#singular-values") in why


@pytest.mark.parametrize(
    ("solver", "dims", "algorithm"),
    [
        ("syevd", (48, 48), 0),
        ("syevd", (4, 4), 1),
        ("syevd", (3, 4, 4), 0),
        ("syevd", (3, 32, 32), 2),
        ("gesvdj", (2, 32, 8), None),
        ("potrf", (4, 4), None),
    ],
)
def test_it_is_tried(solver: str, dims: tuple[int, ...], algorithm: int | None) -> None:
    assert find_wait(make_call(solver, dims, algorithm)) == ""
