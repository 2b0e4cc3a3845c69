"""Matmuls in float32 by tensor cores, run on the host: Note [Floats in three parts]."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array
from tests.fakes.warpgroups import run_warpgroups_on_host
from tracegraph.lowering.kernels.matmuls import float_matmul
from tracegraph.lowering.kernels.matmuls.float_matmul import (
    STAGE_BYTES,
    FloatMatmul,
    choose_split,
    count_tiles,
    find_problem,
    write_float_matmul,
)

H100 = 132


def make_sides(matmul: FloatMatmul, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Returns a left side with a row each, and a right side with a column each, as of memory."""
    rng = np.random.default_rng(seed)
    shapes = ((matmul.rows, matmul.depth), (matmul.columns, matmul.depth))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def run(
    matmul: FloatMatmul, sides: list[np.ndarray[Any, Any]], split: int = 1, processors: int = 2
) -> np.ndarray[Any, Any]:
    """Returns the parts of the sums."""
    ways = matmul.left_by_depth, matmul.right_by_depth
    operands = [
        align_array(side if by_depth else np.ascontiguousarray(side.T))
        for side, by_depth in zip(sides, ways, strict=True)
    ]
    result = align_array(np.full((split, matmul.rows, matmul.columns), np.nan, np.float32))
    run_warpgroups_on_host(write_float_matmul(matmul, split, processors), [*operands, result])
    return result


def measure(result: np.ndarray[Any, Any], sides: list[np.ndarray[Any, Any]]) -> float:
    """Returns the largest error, in units of float32 of what is added up."""
    left, right = (side.astype(np.float64) for side in sides)
    size = np.abs(left) @ np.abs(right).T
    error = np.abs(result.astype(np.float64).sum(0) - left @ right.T)
    return float((error / size).max() / np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    ("matmul", "split", "processors"),
    [
        (FloatMatmul(128, 128, 160, left_by_depth=True, right_by_depth=True), 1, 2),
        (FloatMatmul(128, 128, 64, left_by_depth=False, right_by_depth=False), 2, 2),
        (FloatMatmul(132, 200, 72, left_by_depth=False, right_by_depth=True), 1, 3),
        (FloatMatmul(65, 132, 76, left_by_depth=True, right_by_depth=False), 3, 2),
    ],
)
def test_products_are_those_of_numpy(matmul: FloatMatmul, split: int, processors: int) -> None:
    assert find_problem(matmul) == ""
    sides = make_sides(matmul)
    # Each of the parts has 8 bits: with two of them the error would be about 2^-17, 64 units.
    assert measure(run(matmul, sides, split, processors), sides) < 1


PLAIN = FloatMatmul(64, 64, 64, left_by_depth=True, right_by_depth=False)


def check_what_is_not_finite() -> None:
    left, right = sides = make_sides(PLAIN)
    left[3, 5], left[20, 7], right[9, 40], right[33, 2] = np.inf, np.nan, -np.inf, np.nan
    left[17] *= 1e30
    right[60] *= 1e30
    # Rounded to bfloat16 it would be infinite.
    left[50, 0], right[:, 0] = np.finfo(np.float32).max, 0.25
    with np.errstate(all="ignore"):
        wanted = left @ right.T
        (result,) = run(PLAIN, sides)
    # Whether a first product that overflows stays depends on how a machine adds the next one.
    wanted[17, 60] = result[17, 60]
    is_finite = np.isfinite(wanted)
    assert (~is_finite).sum() > 128
    np.testing.assert_array_equal(result[~is_finite], wanted[~is_finite])
    size = np.abs(left.astype(np.float64)) @ np.abs(right.T.astype(np.float64))
    error = np.abs(result[is_finite] - wanted[is_finite].astype(np.float64))
    assert (error <= 1e-6 * size[is_finite]).all()


def test_what_is_not_finite_is_what_float32_gives() -> None:
    check_what_is_not_finite()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # A sum of infinite values is computed again.
        ("found |= value != value;", "found |= !is_finite(value);"),
        # Rows, or columns, without NaN are taken for such as have it.
        ("row_nans = join_bits(row_nans, 1, 4);", "row_nans = 3;"),
        ("column_nans = join_bits(column_nans, 4, 32);", "column_nans = ~0u;"),
    ],
)
def test_a_fault_where_something_is_not_finite_is_seen(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = (each for each in ("FUNCTIONS", "BODY") if right in getattr(float_matmul, each))
    text = getattr(float_matmul, name)
    monkeypatch.setattr(float_matmul, name, text.replace(right, wrong))
    with pytest.raises(AssertionError):
        check_what_is_not_finite()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # Two parts of three.
        ("part < 3; ++part) {\n        const", "part < 2; ++part) {\n        const"),
        # A stage is overwritten before it has been multiplied.
        (
            "await_products<0>();\n            if (thread == 0) arrive_at(empty + stage);",
            "if (thread == 0) arrive_at(empty + stage);\n            await_products<0>();",
        ),
        # Sums are read before they are made.
        ("await_products<0>();", "await_products<1>();"),
        # The second part of the depths is that of the first.
        ("cursor.step = cursor.part * STEPS / SPLIT;", "cursor.step = 0;"),
    ],
)
def test_a_fault_is_seen(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUNCTIONS", "BODY"):
        text = getattr(float_matmul, name)
        monkeypatch.setattr(float_matmul, name, text.replace(right, wrong))
        if text != getattr(float_matmul, name):
            break
    else:
        raise AssertionError(f"no such text: {right}")
    # Where a fault gives something that is not finite, it is not to be computed again.
    body = float_matmul.BODY.replace("*place = sum;", "*place = 1e30f;")
    monkeypatch.setattr(float_matmul, "BODY", body)
    matmul = FloatMatmul(64, 64, 384, left_by_depth=False, right_by_depth=True)
    sides = make_sides(matmul)
    assert not measure(run(matmul, sides, 2, processors=1), sides) < 1


def test_sums_that_do_not_begin_with_zero_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = float_matmul._write_products
    monkeypatch.setattr(
        float_matmul, "_write_products", lambda matmul: right(matmul).replace("), 0);", "), 1);")
    )
    sides = make_sides(PLAIN)
    assert not measure(run(PLAIN, sides), sides) < 1


@pytest.mark.parametrize("product", range(3))
def test_a_missing_small_product_of_parts_is_seen(
    product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = float_matmul.PRODUCTS[:product] + float_matmul.PRODUCTS[product + 1 :]
    sides = make_sides(PLAIN)
    monkeypatch.setattr(float_matmul, "PRODUCTS", rest)
    assert measure(run(PLAIN, sides), sides) > 1


def test_what_has_no_kernel_is_said() -> None:
    wrong = FloatMatmul(64, 64, 30, left_by_depth=True, right_by_depth=False)
    assert find_problem(wrong) == "a line of a matrix is no multiple of 4 elements"
    odd = FloatMatmul(64, 63, 32, left_by_depth=True, right_by_depth=True)
    assert find_problem(odd) == "a row of the result is no multiple of 2 elements"
    for sizes in [(0, 64, 64), (64, 0, 64), (64, 64, 0)]:
        empty = FloatMatmul(*sizes, left_by_depth=True, right_by_depth=True)
        assert find_problem(empty) == "a matrix is empty"
    assert find_problem(PLAIN) == ""


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ((640, 2048, 4096), 3),
        ((4096, 2048, 640), 1),
        ((640, 1024, 2048), 3),
        ((4096, 4096, 4096), 1),
        ((128, 128, 32), 1),
    ],
)
def test_depths_are_split_where_tiles_are_few(sizes: tuple[int, int, int], split: int) -> None:
    matmul = FloatMatmul(*sizes, left_by_depth=True, right_by_depth=False)
    assert choose_split(matmul, H100) == split


def test_a_launch_has_the_threads_and_memory_that_the_source_takes() -> None:
    for rows, columns, split in itertools.product((64, 640), (128, 4096), (1, 3)):
        matmul = FloatMatmul(rows, columns, 4096, left_by_depth=True, right_by_depth=True)
        kernel = write_float_matmul(matmul, split, H100)
        assert kernel.shape.block == (384, 1, 1)
        assert kernel.shape.grid == (min(H100, count_tiles(matmul) * split), 1, 1)
        # Four stages and two barriers for each; a block may have 227 KB.
        assert kernel.shape.shared_bytes == 4 * STAGE_BYTES + 64 <= 227 << 10
        assert kernel == write_float_matmul(matmul, split, H100)
