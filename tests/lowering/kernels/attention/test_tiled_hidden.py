"""Attention whose mask is a condition on indices, run on the host: Note [Hidden tiles]."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fakes.kernels_on_host import plant_fault
from tests.lowering.kernels.attention.test_tiled import (
    BIASES,
    CAUSAL,
    H100,
    LOADED,
    MASK,
    NO_SOFTMAX,
    SCALED,
    Case,
    Program,
    make_arrays,
    make_backward,
    make_forward,
    make_problem,
    round_lines,
    run,
    write_kernels,
)
from tests.lowering.kernels.element_programs import build, evaluate
from tracegraph.lowering.kernels.attention.tiled_hidden import (
    Blocks,
    find_hidden,
    list_column_blocks,
    list_row_blocks,
)

PAST = ("le", "t", "r")
WINDOW = ("and", PAST, ("lt", "r", ("int_add", "t", 20)))
PREFIX = ("lt", "t", 20)
PREFIX_OR_PAST = ("or", PREFIX, PAST)
# Rows from the fortieth on see nothing.
FEW_ROWS = ("and", PAST, ("lt", "r", 40))
LOADED_MASK = ("bool", MASK, ("int_add", "r", ("int_mul", 2, "t")))
LOWEST = float(np.finfo(np.float32).min)
# Scores of some rows are below what is hidden.
LOW_ROWS = ("select", ("le", "r", 2), ("add", SCALED, -2e9), SCALED)


def hide(condition: Any, constant: float, score: Any = SCALED) -> Any:
    return ("select", condition, score, constant)


NESTED = ("select", PREFIX, hide(PAST, -1e9), -1e9)
OWN_WINDOW = ("le", "r", ("int_add", "t", ("int_mul", 16, "g1")))
SHAPE = ("BF16", 1, 2, 64, 128, 16)
# The score, the shape, and whether anything is left out.
SCORES: dict[str, tuple[Any, Any, bool]] = {
    "causal": (CAUSAL, SHAPE, True),
    "causal, square": (CAUSAL, ("BF16", 1, 2, 64, 64, 16), True),
    "causal, more rows": (hide(PAST, -1e9), ("F16", 2, 1, 96, 48, 32), True),
    "causal, float": (hide(PAST, LOWEST), ("F32", 1, 1, 48, 128, 16), True),
    "causal, long lines": (hide(PAST, -1e9), ("BF16", 1, 1, 32, 48, 128), True),
    "causal, no strip is whole": (CAUSAL, ("BF16", 1, 1, 48, 144, 16), True),
    "window": (hide(WINDOW, -np.inf), SHAPE, True),
    "prefix": (hide(PREFIX, -1e9), SHAPE, True),
    "prefix or past": (hide(PREFIX_OR_PAST, LOWEST), SHAPE, True),
    "two choices": (NESTED, SHAPE, True),
    # Some head sees each tile.
    "each head its own": (hide(OWN_WINDOW, -1e9), SHAPE, False),
    "loaded, too": (hide(("and", PAST, LOADED_MASK), -1e9), SHAPE, True),
    "rows that see nothing": (hide(FEW_ROWS, -1e9), SHAPE, True),
    "rows without a number": (hide(FEW_ROWS, -np.inf), SHAPE, True),
    "weights that are not zero": (hide(PAST, -1.0), SHAPE, True),
    "some weights that are not zero": (hide(PAST, -1e9, LOW_ROWS), SHAPE, True),
    "loaded": (LOADED, SHAPE, False),
    "nothing hidden": (hide(("le", 0, "t"), -1e9), SHAPE, False),
    "added, not chosen": (("add", SCALED, hide(PAST, -1e9, 0.0)), SHAPE, False),
}


def make_case(name: str, program: Any = make_backward, processors: int = 8) -> Case:
    score, shape, _ = SCORES[name]
    return Case(program(score), *shape, processors=processors)


def check(case: Case, found: Any) -> None:
    """Compares results with NumPy's, rows that are not numbers too."""
    out, _, outs = found
    given = make_arrays(case)
    queries, joined, gradients = (round_lines(case, each) for each in given[:3])
    for b in range(case.batch):
        for h in range(case.heads):
            keys, values = joined[b, :, 0, h], joined[b, :, 1, h]
            known: dict[str, Any] = {"g0": b, "g1": h, "sum0": queries[b, :, h] @ keys.T}
            known["r"], known["t"] = np.arange(case.rows)[:, None], np.arange(case.columns)[None]
            known["sum1"] = gradients[b, :, h] @ values.T
            for number, (kind, each) in enumerate(case.program.row_values):
                value = evaluate(build(each), known, given)
                value = np.broadcast_to(value, (case.rows, case.columns))
                known[f"row{number}"] = getattr(value, kind)(axis=1, keepdims=True)
            matrix = keys if case.program.matmuls == 2 else values
            compare(case, out[b, :, h], evaluate(build(case.program.row), known, given) @ matrix)
            added = (gradients[b, :, h], queries[b, :, h])
            for each, array, lines in zip(case.program.columns, outs, added, strict=False):
                compare(case, array[b, :, h], evaluate(build(each), known, given).T @ lines)


def compare(case: Case, found: Any, wanted: Any) -> None:
    one = found.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(one), np.isnan(wanted))
    step = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-20}[case.kind]
    scale = np.nanmax(np.abs(wanted), initial=1e-6)
    np.testing.assert_allclose(one, wanted, rtol=step, atol=4 * step**2 * scale + 2e-5 * scale)


@pytest.mark.parametrize("name", SCORES)
def test_results_are_those_of_all_tiles(name: str) -> None:
    case = make_case(name)
    kernels = write_kernels(case)
    assert ["COUNTS[]" in each.source for each in kernels] == [SCORES[name][2]] * 2
    with np.errstate(all="ignore"):
        check(case, run(case, kernels))


@pytest.mark.parametrize("name", ["causal", "weights that are not zero", "rows without a number"])
def test_forward_and_many_warps_of_a_strip(name: str) -> None:
    for case in (make_case(name, make_forward), make_case(name, processors=H100)):
        with np.errstate(all="ignore"):
            check(case, run(case, write_kernels(case), copies_at_once=True))


LARGEST = Program(
    1,
    (("max", hide(PAST, 50.0)),),
    ("select", PAST, ("mul", "sum0", "row0"), 0.0),
    (("select", PAST, ("mul", "sum0", "row0"), 0.0),),
)
BEFORE = Program(
    1,
    (("sum", ("exp", hide(PAST, -1e9))),),
    ("div", ("exp", hide(PAST, -1e9)), "row0"),
    (("div", ("exp", hide(PAST, -1e9)), "row0"),),
)
MULTIPLIED = ("mul", "sum0", ("select", PAST, 1.0, 0.0))
LINEAR = Program(1, (("sum", MULTIPLIED),), MULTIPLIED, (MULTIPLIED,))


@pytest.mark.parametrize("program", [LARGEST, BEFORE, LINEAR])
def test_programs_that_are_no_softmax(program: Program) -> None:
    case = Case(program, *SHAPE)
    kernels = write_kernels(case)
    assert all("COUNTS[]" in each.source for each in kernels)
    check(case, run(case, kernels))


def test_tiles_are_found() -> None:
    def see(score: Any, rows: int = 64, columns: int = 48) -> Any:
        case = Case(make_backward(score), "BF16", 1, 2, rows, columns, 16)
        problem = make_problem(case)
        hidden = find_hidden(problem, problem.row_values, (build(case.program.row),))
        return hidden and [f"{seen:03b}"[::-1] for seen in hidden.seen]

    assert see(CAUSAL) == ["100", "110", "111", "111"]
    assert see(hide(WINDOW, -1e9)) == ["100", "110", "111", "011"]
    assert see(hide(PREFIX, -1e9)) == ["110"] * 4
    assert see(hide(PREFIX_OR_PAST, -1e9)) == ["110", "110", "111", "111"]
    # The second head's window reaches farther back.
    assert see(hide(OWN_WINDOW, -1e9)) == ["111", "111", "011", "111"]
    # Among the rows from the thirty-third on one sees nothing.
    assert see(hide(FEW_ROWS, -1e9)) == ["100", "110", "111", "111"]
    assert see(hide(("lt", "r", 16), -1e9)) is None
    # A constant for each column is not one for all.
    assert see(("select", PAST, SCALED, ("to_float", "t"))) is None
    case = Case(NO_SOFTMAX, *SHAPE)
    problem = make_problem(case)
    assert find_hidden(problem, problem.row_values, (build(case.program.row),)) is None
    # Too many elements to look at, where each group has its own.
    many = dataclasses.replace(
        make_problem(Case(make_backward(hide(OWN_WINDOW, -1e9)), "BF16", 1, 2, 64, 64, 16)),
        groups=(1, 1 << 13),
    )
    assert find_hidden(many, many.row_values, (build("row1"),)) is None


def test_blocks_that_see_most_come_first() -> None:
    def list_blocks(score: Any, columns: int = 64, sharers: int = 1) -> tuple[Blocks, Blocks]:
        problem = make_problem(Case(make_backward(score), "BF16", 1, 2, 64, columns, 16))
        hidden = find_hidden(problem, problem.row_values, (build(make_backward(score).row),))
        assert hidden is not None
        return (
            list_row_blocks(hidden, columns, 2, sharers),
            list_column_blocks(hidden, columns, 2, 16),
        )

    rows, columns = list_blocks(CAUSAL)
    assert (rows.counts, rows.are_in_order, columns.counts) == ((2, 4), True, (4, 2))
    assert columns.lists == ((0, 1, 2, 3), (2, 3, 0, 1))
    assert "ORDER[] = {1, 0}" in rows.write(2)
    assert "ORDER[] = {0, 1}" in columns.write(2)
    # Strips of columns are divided over the warps of a strip of rows.
    assert list_blocks(CAUSAL, sharers=3)[0].counts == (1, 2)
    # No more than two counts: half of the six strips, or all.
    rows, _ = list_blocks(hide(WINDOW, -1e9), columns=96)
    assert rows.counts == (3, 6)
    assert rows.lists[1] == (0, 1, 2, 3, 4, 5)


def test_what_is_hidden_is_not_read() -> None:
    case = make_case("causal")
    problem = make_problem(case)
    rows, columns = write_kernels(case)
    # Lines of keys and values that no row sees are not numbers; rows see them where all is needed.
    for name, is_read in (("causal", False), ("weights that are not zero", True)):
        case = make_case(name)
        kernels = write_kernels(case)
        arrays = make_arrays(case)
        arrays[1][:, 64:] = np.nan
        out, _, _ = run_with(case, kernels, arrays)
        assert np.isnan(out.astype(np.float32)).any() == is_read
    assert rows != columns
    assert problem.columns == 128


def run_with(case: Case, kernels: Any, arrays: Any) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.lowering.kernels.attention.test_tiled.make_arrays", lambda _: arrays)
        return run(case, kernels)


FAULTS = {
    "weights are tested by rows": ("weights that are not zero", "&& sync_any(adds)", "&& false"),
    "weights are tested by columns": ("weights that are not zero", "if (sync_any(adds))", "if (0)"),
    "each row is tested": ("some weights that are not zero", "adds |= h_", "adds = h_"),
    "all is begun again": ("weights that are not zero", "again ? SHARE / 16 : 0", "0"),
    "units that are left out are tested": (
        "weights that are not zero",
        "row = turns * UNIT",
        "row = ROWS",
    ),
    "the column of a score": ("window", "find(place(tile) * 16)", "place(tile) * 16"),
    "the row of a score": (
        "causal, more rows",
        "const int unit = find(turn)",
        "const int unit = turn",
    ),
    "a block's own list": ("window", "LISTS[block * ", "LISTS[0 * "),
    "a block's own count": ("causal, square", "pairs = COUNTS[block]", "pairs = COUNTS[0]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    name, right, wrong = FAULTS[fault]
    case = make_case(name)
    kernels = plant_fault(write_kernels(case), right, wrong)
    with np.errstate(all="ignore"), pytest.raises(AssertionError, match=r"Not equal|not equal"):
        check(case, run(case, kernels))


def test_what_a_hidden_row_has_is_joined() -> None:
    case = Case(LARGEST, *SHAPE)
    kernels = plant_fault(write_kernels(case), "if (PAIRS * SHARERS < EVERY) rows", "if (0) rows")
    with pytest.raises(AssertionError, match=r"Not equal|not equal"):
        check(case, run(case, kernels))


def test_biases_of_rows_are_a_part_of_what_is_hidden() -> None:
    score = ("add", SCALED, ("float", BIASES, "r"))
    case = Case(make_backward(hide(PAST, -1e9, score)), *SHAPE)
    check(case, run(case, write_kernels(case)))
