"""Matmuls of few rows: the kernels run here, on this machine's threads, against NumPy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, run_kernel_on_host
from tracegraph.lowering.kernels.matmuls import few_rows
from tracegraph.lowering.kernels.matmuls.few_rows import write_few_rows
from tracegraph.lowering.kernels.matmuls.few_rows_problem import (
    FewRows,
    MatrixSegment,
    Tiling,
    choose_tiling,
    count_shared_bytes,
    count_tiles,
    find_factors,
    find_problem,
)
from tracegraph.lowering.kernels.row_functions import (
    Form,
    RowFactors,
    RowFunction,
    RowOp,
    RowOperand,
    find_row_factors,
)

DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "S8": np.int8,
    "F8E4M3FN": ml_dtypes.float8_e4m3fn,
    "F8E5M2": ml_dtypes.float8_e5m2,
}
FULL, COLUMN, ROW, ONE = Form
PLAIN = RowFunction((RowOperand(0, FULL),), (), (0,))
SUM = RowFunction((), (), (0,), sums=1)
H200 = 132


def plain(rows: int, depth: int, columns: Any, kind: str = "BF16", **more: Any) -> FewRows:
    """Returns matmuls without anything before or after, one segment for each number of columns."""
    outside = "BF16" if "8" in kind else kind
    segments = [MatrixSegment(each, (1 + n,), SUM, (outside,)) for n, each in enumerate(columns)]
    kinds = (outside, *[kind] * len(segments))
    return FewRows(rows, depth, kinds, PLAIN, outside, tuple(segments), **more)


def make_operands(problem: FewRows) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    shapes: dict[int, tuple[int, ...]] = {}
    for operand in problem.start.operands:
        shapes[operand.parameter] = _shape(operand.form, problem.rows, problem.depth)
    for segment in problem.segments:
        for number in segment.matrices:
            sizes = problem.depth, segment.columns
            shapes[number] = sizes[::-1] if problem.is_transposed else sizes
        for operand in segment.finish.operands:
            shapes[operand.parameter] = _shape(operand.form, problem.rows, segment.columns)
    scales = [40 if kind == "S8" else 1 for kind in problem.kinds]
    draws = [scale * rng.normal(size=shapes[number]) for number, scale in enumerate(scales)]
    return [
        align_array(draw.astype(np.float32).astype(DTYPES[kind]))
        for draw, kind in zip(draws, problem.kinds, strict=True)
    ]


def _shape(form: Form, rows: int, columns: int) -> tuple[int, ...]:
    return {FULL: (rows, columns), COLUMN: (columns,), ROW: (rows, 1), ONE: (1,)}[form]


def run(problem: FewRows, operands: Any, processors: int) -> list[np.ndarray[Any, Any]]:
    kernel = write_few_rows(problem, processors)
    results = [
        # What a GPU's memory holds before is anything.
        align_array(np.full((problem.rows, segment.columns), np.nan, DTYPES[kind]))
        for segment in problem.segments
        for kind in segment.kinds
    ]
    split = choose_tiling(problem, processors).split
    run_kernel_on_host(kernel, [*operands, *results], cluster=split)
    return results


def assert_near(result: Any, wanted: Any) -> None:
    """Asserts that a result is the wanted one, rounded once, but for the order of sums."""
    exact = wanted.astype(np.float64)
    bits = ml_dtypes.finfo(result.dtype).nmant
    bound = 2.0 ** -(bits + 1) * np.abs(exact) + 2e-5 * np.abs(exact).max()
    assert (np.abs(result.astype(np.float64) - exact) <= bound).all()


def multiply(x: Any, matrix: Any, *, is_transposed: bool = False) -> Any:
    wide = matrix.astype(np.float64)
    return x.astype(np.float64) @ (wide.T if is_transposed else wide)


@pytest.mark.parametrize(
    ("problem", "processors"),
    [
        (plain(1, 96, [64]), 1),
        (plain(1, 640, [72]), 8),
        (plain(1, 512, [64, 8, 24]), 20),
        (plain(1, 200, [64], "F32"), 4),
        (plain(1, 1000, [40], "F16"), 4),
        (plain(4, 128, [72]), 2),
        (plain(8, 64, [24], "F32"), 1),
        (plain(1, 264, [80], is_transposed=True), 1),
        (plain(1, 1040, [20, 3], is_transposed=True), 8),
        (plain(3, 136, [65], "F32", is_transposed=True), 2),
        (plain(8, 72, [9], is_transposed=True), 1),
        (plain(1, 264, [128, 48], "S8"), 4),
        (plain(2, 160, [9], "S8", is_transposed=True), 2),
        (plain(1, 264, [128, 48], "F8E4M3FN"), 4),
        (plain(3, 160, [9], "F8E5M2", is_transposed=True), 2),
        (plain(16, 64, [72]), 1),
        (plain(2, 1000, [40], "F16"), 4),
        (plain(7, 512, [64, 8, 24]), 20),
        (plain(9, 72, [128]), 1),
        (plain(12, 328, [256, 16]), 2),
        (plain(4, 96, [272], "S8"), 1),
        (plain(2, 264, [80], is_transposed=True), 1),
        (plain(7, 1040, [20, 130], is_transposed=True), 8),
        (plain(16, 512, [256], "F16", is_transposed=True), 2),
        (plain(12, 72, [9, 24], is_transposed=True), 1),
    ],
)
def test_products_are_those_of_numpy(problem: FewRows, processors: int) -> None:
    assert find_problem(problem) == ""
    operands = make_operands(problem)
    results = run(problem, operands, processors)
    for result, matrix in zip(results, operands[1:], strict=True):
        wanted = multiply(operands[0], matrix, is_transposed=problem.is_transposed)
        assert_near(result, wanted)


@pytest.mark.parametrize("kind", ["S8", "F8E4M3FN", "F8E5M2"])
def test_each_byte_is_widened_to_what_it_stands_for(kind: str) -> None:
    problem = plain(1, 8, [256], kind)
    x = align_array(np.eye(1, 8, dtype=ml_dtypes.bfloat16))
    matrix = align_array(np.zeros((8, 256), DTYPES[kind]))
    matrix[0] = np.arange(256, dtype=np.uint8).view(DTYPES[kind])
    (result,) = run(problem, [x, matrix], 1)
    np.testing.assert_array_equal(
        result[0].astype(np.float32), matrix[0].astype(np.float32), strict=True
    )


def make_norm(first: int, depth: int) -> RowFunction:
    """Returns x / sqrt(mean(x * x) + 1e-5) * gain, of the parameters from a number on."""
    bits = [f"{np.float32(each).view(np.uint32):08x}" for each in (1 / depth, 1e-5)]
    ops = (
        RowOp("square", FULL, (0,)),
        RowOp("reduce_sum", ROW, (2,)),
        RowOp("constant", ONE, (), bits[0]),
        RowOp("mul", ROW, (3, 4)),
        RowOp("constant", ONE, (), bits[1]),
        RowOp("add", ROW, (5, 6)),
        RowOp("rsqrt", ROW, (7,)),
        RowOp("mul", FULL, (0, 8)),
        RowOp("mul", FULL, (9, 1)),
    )
    operands = (RowOperand(first, FULL), RowOperand(first + 1, COLUMN))
    return RowFunction(operands, ops, (10,))


def normalise(x: Any, gain: Any) -> Any:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * gain.astype(np.float64)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "processors"),
    [
        (1, 128, 64, 1),
        (1, 512, 64, 8),
        (2, 136, 72, 4),
        (3, 60, 64, 1),
        (5, 512, 64, 8),
        (11, 264, 72, 2),
        (16, 4104, 64, 1),
    ],
)
def test_a_gated_layer_is_one_kernel(rows: int, depth: int, columns: int, processors: int) -> None:
    silu = RowFunction(
        (),
        (RowOp("logistic", FULL, (0,)), RowOp("mul", FULL, (0, 2)), RowOp("mul", FULL, (3, 1))),
        (4,),
        sums=2,
    )
    segment = MatrixSegment(columns, (2, 3), silu, ("BF16",))
    problem = FewRows(rows, depth, ("BF16",) * 4, make_norm(0, depth), "BF16", (segment,))
    x, gain, gate, up = operands = make_operands(problem)
    (result,) = run(problem, operands, processors)
    hidden = normalise(x, gain)
    if problem.is_on_tensor_cores:
        # Rounded as they are multiplied, before what their row has in common.
        wide = x.astype(np.float32) * gain.astype(np.float32)
        hidden = wide.astype(x.dtype) * normalise(x, np.ones(1)) / x.astype(np.float64)
    gates = multiply(hidden, gate)
    assert_near(result, gates / (1 + np.exp(-gates)) * multiply(hidden, up))


def make_centred(depth: int) -> RowFunction:
    """Returns (x - mean(x)) / max(abs(x - mean(x))): sums of what other sums are needed for."""
    bits = f"{np.float32(1 / depth).view(np.uint32):08x}"
    ops = (
        RowOp("reduce_sum", ROW, (0,)),
        RowOp("constant", ONE, (), bits),
        RowOp("mul", ROW, (1, 2)),
        RowOp("sub", FULL, (0, 3)),
        RowOp("abs", FULL, (4,)),
        RowOp("reduce_max", ROW, (5,)),
        RowOp("div", FULL, (4, 6)),
    )
    return RowFunction((RowOperand(0, FULL),), ops, (7,))


@pytest.mark.parametrize(
    ("rows", "depth", "processors", "kind"),
    [(1, 512, 8, "BF16"), (5, 520, 8, "BF16"), (3, 60, 1, "F32")],
)
def test_what_is_no_factor_is_computed_before_rows_are_multiplied(
    rows: int, depth: int, processors: int, kind: str
) -> None:
    segment = MatrixSegment(64, (1,), SUM, (kind,))
    problem = FewRows(rows, depth, (kind, kind), make_centred(depth), kind, (segment,))
    assert find_row_factors(problem.start) is None
    x, matrix = operands = make_operands(problem)
    (result,) = run(problem, operands, processors)
    wide = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    hidden = wide / np.abs(wide).max(-1, keepdims=True)
    if problem.is_on_tensor_cores:
        hidden = hidden.astype(np.float32).astype(x.dtype)
    assert_near(result, multiply(hidden, matrix))


def test_factors_of_a_row_are_told_from_those_of_its_elements() -> None:
    assert find_row_factors(make_norm(0, 8)) == RowFactors((0, 1), (8,), (3,))
    assert find_row_factors(PLAIN) is None
    halves = FewRows(
        2, 64, ("F16",) * 3, make_norm(0, 64), "F16", (MatrixSegment(64, (2,), SUM, ("F16",)),)
    )
    assert find_factors(halves) is None
    one = dataclasses.replace(halves, rows=1)
    assert find_factors(one) is not None


@pytest.mark.parametrize(("rows", "processors"), [(1, 1), (3, 16)])
def test_a_bias_a_residual_and_two_results(rows: int, processors: int) -> None:
    finish = RowFunction(
        (RowOperand(2, COLUMN), RowOperand(3, FULL), RowOperand(4, ROW), RowOperand(5, ONE)),
        (
            RowOp("add", FULL, (0, 1)),
            RowOp("max", FULL, (5, 4)),
            RowOp("mul", FULL, (6, 3)),
            RowOp("add", FULL, (7, 2)),
        ),
        (8, 5),
        sums=1,
    )
    segment = MatrixSegment(72, (1,), finish, ("BF16", "F32"))
    kinds = ("BF16", "BF16", "F32", "BF16", "F32", "F32")
    problem = FewRows(rows, 520, kinds, PLAIN, "BF16", (segment,))
    x, matrix, bias, residual, factor, least = operands = make_operands(problem)
    result, biased = run(problem, operands, processors)
    wanted = multiply(x, matrix) + bias.astype(np.float64)
    assert_near(biased, wanted)
    assert_near(result, np.maximum(wanted, least) * factor + residual.astype(np.float64))


def test_segments_have_their_own_ends() -> None:
    double = RowFunction((), (RowOp("add", FULL, (0, 0)),), (1,), sums=1)
    segments = (MatrixSegment(64, (1,), SUM, ("F32",)), MatrixSegment(136, (2,), double, ("BF16",)))
    problem = FewRows(1, 96, ("BF16",) * 3, PLAIN, "BF16", segments)
    operands = make_operands(problem)
    one, other = run(problem, operands, 4)
    assert_near(one, multiply(operands[0], operands[1]))
    assert_near(other, 2 * multiply(operands[0], operands[2]))


def test_a_kernel_that_adds_up_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = plain(1, 512, [64])
    operands = make_operands(problem)
    right = few_rows.BODY
    monkeypatch.setattr(few_rows, "BODY", right.replace("part < SPLIT", "part < SPLIT - 1"))
    (result,) = run(problem, operands, 8)
    with pytest.raises(AssertionError):
        assert_near(result, multiply(operands[0], operands[1]))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # Another thread's copies are read before they have come.
        ("        sync_lanes();\n        Halves", "        Halves"),
        # Vectors of a line have other places where they are read.
        ("(eighth ^ (i * 2 + line % 2)) - eighth", "0"),
        # Rows of eight that there are not are added to those that there are.
        ("if (row < ROWS)\n            partial", "partial"),
        # Depths that there are not are multiplied.
        ("x[row * STRIDE + d] = narrow(value, Weight());", ""),
    ],
)
def test_a_fault_on_tensor_cores_is_seen(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEEP_HALVES", "TENSOR_STEPS", "TENSOR_TOTALS"):
        text = getattr(few_rows, name)
        monkeypatch.setattr(few_rows, name, text.replace(right, wrong))
        if text != getattr(few_rows, name):
            break
    else:
        raise AssertionError(f"no such text: {right}")
    problem = plain(5, 264, [72])
    operands = make_operands(problem)
    (result,) = run(problem, operands, 4)
    with pytest.raises(AssertionError):
        assert_near(result, multiply(operands[0], operands[1]))


def test_sums_of_rows_that_a_block_keeps_for_itself_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = MatrixSegment(64, (2,), SUM, ("F32",))
    problem = FewRows(1, 512, ("F32",) * 3, make_norm(0, 512), "F32", (segment,))
    x, gain, matrix = operands = make_operands(problem)
    wanted = multiply(normalise(x, gain), matrix)
    (result,) = run(problem, operands, 8)
    assert_near(result, wanted)
    monkeypatch.setattr(few_rows, "BODY", few_rows.BODY.replace("peer != rank", "false"))
    (result,) = run(problem, operands, 8)
    with pytest.raises(AssertionError):
        assert_near(result, wanted)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        # Of a Llama of a billion parameters: queries, keys and values; output; gate and up; down.
        (plain(1, 2048, [2048, 512, 512]), Tiling(64, 2, 1024)),
        (plain(1, 2048, [2048]), Tiling(64, 4, 512)),
        (plain(1, 8192, [2048]), Tiling(64, 4, 2048)),
        (plain(1, 2048, [128_256]), Tiling(256, 1, 2048)),
    ],
)
def test_all_multiprocessors_have_something_to_ask_for(problem: FewRows, wanted: Tiling) -> None:
    assert choose_tiling(problem, H200) == wanted


def test_what_has_no_kernel_is_said() -> None:
    assert find_problem(plain(65, 64, [64])) == "65 rows by 1 matrices take too many registers"
    assert find_problem(plain(33, 64, [64], "F32")).startswith("33 rows by 1 matrices take")
    assert find_problem(plain(9, 64, [64], "S8")) == "9 rows by 1 matrices take too many registers"
    assert find_problem(plain(1, 64, [60])) == "a line of a matrix is no multiple of 8 elements"
    assert find_problem(plain(1, 60, [64], is_transposed=True)).startswith("a line of a matrix")
    assert find_problem(plain(8, 1 << 20, [64])) == "its rows do not fit into shared memory"


def test_a_launch_has_the_threads_and_memory_that_the_source_takes() -> None:
    for rows, columns in itertools.product((1, 8), (64, 512, 3072)):
        problem = plain(rows, 2048, [columns])
        kernel = write_few_rows(problem, H200)
        assert kernel.shape.block == (few_rows.THREADS, 1, 1)
        tiling = choose_tiling(problem, H200)
        blocks = count_tiles(problem, tiling) * tiling.split
        assert f"BLOCKS = {blocks};" in kernel.source
        assert kernel.early == (1,)
        again = write_few_rows(dataclasses.replace(problem), H200)
        assert again == kernel


@pytest.mark.parametrize("columns", [64, 2048, 8192, 128_256])
def test_each_multiprocessor_has_place_for_one_block_of_two_kernels(columns: int) -> None:
    # An H200 has 228 KB for each multiprocessor, and keeps 1 KB for each block.
    problem = plain(1, 2048, [columns])
    kernel = write_few_rows(problem, H200)
    tiling = choose_tiling(problem, H200)
    assert count_shared_bytes(problem, tiling) <= kernel.shape.shared_bytes
    assert 228 // ((kernel.shape.shared_bytes >> 10) + 1) == 2
    assert kernel.shape.grid[0] >= H200 // tiling.split * tiling.split
