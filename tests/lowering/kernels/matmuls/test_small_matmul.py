"""Small matmuls: the kernels run here, on this machine's threads, against NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, run_kernel_on_host
from tests.lowering.kernels.matmuls.test_few_rows import (
    make_norm,
    make_operands,
    multiply,
    normalise,
    plain,
)
from tracegraph.lowering.kernels.matmuls import small_matmul
from tracegraph.lowering.kernels.matmuls.few_rows_problem import (
    SHARED_BYTES,
    FewRows,
    MatrixSegment,
)
from tracegraph.lowering.kernels.matmuls.small_matmul import (
    Tile,
    choose_tile,
    count_blocks,
    count_shared_bytes,
    find_problem,
    write_small_matmul,
)
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.lowering.kernels.row_functions import Form, RowFunction, RowOp, RowOperand

FULL, COLUMN, ROW, _ = Form
H100 = 132


def run(
    kernel: OwnKernel, problem: FewRows, operands: Any, *, copies_at_once: bool = False
) -> list[np.ndarray[Any, Any]]:
    sizes = [(problem.rows, each.columns) for each in problem.segments for _ in each.kinds]
    results = [align_array(np.full(size, np.nan, np.float32)) for size in sizes]
    run_kernel_on_host(kernel, [*operands, *results], copies_at_once=copies_at_once)
    return results


def round_weights(matrix: Any) -> Any:
    """Returns the nearest values of eleven bits, those of tensor cores; halves are rounded up."""
    fraction, exponent = np.frexp(matrix)
    return np.ldexp(np.trunc(fraction * 2.0**11 + np.copysign(0.5, fraction)) / 2.0**11, exponent)


def assert_near(result: Any, wanted: Any) -> None:
    """Asserts that rows were multiplied with twice the bits of TF32."""
    np.testing.assert_allclose(result, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(16, 8, 4), (40, 64, 48), (70, 40, 36), (17, 104, 20), (9, 384, 12)],
)
def test_products_are_those_of_numpy(
    rows: int, depth: int, columns: int, is_transposed: bool
) -> None:
    problem = plain(rows, depth, [columns], "F32", is_transposed=is_transposed)
    assert find_problem(problem) == ""
    operands = make_operands(problem)
    (result,) = run(write_small_matmul(problem, 4), problem, operands)
    x, matrix = operands
    assert_near(result, multiply(x, round_weights(matrix), is_transposed=is_transposed))


def test_copies_may_come_early() -> None:
    problem = plain(40, 64, [48], "F32")
    operands = make_operands(problem)
    kernel = write_small_matmul(problem, 4)
    (late,) = run(kernel, problem, operands)
    (early,) = run(kernel, problem, operands, copies_at_once=True)
    np.testing.assert_array_equal(early, late)


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(16, 96), Tile(32, 48), Tile(64, 32)])
def test_each_tile_computes_the_same(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = plain(50, 40, [100, 24], "F32")
    operands = make_operands(problem)
    monkeypatch.setattr(small_matmul, "choose_tile", lambda *_: tile)
    results = run(write_small_matmul(problem, H100), problem, operands)
    for result, matrix in zip(results, operands[1:], strict=True):
        assert_near(result, multiply(operands[0], round_weights(matrix)))


def add_bias_and_residual(first: int) -> RowFunction:
    """Returns the sum with an array of columns and one of all elements, and its square."""
    operands = (RowOperand(first, COLUMN), RowOperand(first + 1, FULL))
    ops = (RowOp("add", FULL, (0, 1)), RowOp("add", FULL, (3, 2)), RowOp("square", FULL, (4,)))
    return RowFunction(operands, ops, (4, 5), sums=1)


def test_a_norm_in_front_and_two_results_behind() -> None:
    segment = MatrixSegment(24, (2,), add_bias_and_residual(3), ("F32", "F32"))
    problem = FewRows(19, 64, ("F32",) * 5, make_norm(0, 64), "F32", (segment,))
    operands = make_operands(problem)
    kernel = write_small_matmul(problem, 4)
    # Weights, and what no row changes; not the gain, which no one says is settled.
    assert kernel.early == (2,)
    x, gain, matrix, bias, residual = operands
    result, square = run(kernel, problem, operands)
    wanted = normalise(x, gain) @ round_weights(matrix) + bias + residual
    assert_near(result, wanted)
    assert_near(square, wanted**2)


def test_what_is_centred_is_read_in_whole_rows() -> None:
    bits = f"{np.float32(1 / 48).view(np.uint32):08x}"
    centre = RowFunction(
        (RowOperand(0, FULL),),
        (
            RowOp("reduce_sum", ROW, (0,)),
            RowOp("constant", Form.ONE, (), bits),
            RowOp("mul", ROW, (1, 2)),
            RowOp("sub", FULL, (0, 3)),
        ),
        (4,),
    )
    problem = dataclasses.replace(plain(33, 48, [20], "F32"), start=centre)
    x, matrix = operands = make_operands(problem)
    (result,) = run(write_small_matmul(problem, 4), problem, operands)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    assert_near(result, centred @ round_weights(matrix))


def test_values_that_are_not_numbers_stay_in_their_rows() -> None:
    problem = plain(20, 16, [8], "F32")
    x, matrix = operands = make_operands(problem)
    x[3, 5], x[18, 0] = np.nan, np.inf
    (result,) = run(write_small_matmul(problem, 4), problem, operands)
    assert np.isnan(result[3]).all()
    np.testing.assert_array_equal(result[18], np.sign(matrix[0]) * np.inf)
    others = [row for row in range(20) if row not in (3, 18)]
    assert_near(result[others], (x.astype(np.float64) @ round_weights(matrix))[others])


# As GPUs write it, and the largest value: what is added to round it must not make a number of it.
@pytest.mark.parametrize(("bits", "wanted"), [(0x7FFFFFFF, np.nan), (0x7F7FFFFF, np.inf)])
def test_weights_are_rounded_as_numbers(bits: int, wanted: float) -> None:
    problem = plain(16, 8, [4], "F32")
    x, matrix = operands = make_operands(problem)
    x[:] = 1
    matrix.view(np.uint32)[5, 2] = bits
    (result,) = run(write_small_matmul(problem, 4), problem, operands)
    np.testing.assert_array_equal(result[:, 2], wanted)
    assert np.isfinite(result[:, [0, 1, 3]]).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sharer = warp / STRIPS", "sharer = 0"),
        ("part < SHARERS", "part < SHARERS - 1"),
        ("low.values[1]", "low.values[0]"),
        ("sum + rest", "sum"),
        ("await_copies<0>();", ""),
        ("multiply_tile(rests[m][eight], rest, b, float());", ""),
        ("{round_bits(from[0])", "{cut_bits(from[0])"),
        ("+ own_line * (LINE / 4) + own_vector", "+ own_vector"),
    ],
)
def test_a_fault_in_the_kernel_is_found(before: str, after: str) -> None:
    problem = plain(20, 64, [16], "F32")
    operands = make_operands(problem)
    kernel = write_small_matmul(problem, 4)
    assert before in kernel.source
    broken = dataclasses.replace(kernel, source=kernel.source.replace(before, after))
    (result,) = run(broken, problem, operands)
    with pytest.raises(AssertionError):
        assert_near(result, multiply(operands[0], round_weights(operands[1])))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (plain(64, 64, [64], "BF16"), "not in float32"),
        (plain(64, 63, [64], "F32"), "no multiple of 8"),
        (plain(64, 64, [66], "F32"), "none of 4"),
        (plain(64, 4096, [64], "F32"), "do not fit"),
    ],
)
def test_what_has_no_kernel_is_named(problem: FewRows, reason: str) -> None:
    assert reason in find_problem(problem)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "tile", "blocks"),
    [
        (256, 128, 128, Tile(16, 32), 64),
        (256, 128, 512, Tile(16, 32), 256),
        (512, 128, 384, Tile(16, 64), 192),
        (256, 768, 128, Tile(16, 16), 128),
        (2048, 128, 1024, Tile(64, 64), 512),
    ],
)
def test_a_multiprocessor_has_two_blocks_where_there_is_room(
    rows: int, depth: int, columns: int, tile: Tile, blocks: int
) -> None:
    problem = plain(rows, depth, [columns], "F32")
    assert choose_tile(problem, H100) == tile
    assert count_blocks(problem, tile) == blocks
    assert count_shared_bytes(problem, tile) <= SHARED_BYTES
