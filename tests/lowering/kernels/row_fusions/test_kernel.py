"""Fusions along rows: the kernels run here, on this machine's threads, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, run_kernel_on_host
from tests.lowering.kernels.element_programs import build, evaluate
from tracegraph.lowering.kernels.attention.tiled import RowValue
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.lowering.kernels.row_fusions import kernel as row_fusion
from tracegraph.lowering.kernels.row_fusions.kernel import write_row_fusion
from tracegraph.lowering.kernels.row_fusions.problem import (
    Output,
    RowFusion,
    RowInput,
    count_blocks,
    find_row_problem,
)

TYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "S32": np.int32,
}
PROCESSORS = 2
PRODUCT = ("mul", "input0", "input1")
SHARE = ("div", ("exp", ("sub", "input0", "row0")), "row1")


def make_fusion(rows: int, columns: int, kind: str) -> RowFusion:
    """Returns a softmax with a gain, what is left of its derivative, and sums of both kinds.

    Of its arrays the first two have rows of their own, the third is shared by all, and of the fifth
    each row reads one that the fourth tells.
    """
    own, table = build(("int_mul", "r", columns)), build(("int_mul", ("int", 3, "r"), columns))
    inputs = (
        RowInput(0, own, is_own=True),
        RowInput(1, own, is_own=True),
        RowInput(2, build(0), is_own=False),
        RowInput(4, table, is_own=False),
    )
    row_values = (
        RowValue("max", build("input0")),
        RowValue("sum", build(("exp", ("sub", "input0", "row0")))),
        RowValue("sum", build(PRODUCT)),
        RowValue("sum", build(("mul", SHARE, "input3"))),
    )
    rest = ("add", ("mul", "input1", "row2"), ("mul", ("to_float", "t"), "row3"))
    elements = (
        Output(build(("mul", SHARE, "input2")), kind),
        Output(build(rest), "F32"),
    )
    values = (Output(build(("add", "row0", "row1")), "F32"), Output(build("row3"), kind))
    sums = (build(PRODUCT), build(("mul", "input1", SHARE)))
    kinds = (kind, kind, "F32", "S32", kind)
    return RowFusion(rows, columns, kinds, inputs, row_values, elements, values, sums)


def make_operands(fusion: RowFusion, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng([seed, fusion.rows, fusion.columns])
    size = fusion.rows, fusion.columns
    shapes = [size, size, (fusion.columns,), (fusion.rows,), (6, fusion.columns)]
    drawn = [
        rng.integers(0, 6, shape) if kind == "S32" else rng.normal(size=shape)
        for shape, kind in zip(shapes, fusion.kinds, strict=True)
    ]
    typed = zip(drawn, fusion.kinds, strict=True)
    return [align_array(each.astype(TYPES[kind])) for each, kind in typed]


def run(
    kernel: OwnKernel, fusion: RowFusion, operands: Sequence[Any], *, copies_at_once: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Returns elements, row values, and the parts of sums, added up."""
    shapes: list[tuple[tuple[int, ...], str]] = [
        *(((fusion.rows, fusion.columns), each.kind) for each in fusion.elements),
        *(((fusion.rows,), each.kind) for each in fusion.row_outputs),
    ]
    count = len(shapes)
    blocks = count_blocks(fusion, PROCESSORS)
    shapes += [((blocks, fusion.columns), "F32") for _ in fusion.sums]
    results = [align_array(np.full(shape, np.nan, TYPES[kind])) for shape, kind in shapes]
    run_kernel_on_host(kernel, [*operands, *results], copies_at_once=copies_at_once)
    return [*results[:count], *(each.sum(0) for each in results[count:])]


def compute(fusion: RowFusion, operands: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the same in float64."""
    r, t = np.arange(fusion.rows)[:, None], np.arange(fusion.columns)
    known: dict[str, Any] = {"r": r, "t": t}
    for number, given in enumerate(fusion.inputs):
        base = evaluate(given.base, known, operands)
        known[f"input{number}"] = operands[given.parameter].ravel()[base + t].astype(np.float64)
    for number, row_value in enumerate(fusion.row_values):
        value = evaluate(row_value.function, known, operands)
        reduce = np.max if row_value.kind == "max" else np.sum
        known[f"row{number}"] = reduce(value, axis=-1, keepdims=True)
    elements = [evaluate(each.function, known, operands) for each in fusion.elements]
    values = [evaluate(each.function, known, operands)[:, 0] for each in fusion.row_outputs]
    sums = [evaluate(each, known, operands).sum(0) for each in fusion.sums]
    return [*elements, *values, *sums]


def assert_near(results: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Asserts that values were computed in float32 and rounded once."""
    for result, right in zip(results, wanted, strict=True):
        bound = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}[str(result.dtype)]
        given = result.astype(np.float64)
        np.testing.assert_allclose(given, right, rtol=0, atol=bound * np.abs(right).max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(37, 64), (24, 128), (16, 256), (21, 776), (3, 1032), (7, 4104)]
)
def test_results_are_those_of_numpy(rows: int, columns: int, kind: str) -> None:
    fusion = make_fusion(rows, columns, kind)
    assert find_row_problem(fusion) == ""
    operands = make_operands(fusion)
    kernel = write_row_fusion(fusion, PROCESSORS)
    assert_near(run(kernel, fusion, operands), compute(fusion, operands))


@pytest.mark.parametrize("columns", [256, 1032])
def test_copies_may_come_early(columns: int) -> None:
    fusion = make_fusion(21, columns, "BF16")
    operands = make_operands(fusion)
    kernel = write_row_fusion(fusion, PROCESSORS)
    late = run(kernel, fusion, operands)
    early = run(kernel, fusion, operands, copies_at_once=True)
    for one, other in zip(late, early, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("columns", [64, 1032])
def test_one_row_at_a_time_where_two_do_not_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = make_fusion(21, columns, "F32")
    operands = make_operands(fusion)
    monkeypatch.setattr(row_fusion, "_BLOCK_BYTES", row_fusion.SHARED_LIMIT)
    kernel = write_row_fusion(fusion, PROCESSORS)
    assert "SLOTS = 1" in kernel.source
    assert_near(run(kernel, fusion, operands), compute(fusion, operands))


def test_elements_alone_and_row_outputs_alone() -> None:
    whole = make_fusion(9, 64, "F32")
    operands = make_operands(whole)
    none: Any = {"elements": (), "row_outputs": (), "sums": ()}
    wanted = compute(whole, operands)
    for name, right in (("elements", wanted[:2]), ("row_outputs", wanted[2:4])):
        fusion = dataclasses.replace(whole, **{**none, name: getattr(whole, name)})
        kernel = write_row_fusion(fusion, PROCESSORS)
        assert_near(run(kernel, fusion, operands), right)


def test_row_values_that_need_the_same_are_made_in_one_pass() -> None:
    kernel = write_row_fusion(make_fusion(9, 64, "F32"), PROCESSORS)
    passes = kernel.source.split("for (int step = 0; step < STEPS; ++step)")
    # One copies; then the maximum and a sum, the exponentials, what needs them, and the elements;
    # the last one is of sums along the columns.
    assert len(passes) - 1 == 1 + 3 + 1 + 1
    assert "row0 = maximum" in passes[2]
    assert "row2 = row2 +" in passes[2]


def test_what_is_of_a_row_is_computed_ahead_of_its_elements() -> None:
    value = ("tanh", "row1")
    whole = make_fusion(20, 64, "F32")
    outputs = (Output(build(("mul", "input0", value)), "F32"),)
    fusion = dataclasses.replace(whole, elements=outputs, row_outputs=(), sums=())
    operands = make_operands(fusion)
    kernel = write_row_fusion(fusion, PROCESSORS)
    ahead, of_elements = kernel.source.split("Pack<float> stored0;")
    assert "tanhf(" in ahead
    assert "tanhf(" not in of_elements
    assert_near(run(kernel, fusion, operands), compute(fusion, operands))


def test_a_whole_warp_reads_a_short_row() -> None:
    vectors = {kind: make_fusion(20, 128, kind).vector for kind in ("F32", "F16")}
    assert vectors == {"F32": 4, "F16": 8}
    assert make_fusion(20, 136, "F32").vector == 8


def test_a_value_that_is_not_a_number_stays_in_its_row_and_column() -> None:
    fusion = make_fusion(20, 64, "F32")
    operands = make_operands(fusion)
    operands[1][3, 5] = np.nan
    elements = run(write_row_fusion(fusion, PROCESSORS), fusion, operands)
    assert not np.isnan(elements[0]).any()
    assert np.isnan(elements[1]).all(1).tolist() == [row == 3 for row in range(20)]
    sums = np.stack(elements[4:])
    assert np.isnan(sums).all(0).tolist() == [column == 5 for column in range(64)]


@pytest.mark.parametrize(
    ("columns", "before", "after"),
    [
        (256, "await_copies<1>();", ""),
        (256, "1 - place);", "place);"),
        (256, "mask = 16", "mask = 8"),
        (256, "joined[group * COLUMNS", "joined[0 * COLUMNS"),
        (256, "each < GROUPS", "each < GROUPS - 1"),
        (256, "r += STRIDE", "r += STRIDE + 1"),
        (256, "totals[1][step][each] +=", "totals[1][step][each] ="),
        (1032, "warp < READERS / 32", "warp < READERS / 32 - 1"),
        (1032, "scratch[threadIdx.x / 32] = value", "scratch[0] = value"),
    ],
)
def test_a_fault_in_the_kernel_is_found(columns: int, before: str, after: str) -> None:
    fusion = make_fusion(37, columns, "BF16")
    operands = make_operands(fusion)
    kernel = write_row_fusion(fusion, PROCESSORS)
    assert before in kernel.source
    broken = dataclasses.replace(kernel, source=kernel.source.replace(before, after))
    results = run(broken, fusion, operands)
    with pytest.raises(AssertionError):
        assert_near(results, compute(fusion, operands))


def test_the_next_kernel_starts_early_only_where_it_has_places() -> None:
    for rows, starts in ((8 * 66, 1), (8 * 66 + 1, 0)):
        kernel = write_row_fusion(make_fusion(rows, 64, "F32"), 132)
        assert f"STARTS_EARLY = {starts};" in kernel.source


WIDE = make_fusion(8, 1 << 16, "F32")


@pytest.mark.parametrize(
    ("fusion", "reason"),
    [
        (make_fusion(8, 68, "F32"), "rows have 68 elements"),
        (make_fusion(8, 1 << 17, "F32"), "rows have 131072 elements"),
        (dataclasses.replace(WIDE, kinds=("F64", *WIDE.kinds[1:])), "arrays are F64"),
        (dataclasses.replace(WIDE, inputs=WIDE.inputs[2:]), "no array has rows"),
        (WIDE, "2 sums of 65536 columns are too many for registers"),
        (dataclasses.replace(WIDE, sums=()), "524288 bytes of a row do not fit"),
    ],
)
def test_what_has_no_kernel_is_named(fusion: RowFusion, reason: str) -> None:
    assert reason in find_row_problem(fusion)


@pytest.mark.parametrize(
    ("rows", "columns", "threads", "blocks"),
    [(2048, 768, 256, 132), (2048, 3072, 384, 264), (64, 768, 256, 8), (100, 1032, 160, 100)],
)
def test_blocks_fill_the_gpu_and_no_more(
    rows: int, columns: int, threads: int, blocks: int
) -> None:
    fusion = make_fusion(rows, columns, "BF16")
    assert fusion.readers * fusion.groups == threads
    assert count_blocks(fusion, 132) == blocks
