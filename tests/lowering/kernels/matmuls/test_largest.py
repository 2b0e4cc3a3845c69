"""The largest element of each row, chosen by a matmul's kernel and the one behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, run_kernel_on_host
from tests.lowering.kernels.matmuls.test_few_rows import DTYPES, PLAIN, SUM, make_operands, plain
from tracegraph.lowering.kernels.matmuls import few_rows, few_rows_ends, largest
from tracegraph.lowering.kernels.matmuls.few_rows import count_candidates, write_few_rows
from tracegraph.lowering.kernels.matmuls.few_rows_problem import (
    FewRows,
    MatrixSegment,
    Tiling,
    choose_tiling,
    count_shared_bytes,
    find_problem,
)
from tracegraph.lowering.kernels.matmuls.largest import write_largest
from tracegraph.lowering.kernels.row_functions import Form, RowFunction, RowOp

NOTHING = np.int32(-7)


def choosing(problem: FewRows, chosen: str = "", *, stores: bool = False) -> FewRows:
    """Returns a problem whose first segment chooses the largest of each row."""
    first, *rest = problem.segments
    finish = RowFunction((), (), (0, 0) if stores else (0,), sums=1)
    kinds = first.kinds if stores else ()
    segment = MatrixSegment(
        first.columns, first.matrices, finish, kinds, (chosen or first.kinds[0],)
    )
    segments = (segment, *rest)
    return FewRows(
        problem.rows,
        problem.depth,
        problem.kinds,
        PLAIN,
        problem.row_kind,
        segments,
        is_transposed=problem.is_transposed,
    )


def run(problem: FewRows, operands: Any, processors: int) -> tuple[list[Any], Any, Any]:
    """Returns what is stored, and the column and the value of the largest of each row."""
    segment = problem.segments[0]
    count = count_candidates(problem, segment, processors)
    stored = [
        align_array(np.full((problem.rows, each.columns), np.nan, DTYPES[kind]))
        for each in problem.segments
        for kind in each.kinds
    ]
    values = align_array(np.full((problem.rows, count), np.nan, np.float32))
    columns = align_array(np.full((problem.rows, count), NOTHING))
    kernel = write_few_rows(problem, processors)
    split = choose_tiling(problem, processors).split
    run_kernel_on_host(kernel, [*operands, *stored, values, columns], cluster=split)
    return stored, *choose(values, columns, segment.chosen[0])


def choose(values: Any, columns: Any, kind: str) -> tuple[Any, Any]:
    rows, count = values.shape
    column = align_array(np.full(rows, NOTHING))
    value = align_array(np.full(rows, np.nan, DTYPES[kind]))
    run_kernel_on_host(write_largest(rows, count, kind), [values, columns, column, value])
    return column, value


def round_to(array: Any, kind: str) -> Any:
    return array.astype(np.float32).astype(DTYPES[kind]).astype(np.float64)


@pytest.mark.parametrize(
    ("problem", "processors", "stores"),
    [
        (plain(1, 96, [64]), 1, True),
        (plain(1, 640, [1032]), 8, False),
        (plain(1, 512, [64]), 8, True),
        (plain(3, 200, [264], "F32"), 4, False),
        (plain(5, 128, [72, 24]), 2, True),
        (plain(16, 64, [520]), 1, False),
        (plain(2, 264, [80], is_transposed=True), 1, True),
        (plain(1, 1040, [130], is_transposed=True), 8, False),
        (plain(3, 136, [65], "F32", is_transposed=True), 2, True),
        (plain(1, 264, [128], "S8"), 4, False),
    ],
)
def test_the_largest_is_that_of_numpy(problem: FewRows, processors: int, *, stores: bool) -> None:
    problem = choosing(problem, "F32", stores=stores)
    operands = make_operands(problem)
    stored, column, value = run(problem, operands, processors)
    wide = operands[1].astype(np.float64)
    wanted = operands[0].astype(np.float64) @ (wide.T if problem.is_transposed else wide)
    np.testing.assert_array_equal(column, wanted.argmax(-1))
    np.testing.assert_allclose(value, wanted.max(-1), rtol=1e-5)
    assert len(stored) == len(problem.segments) - 1 + stores
    if stores:
        bound = 0.01 * np.abs(wanted).max()
        assert np.abs(stored[0].astype(np.float64) - wanted).max() <= bound


def run_given(row: Any, kind: str, processors: int = 2) -> tuple[int, float]:
    """Returns the choice of a row of the given elements, compared in a type."""
    problem = choosing(plain(1, 8, [len(row)], "F32"), kind)
    x, matrix = (np.zeros(shape, np.float32) for shape in ((1, 8), (8, len(row))))
    x[0, 0], matrix[0] = 1, row
    _, column, value = run(problem, [align_array(x), align_array(matrix)], processors)
    return int(column[0]), float(value[0])


def place(*pairs: tuple[int, float], rest: float = 0.0) -> Any:
    row = np.full(512, rest, np.float32)
    for column, value in pairs:
        row[column] = value
    return row


@pytest.mark.parametrize(
    ("row", "kind", "wanted"),
    [
        # The first of equal ones: of a thread's neighbours, of other warps, of other blocks.
        (place((9, 3), (10, 3), (300, 3)), "F32", (9, 3.0)),
        (place((70, 3), (40, 3), (511, 3)), "F32", (40, 3.0)),
        # Equal behind the last place of their type.
        (place((33, 1.0), (90, 1.001)), "BF16", (33, 1.0)),
        (place((33, 1.0), (90, 1.001)), "F32", (90, np.float32(1.001))),
        (place((511, -0.5), rest=-1.0), "F16", (511, -0.5)),
        (place(rest=-1.0), "F32", (0, -1.0)),
        (place((400, np.inf), (500, np.inf)), "BF16", (400, np.inf)),
    ],
)
def test_equal_elements(row: Any, kind: str, wanted: tuple[int, float]) -> None:
    assert run_given(row, kind) == wanted


def test_nan_is_larger_than_all_others() -> None:
    # A matmul would spread it over its row.
    values = align_array(np.array([[3, np.nan, np.inf, np.nan], [1, 2, 4, 4]], np.float32))
    columns = align_array(np.array([[5, 17, 2, 9], [3, 1, 8, 6]], np.int32))
    column, value = choose(values, columns, "F32")
    np.testing.assert_array_equal(column, [9, 6])
    np.testing.assert_array_equal(value, [np.nan, 4])


def test_rows_of_infinities() -> None:
    values = align_array(np.full((1, 600), -np.inf, np.float32))
    columns = align_array(np.arange(600, dtype=np.int32)[None] * 3)
    column, value = choose(values, columns, "BF16")
    assert (column[0], float(value[0])) == (0, -np.inf)
    whole = align_array(np.full((2, 8), -np.inf, np.float32))
    assert choose(whole, align_array(np.full((2, 8), 4, np.int32)), "F32")[0].tolist() == [4, 4]


def test_each_segment_has_its_own_choice() -> None:
    double = RowFunction((), (RowOp("add", Form.FULL, (0, 0)),), (1, 0), sums=1)
    segments = (
        MatrixSegment(64, (1,), SUM, ("F32",)),
        MatrixSegment(136, (2,), double, (), ("F32", "BF16")),
    )
    problem = FewRows(2, 96, ("F32",) * 3, PLAIN, "F32", segments)
    operands = make_operands(problem)
    count = count_candidates(problem, segments[1], 4)
    stored = align_array(np.full((2, 64), np.nan, np.float32))
    pairs = [
        (
            align_array(np.full((2, count), np.nan, np.float32)),
            align_array(np.full((2, count), NOTHING)),
        )
        for _ in range(2)
    ]
    kernel = write_few_rows(problem, 4)
    split = choose_tiling(problem, 4).split
    candidates = [array for pair in pairs for array in pair]
    run_kernel_on_host(kernel, [*operands, stored, *candidates], cluster=split)
    x, one, other = (each.astype(np.float64) for each in operands)
    np.testing.assert_allclose(stored, x @ one, rtol=1e-4, atol=1e-4)
    (column, value), (rounded_column, rounded) = (
        choose(*pair, kind) for pair, kind in zip(pairs, ("F32", "BF16"), strict=True)
    )
    np.testing.assert_array_equal(column, (x @ other).argmax(-1))
    np.testing.assert_allclose(value, 2 * (x @ other).max(-1), rtol=1e-5)
    wanted = round_to(x @ other, "BF16")
    np.testing.assert_array_equal(rounded_column, wanted.argmax(-1))
    np.testing.assert_array_equal(rounded.astype(np.float64), wanted.max(-1))
    assert rounded.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("module", "name", "right", "wrong"),
    [
        # Only some columns of a block, or of one lane, or of one block, or the last of equal ones.
        (few_rows_ends, "write_candidates", "place += 32", "place += 64"),
        (few_rows_ends, "write_candidates", "first / WIDTH * SPLIT + rank", "0"),
        (few_rows_ends, "write_candidates", "choose_of_lanes(best)", "best"),
        (few_rows, "BEST", "a.column < b.column", "a.column > b.column"),
        # Behind the last column, as if there were more.
        (few_rows_ends, "write_candidates", "column < columns", "true"),
    ],
)
def test_a_fault_is_seen(
    module: Any, name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = getattr(module, name)
    if isinstance(given, str):
        assert right in given
        monkeypatch.setattr(module, name, given.replace(right, wrong))
    else:
        text = given(choosing(plain(1, 8, [512], "F32")), choose_tiling(plain(1, 8, [512]), 2))
        assert right in text
        monkeypatch.setattr(module, name, lambda *args: given(*args).replace(right, wrong))
    rows = [
        (place((9, 3), (10, 3)), (9, 3.0)),
        (place((70, 3), (40, 3), (511, 3)), (40, 3.0)),
        (np.full(264, -1, np.float32), (0, -1.0)),
        (place((300, 2)), (300, 2.0)),
    ]
    assert any(run_given(row, "F32") != wanted for row, wanted in rows)


def test_elements_to_choose_from_have_places_in_shared_memory() -> None:
    problem = plain(16, 64, [256], "BF16")
    (segment,) = problem.segments
    tiling = Tiling(256, 1, 64)
    before = count_shared_bytes(problem, tiling)
    for count, grows in ((1, False), (6, False), (8, True)):
        many = dataclasses.replace(segment, kinds=(), chosen=("BF16",) * count)
        found = count_shared_bytes(dataclasses.replace(problem, segments=(many,)), tiling)
        assert (found > before) == grows
    many = dataclasses.replace(segment, kinds=(), chosen=("BF16",) * 32)
    assert find_problem(dataclasses.replace(problem, segments=(many,))) != ""


def test_a_kernel_behind_that_reads_too_few_candidates_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = align_array(np.arange(600, dtype=np.float32)[None])
    columns = align_array(np.arange(600, dtype=np.int32)[None])
    assert choose(values, columns, "F32")[0][0] == 599
    right = "index += THREADS"
    assert right in largest._BODY
    monkeypatch.setattr(largest, "_BODY", largest._BODY.replace(right, "index += 4 * THREADS"))
    assert choose(values, columns, "F32")[0][0] != 599
