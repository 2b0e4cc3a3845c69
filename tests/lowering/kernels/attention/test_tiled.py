"""Attention of many rows, run on the host: Note [Attention in tiles]."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, plant_fault, run_kernel_on_host
from tests.lowering.kernels.element_programs import build, evaluate
from tracegraph.lowering.kernels.attention.tiled import (
    Lines,
    ResultLines,
    RowValue,
    TiledAttention,
    find_lines_problem,
    find_tiled_problem,
)
from tracegraph.lowering.kernels.attention.tiled_columns import write_columns
from tracegraph.lowering.kernels.attention.tiled_elements import share_elements
from tracegraph.lowering.kernels.attention.tiled_rows import write_rows
from tracegraph.lowering.kernels.own_kernel import OwnKernel

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
# Parameters: queries, keys and values side by side, gradients of the result, a mask, biases.
QUERIES, JOINED, GRADIENTS, MASK, BIASES = range(5)
H100 = 132


@dataclasses.dataclass(frozen=True)
class Program:
    """Expressions of row values and weights, as `build` takes them.

    Attributes:
        matmuls: how many.
        row_values: of each its kind and its function.
        row: the weight of the row kernel.
        columns: those of the column kernel.
    """

    matmuls: int
    row_values: tuple[tuple[str, Any], ...]
    row: Any
    columns: tuple[Any, ...]


def make_softmax(score: Any) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Returns the row values of a softmax, and its result."""
    share = ("exp", ("sub", score, "row0"))
    return (("max", score), ("sum", share)), ("div", share, "row1")


SCALED = ("mul", "sum0", 0.25)
CAUSAL = ("select", ("le", "t", "r"), SCALED, -np.inf)
BIASED = ("add", SCALED, ("float", BIASES, ("int_add", "t", ("int_mul", 3, "r"))))
LOADED = (
    "select",
    ("bool", MASK, ("int_add", ("int_mul", "g0", 7), ("int_add", "r", ("int_mul", 2, "t")))),
    BIASED,
    -1e9,
)


def make_forward(score: Any) -> Program:
    row_values, share = make_softmax(score)
    return Program(1, row_values, share, (share,))


def make_backward(score: Any) -> Program:
    row_values, share = make_softmax(score)
    row_values = (*row_values, ("sum", ("mul", share, "sum1")))
    change = ("mul", ("mul", share, ("sub", "sum1", "row2")), 0.25)
    return Program(2, row_values, change, (share, change))


NO_SOFTMAX = Program(
    2,
    (
        ("max", ("mul", "sum1", ("to_float", ("int_rem", "t", 3)))),
        ("sum", ("tanh", ("add", "sum0", ("mul", "row0", 0.125)))),
        ("max", ("sub", ("mul", "row1", 0.25), "sum0")),
    ),
    ("add", ("tanh", "sum0"), ("mul", ("float", BIASES, "t"), ("mul", "row1", 0.125))),
    (("sub", "row2", "sum1"), ("mul", "row0", ("to_float", ("int_add", "g1", "g0")))),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: which program on what, for how many multiprocessors.

    More than six fields because these are the sizes of attention.
    """

    program: Program
    kind: str
    batch: int
    heads: int
    rows: int
    columns: int
    width: int
    processors: int = 1


def make_problem(case: Case) -> TiledAttention:
    """Returns the problem of queries (B, R, H, D), keys and values (B, T, 2, H, D)."""
    queries, gradients = (_make_lines(case, number, 0, case.rows, 1) for number in (0, 2))
    keys, values = (_make_lines(case, JOINED, which, case.columns, 2) for which in (0, 1))
    return TiledAttention(
        (case.batch, case.heads),
        case.rows,
        case.columns,
        case.width,
        (case.kind, case.kind, case.kind, "PRED", "F32"),
        ((queries, keys), (gradients, values))[: case.program.matmuls],
        tuple(RowValue(kind, build(each)) for kind, each in case.program.row_values),
        case.kind,
    )


def _make_lines(case: Case, parameter: int, which: int, lines: int, joined: int) -> Lines:
    size = case.heads * case.width
    base = ("int_mul", "g0", lines * joined * size)
    base = ("int_add", ("int_add", base, which * size), ("int_mul", "g1", case.width))
    return Lines(parameter, build(base), joined * size)


def make_arrays(case: Case) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    size = (case.heads, case.width)
    shapes = [(case.rows, *size), (case.columns, 2, *size), (case.rows, *size)]
    arrays = [rng.normal(size=(case.batch, *shape)).astype(DTYPES[case.kind]) for shape in shapes]
    mask = rng.random(4096) < 0.7
    return [*arrays, mask, rng.normal(size=4096).astype(np.float32)]


def make_output(case: Case, lines: int) -> tuple[np.ndarray[Any, Any], ResultLines]:
    """Returns a result (B, lines, H, D), and where its lines are."""
    line = case.heads * case.width
    array = np.full((case.batch, lines, case.heads, case.width), np.nan, DTYPES[case.kind])
    return align_array(array), ResultLines((lines * line, case.width, line), case.kind)


def write_kernels(case: Case) -> tuple[OwnKernel, OwnKernel]:
    problem = make_problem(case)
    assert find_tiled_problem(problem) == ""
    values = _make_lines(case, JOINED, 1, case.columns, 2)
    gradients = _make_lines(case, GRADIENTS, 0, case.rows, 1)
    matrix = problem.matmuls[0][1] if case.program.matmuls == 2 else values
    assert find_lines_problem(problem, matrix) == ""
    _, output = make_output(case, case.rows)
    row = build(case.program.row)
    rows = write_rows(problem, row, matrix, output, case.processors, keeps_rows=True)
    _, output = make_output(case, case.columns)
    added = (gradients, problem.matmuls[0][0])
    outputs = [
        (build(each), lines, output)
        for each, lines in zip(case.program.columns, added, strict=False)
    ]
    return rows, write_columns(problem, outputs, case.processors)


def run(case: Case, kernels: tuple[OwnKernel, OwnKernel], *, copies_at_once: bool = False) -> Any:
    """Returns results of the row kernel, the row values, and results of the column kernel."""
    arrays = [align_array(each) for each in make_arrays(case)]
    problem = make_problem(case)
    shape = (case.batch, case.heads, len(problem.row_values), case.rows)
    kept = align_array(np.full(shape, np.nan, np.float32))
    out, _ = make_output(case, case.rows)
    given = {"copies_at_once": copies_at_once}
    run_kernel_on_host(kernels[0], [*arrays, out, kept], **given)
    outs = [make_output(case, case.columns)[0] for _ in case.program.columns]
    run_kernel_on_host(kernels[1], [*arrays, kept, *outs], **given)
    return out, kept, outs


def round_lines(case: Case, lines: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns what tensor cores take."""
    return lines.astype(DTYPES[case.kind]).astype(np.float64)


def check(case: Case, found: Any) -> None:
    """Compares results with those of NumPy in float64."""
    out, kept, outs = found
    given = make_arrays(case)
    queries, joined, gradients = (round_lines(case, each) for each in given[:3])
    for b, h in itertools.product(range(case.batch), range(case.heads)):
        keys, values = joined[b, :, 0, h], joined[b, :, 1, h]
        known: dict[str, Any] = {"g0": b, "g1": h}
        known["r"], known["t"] = np.arange(case.rows)[:, None], np.arange(case.columns)[None]
        known["sum0"] = queries[b, :, h] @ keys.T
        if case.program.matmuls == 2:
            known["sum1"] = gradients[b, :, h] @ values.T
        whole = (case.rows, case.columns)

        def find(expression: Any, known: Any = known, whole: Any = whole) -> Any:
            return np.broadcast_to(evaluate(build(expression), known, given), whole)

        for number, (kind, each) in enumerate(case.program.row_values):
            value = getattr(find(each), kind)(axis=1)
            scale = max(1.0, np.abs(value).max())
            np.testing.assert_allclose(kept[b, h, number], value, rtol=0, atol=1e-5 * scale)
            known[f"row{number}"] = value[:, None]
        matrix = keys if case.program.matmuls == 2 else values
        _compare(case, out[b, :, h], find(case.program.row), matrix)
        for each, array, lines in zip(
            case.program.columns, outs, (gradients, queries), strict=False
        ):
            _compare(case, array[b, :, h], find(each).T, lines[b, :, h])


def _compare(case: Case, found: Any, weights: Any, lines: Any) -> None:
    # Of weights the parts are left out that are smaller than their rest is when it is rounded.
    step = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-20}[case.kind]
    part = step if case.kind == "F32" else step**2
    allowed = part * np.abs(weights).max() * np.abs(lines).max() + 1e-5
    wanted = weights @ lines
    rounding = 0 if case.kind == "F32" else step
    error = np.abs(found.astype(np.float64) - wanted)
    is_right = error <= 4 * allowed + rounding * np.abs(wanted)
    assert is_right.all(), f"{(~is_right).sum()} elements are wrong"


FORWARD, BACKWARD = make_forward(CAUSAL), make_backward(CAUSAL)
CASES = {
    "forward": Case(FORWARD, "BF16", 1, 2, 32, 48, 64),
    "backward": Case(BACKWARD, "BF16", 2, 1, 48, 32, 32),
    "float forward": Case(FORWARD, "F32", 1, 2, 32, 48, 32),
    "float backward": Case(BACKWARD, "F32", 1, 2, 32, 48, 32, 100),
    "half forward": Case(make_forward(LOADED), "F16", 2, 1, 16, 32, 80),
    "half backward": Case(make_backward(LOADED), "F16", 2, 2, 16, 48, 16),
    "many columns": Case(make_forward(SCALED), "F16", 1, 1, 16, 144, 16),
    "many columns backward": Case(make_backward(SCALED), "BF16", 1, 1, 16, 208, 16),
    "many rows": Case(BACKWARD, "BF16", 1, 1, 96, 16, 16),
    "long lines": Case(BACKWARD, "BF16", 1, 1, 16, 16, 128),
    "few blocks": Case(BACKWARD, "BF16", 1, 1, 64, 80, 16, H100),
    "few float blocks": Case(make_backward(LOADED), "F32", 1, 1, 64, 64, 16, H100),
    "no softmax": Case(NO_SOFTMAX, "F32", 2, 2, 16, 32, 48),
    "no row values": Case(
        Program(1, (), SCALED, (("tanh", SCALED), SCALED)), "BF16", 1, 1, 16, 16, 16
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_numpy(name: str) -> None:
    case = CASES[name]
    check(case, run(case, write_kernels(case)))


@pytest.mark.parametrize("name", ["backward", "float backward", "many columns"])
def test_copies_may_be_made_at_once(name: str) -> None:
    case = CASES[name]
    check(case, run(case, write_kernels(case), copies_at_once=True))


ROWS = Case(make_backward(BIASED), "BF16", 1, 2, 32, 144, 16)
MATRIX = Case(FORWARD, "F16", 1, 1, 16, 48, 16)
COLUMNS = Case(BACKWARD, "F16", 1, 2, 96, 32, 16)
SHARED = Case(make_backward(LOADED), "F32", 1, 1, 64, 32, 16, H100)
NUMBERS = "values[upper] = join(values[upper], "
FAULTS = {
    "warps join row values": (ROWS, f"{NUMBERS}from[sharer * 16]);", ";"),
    "threads join row values": (ROWS, f"{NUMBERS}shuffle_xor(values[upper], mask));", ";"),
    "all have row values": (
        ROWS,
        "    sync_block();\n    #pragma unroll\n",
        "    #pragma unroll\n",
    ),
    "row values have their own place": (ROWS, "scratch + 1 * STRIPS", "scratch + 0 * STRIPS"),
    "the last columns": (ROWS, "|| place(tile) < EVERY", "|| true"),
    "the strip of a warp": (ROWS, "own = strip * 16;", "own = 0;"),
    "the upper row": (ROWS, "+ own + upper * 8 + lane / 4;", "+ own + lane / 4;"),
    "parts of a result": (ROWS, "sharer < SHARERS; ++sharer) add", "sharer < 1; ++sharer) add"),
    "all have read lines": (ROWS, "    // All have read what was there.\n    sync_block();\n", ""),
    "rows that are kept": (ROWS, "group * ROW_VALUES + row_value", "group + row_value"),
    "the matrix is there": (MATRIX, "await_copies<0>();\n    sync_block();\n    Mixed", "Mixed"),
    "two tiles are one operand": (MATRIX, "each / 2 ? second : first", "second"),
    "the rest of weights": (MATRIX, "multiply(mixed[two * 2], rest, low, Half());", ""),
    "lines of a tile": (MATRIX, "low * 8 + line) * LINE", "high * 8 + line) * LINE"),
    "turned lines": (MATRIX, "load_turned(", "load_rows("),
    "the next rows' place": (COLUMNS, "const int place = turn % 2 * PLACE", "const int place = 0"),
    "all have read rows": (COLUMNS, "        sync_block();\n        if (turn", "        if (turn"),
    "rows are there": (COLUMNS, "        await_copies<0>();\n", ""),
    "row values of a block": (COLUMNS, "index / VALUES * ROWS + row", "index / VALUES * ROWS"),
    "the block's columns": (COLUMNS, "+ (long long)first * ", "+ 0 * "),
    "rows of a warp": (SHARED, "place += begin * LINE;", ""),
    "row values of a warp": (SHARED, "UNIT * LINE) + begin;", "UNIT * LINE);"),
    "weights of float32": (SHARED, "read_bits(weights[2])", "read_bits(weights[1])"),
    "lines of float32": (SHARED, "lane % 4 * 2 * LINE", "lane % 4 * LINE"),
    "parts of lines": (SHARED, "multiply_tile(sums, large, other_rest, float());", ""),
    "parts of weights": (SHARED, "multiply_tile(sums, rest, other_large, float());", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    case, right, wrong = FAULTS[fault]
    kernels = plant_fault(write_kernels(case), right, wrong)
    with np.errstate(all="ignore"), pytest.raises(AssertionError, match=r"Not equal|are wrong"):
        check(case, run(case, kernels))


@pytest.mark.parametrize("case", [ROWS, MATRIX, COLUMNS, SHARED], ids=lambda case: case.kind)
def test_what_faults_are_planted_in_is_right(case: Case) -> None:
    check(case, run(case, write_kernels(case)))


def test_work_is_cut_so_that_all_multiprocessors_have_some() -> None:
    large, small = (
        write_kernels(Case(BACKWARD, kind, *sizes, H100))
        for kind, sizes in (("BF16", (8, 12, 256, 256, 64)), ("F32", (4, 4, 64, 64, 32)))
    )
    shapes = [[(each.shape.grid[0], each.shape.block[0]) for each in two] for two in (large, small)]
    assert shapes == [[(768, 128), (384, 128)], [(64, 128), (64, 128)]]
    plain = write_kernels(Case(make_backward(SCALED), "BF16", 8, 12, 256, 256, 64, H100))
    assert [(each.shape.grid[0], each.shape.block[0]) for each in plain] == [(768, 256), (384, 128)]
    for kernel in (*large, *small, *plain):
        assert kernel.shape.shared_bytes <= 227 << 10
        assert kernel.early == ()
        begin = kernel.source.partition("KERNEL(THREADS,")[2]
        assert begin.index("wait();") < max(begin.find("ask_lines"), begin.find("attend<"))
    assert large == write_kernels(Case(BACKWARD, "BF16", 8, 12, 256, 256, 64, H100))


def test_elements_are_loaded_once_and_not_divided() -> None:
    rows, columns = write_kernels(CASES["half backward"])
    assert [rows.source.count(f"p{each}[") for each in (MASK, BIASES)] == [1, 1]
    # One is divided by a row value, for another and the weight; two weights have it in common.
    assert [each.source.count("= invert(") for each in (rows, columns)] == [2, 1]
    # More than there are sums cannot be kept.
    (score, share) = (build(each) for each in (LOADED, ("tanh", "sum0")))
    assert share_elements([score, share], 1, 0) == ([], [score, share])
    assert len(share_elements([score, share], 2, 0)[0]) == 2


PROBLEM = make_problem(MATRIX)
QUERY_LINES, KEY_LINES = PROBLEM.matmuls[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "S32"}, "lines are S32"),
        ({"kinds": (*PROBLEM.kinds, "S8", "F64")}, "arrays are F64, S8"),
        ({"rows": 24}, "24 rows are no multiple of 16"),
        ({"columns": 0}, "0 columns are no multiple of 16"),
        ({"width": 40}, "40 width are no multiple of 16"),
        ({"columns": 272}, "272 columns are more than 256"),
        ({"width": 144}, "lines of 144 elements are longer than 128"),
        ({"matmuls": ()}, "there are 0 matmuls"),
        ({"kind": "BF16"}, "lines of parameter 0 are F16, not BF16"),
    ],
)
def test_what_has_no_kernel_is_said(changed: dict[str, Any], said: str) -> None:
    assert find_tiled_problem(PROBLEM) == ""
    assert find_tiled_problem(dataclasses.replace(PROBLEM, **changed)) == said


@pytest.mark.parametrize(
    ("base", "stride", "is_fine"),
    [
        (0, 16, True),
        (0, 12, False),
        (4, 16, False),
        (("int_mul", "g0", 24), 16, True),
        (("int_mul", "g0", 12), 16, False),
        (("int_add", ("int_mul", ("int_mul", 2, "g0"), 4), 8), 16, True),
        (("int_add", ("int_mul", "g0", 8), "g1"), 16, False),
        (("int_mul", ("int", 3, "g0"), 8), 16, True),
        (("int_rem", ("int_mul", "g0", 8), 3), 16, False),
    ],
)
def test_lines_begin_at_vectors(base: Any, stride: int, *, is_fine: bool) -> None:
    lines = Lines(QUERIES, build(base), stride)
    said = "" if is_fine else "lines of parameter 0 begin at no multiple of 16 bytes"
    assert find_lines_problem(PROBLEM, lines) == said
    matmuls = ((QUERY_LINES, KEY_LINES), (lines, KEY_LINES))
    assert find_tiled_problem(dataclasses.replace(PROBLEM, matmuls=matmuls)) == said


def test_lines_that_shared_memory_has_no_place_for_are_refused() -> None:
    wide = make_problem(Case(FORWARD, "F32", 1, 1, 16, 256, 128))
    assert find_tiled_problem(wide) == "528 lines of 528 bytes are more than shared memory has"
    case = Case(BACKWARD, "F32", 1, 1, 16, 256, 96)
    problem = make_problem(case)
    assert find_tiled_problem(problem) == ""
    third = dataclasses.replace(KEY_LINES, parameter=GRADIENTS)
    output = ResultLines((0, 0, 96), "F32")
    with pytest.raises(ValueError, match="bytes are more than shared memory has"):
        write_rows(problem, build("sum0"), third, output, 1, keeps_rows=False)
