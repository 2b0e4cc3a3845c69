"""Triangular solves: the arguments of cuBLAS's trsm, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.xla_programs import make_program, name_thunk
from tests.lowering.xla.test_fft import shape
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla import triangular_solve
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.runtime.definition.library_calls import TriangularSolve
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError

A, B = BufferUse("#3", 0, 16), BufferUse("#3", 256, 32)


def make_solve(
    options: str = "left_side: true lower: true transpose_a: NO_TRANSPOSE",
    a: str = shape("F32", "2 2", "0 1"),
    b: str = shape("F32", "2 4", "0 1"),
    sizes: tuple[int, int] = (16, 32),
    b_offset: int = 256,
) -> str:
    return (
        f"{name_thunk('solve.1')} triangular_solve_thunk {{ options {{ {options} }}"
        f" a_buffer {{ slice {{ buffer_allocation_index: 3 size: {sizes[0]} }} shape {{ {a} }} }}"
        f" b_buffer {{ slice {{ buffer_allocation_index: 3 offset: {b_offset} size: {sizes[1]} }}"
        f" shape {{ {b} }} }}"
        " temp_buffer { slice { buffer_allocation_index: 3 } } }"
    )


def decode(thunk: str, workspace: int = 0) -> list[Any]:
    program = decode_executable(make_program(thunk), name="step", plan_call=lambda _: workspace)
    return list(list_device_steps(program.steps))


def test_a_solve_is_one_call_in_place_of_b() -> None:
    (step,) = decode(make_solve())
    call = TriangularSolve("float32", True, True, False, "N", 2, 4)
    assert step.node == LibraryCallNode("solve.1", call, (("a", A), ("b", B)))
    assert (step.reads, step.writes) == ((A, B), (B,))
    assert call.order == 2


def test_the_workspace_is_written() -> None:
    (step,) = decode(make_solve(), 512)
    work = BufferUse("#added.0", 0, 512)
    assert step.writes == (B, work)
    assert step.node.results == ("#3", "#added.0")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("transpose_a: TRANSPOSE unit_diagonal: true", (False, False, True, "T")),
        ("lower: true transpose_a: ADJOINT", (False, True, False, "C")),
        ("transpose_a: NO_TRANSPOSE", (False, False, False, "N")),
    ],
)
def test_options(options: str, expected: Any) -> None:
    thunk = make_solve(options, a=shape("C64", "2 2"), b=shape("C64", "1 2"), sizes=(32, 16))
    (step,) = decode(thunk)
    call = step.node.call
    assert (call.is_left, call.is_lower, call.is_unit, call.transpose) == expected
    assert (call.dtype, call.rows, call.columns, call.order) == ("complex64", 1, 2, 2)


def test_a_batch() -> None:
    a, b = shape("F32", "1 2 2 2", "3 2 1 0"), shape("F32", "1 2 2 4", "2 3 1 0")
    (step,) = decode(make_solve(a=a, b=b, sizes=(32, 64)))
    assert step.node.call.batch_count == 2


def test_an_empty_right_side_is_nothing() -> None:
    assert decode(make_solve(b=shape("F32", "2 0", "0 1"), sizes=(16, 0))) == []


FAULTS: dict[str, tuple[str, str]] = {
    "transpose": (make_solve("left_side: true"), "transpose_a to TRANSPOSE_INVALID"),
    "types": (make_solve(a=shape("F64", "2 2")), "solves a matrix of F64 for one of F32"),
    "halves": (
        make_solve(a=shape("F16", "2 2"), b=shape("F16", "2 4", "0 1")),
        "solves a matrix of F16",
    ),
    "not square": (make_solve(a=shape("F32", "2 4", "0 1")), "systems of the shapes (2, 4)"),
    "other side": (make_solve("transpose_a: NO_TRANSPOSE"), "systems of the shapes (2, 2)"),
    "batches": (make_solve(a=shape("F32", "3 2 2")), "systems of the shapes (3, 2, 2)"),
    "vector": (make_solve(b=shape("F32", "2")), "systems of the shapes (2, 2) and (2,)"),
    "rows": (make_solve(b=shape("F32", "2 4")), "has B of 2 axes in the order [1, 0]"),
    "order of a batch": (
        make_solve(
            a=shape("F32", "2 2 2 2", "2 3 0 1"),
            b=shape("F32", "2 2 2 4", "2 3 1 0"),
            sizes=(64, 128),
        ),
        "has A of 4 axes in the order [2, 3, 0, 1]",
    ),
    "batch inside": (
        make_solve(a=shape("F32", "2 2 2"), b=shape("F32", "2 2 4", "0 1 2"), sizes=(32, 64)),
        "has B of 3 axes in the order [0, 1, 2]",
    ),
    "bytes of A": (make_solve(sizes=(32, 32)), "has A of 16 bytes in 32"),
    "bytes of B": (make_solve(sizes=(16, 16)), "has B of 32 bytes in 16"),
    "in place": (make_solve(b_offset=8), "solves in place of its own matrix"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str) -> None:
    thunk, reason = FAULTS[name]
    with pytest.raises(UnsupportedError) as caught:
        decode(thunk)
    assert reason in caught.value.why


def test_more_than_cublas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular_solve, "MAX_COUNT", 3)
    with pytest.raises(UnsupportedError, match="solves systems of the shapes"):
        decode(make_solve())
