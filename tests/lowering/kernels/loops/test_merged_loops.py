"""The source of merged kernels: what it computes, compiled for this machine."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.kernels_on_host import run_on_host
from tracegraph.lowering.element_loops import ElementOperand, LoopFunction, LoopOp
from tracegraph.lowering.kernels.loops.merged_loops import LoopArguments, write_merged_loops

DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "S32": np.int32,
    "PRED": np.bool_,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
}
F32 = ElementOperand("F32", is_single=False)
VALUES = np.array([-2.5, -0.75, 0.0, 0.3, 1.0, 7.25, np.inf, np.nan], np.float32)
OTHERS = np.array([0.5, -3.0, 2.0, 0.3, -4.0, 3.0, 1.0, 1.0], np.float32)


def apply(function: LoopFunction, *arrays: Any) -> list[Any]:
    """Runs one loop of a function; returns its results."""
    kinds = [operand.kind for operand in function.operands]
    kinds += [function.find_kind(result) for result in function.results]
    count = max(array.size for array in arrays)
    given = [np.array(array, DTYPES[kind]) for array, kind in zip(arrays, kinds, strict=False)]
    results = [np.zeros(count, DTYPES[kind]) for kind in kinds[len(given) :]]
    numbers = range(len(kinds))
    loop = LoopArguments(count, tuple(numbers[: len(given)]), tuple(numbers[len(given) :]))
    source = write_merged_loops(function, [loop], kinds, waits=True)
    run_on_host(source, 1, [*given, *results])
    return results


def make(opcode: str, operands: int, kind: str = "F32", detail: str = "") -> LoopFunction:
    op = LoopOp(opcode, kind, tuple(range(operands)), detail)
    return LoopFunction((F32,) * operands, (op,), (operands,))


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("add", VALUES + OTHERS),
        ("subtract", VALUES - OTHERS),
        ("multiply", VALUES * OTHERS),
        ("divide", VALUES / OTHERS),
        ("maximum", np.maximum(VALUES, OTHERS)),
        ("minimum", np.minimum(VALUES, OTHERS)),
        ("power", np.power(np.abs(VALUES), OTHERS)),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ops_of_two_operands(opcode: str, expected: Any) -> None:
    first = np.abs(VALUES) if opcode == "power" else VALUES
    (result,) = apply(make(opcode, 2), first, OTHERS)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("negate", -VALUES),
        ("abs", np.abs(VALUES)),
        ("sqrt", np.sqrt(np.abs(VALUES))),
        ("rsqrt", 1 / np.sqrt(np.abs(VALUES) + 1)),
        ("exponential", np.exp(VALUES)),
        ("log", np.log(np.abs(VALUES) + 1)),
    ],
)
def test_ops_of_one_operand(opcode: str, expected: Any) -> None:
    given = {"sqrt": np.abs(VALUES), "rsqrt": np.abs(VALUES) + 1, "log": np.abs(VALUES) + 1}
    (result,) = apply(make(opcode, 1), given.get(opcode, VALUES))
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("direction", "compare"),
    [
        ("EQ", np.equal),
        ("NE", np.not_equal),
        ("LT", np.less),
        ("LE", np.less_equal),
        ("GT", np.greater),
        ("GE", np.greater_equal),
    ],
)
def test_comparisons_choices_and_logic(direction: str, compare: Any) -> None:
    ops = (
        LoopOp("compare", "PRED", (0, 1), direction),
        LoopOp("not", "PRED", (2,)),
        LoopOp("select", "F32", (2, 0, 1)),
        LoopOp("and", "PRED", (2, 3)),
        LoopOp("or", "PRED", (2, 3)),
    )
    results = apply(LoopFunction((F32, F32), ops, (2, 3, 4, 5, 6)), VALUES, OTHERS)
    truth = compare(VALUES, OTHERS)
    wanted = [truth, ~truth, np.where(truth, VALUES, OTHERS), truth & ~truth, truth | ~truth]
    for got, right in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_sixteen_bits_are_converted_and_rounded_once(kind: str) -> None:
    given = np.linspace(-3, 3, 101).astype(DTYPES[kind])
    narrow = ElementOperand(kind, is_single=False)
    ops = (
        LoopOp("convert", "F32", (0,)),
        LoopOp("constant", "F32", (), np.float32(1.7).tobytes()[::-1].hex()),
        LoopOp("multiply", "F32", (1, 2)),
        LoopOp("convert", kind, (3,)),
    )
    results = apply(LoopFunction((narrow,), ops, (1, 4)), given)
    wide = given.astype(np.float32)
    np.testing.assert_array_equal(results[0], wide)
    np.testing.assert_array_equal(results[1], (wide * np.float32(1.7)).astype(DTYPES[kind]))


def test_constants_and_integers() -> None:
    ops = (
        LoopOp("constant", "S32", (), np.int32(-7).tobytes()[::-1].hex()),
        LoopOp("constant", "PRED", (), "01"),
        LoopOp("constant", "BF16", (), "3fc0"),
        LoopOp("convert", "F32", (1,)),
        LoopOp("select", "F32", (2, 4, 0)),
    )
    results = apply(LoopFunction((F32,), ops, (1, 3, 5)), np.ones(3, np.float32))
    assert [list(map(float, each)) for each in results] == [[-7.0] * 3, [1.5] * 3, [-7.0] * 3]


def test_each_loop_has_its_own_arrays_and_size() -> None:
    rate = ElementOperand("F32", is_single=True)
    function = LoopFunction(
        (F32, F32, rate),
        (LoopOp("multiply", "F32", (1, 2)), LoopOp("subtract", "F32", (0, 3))),
        (4,),
    )
    sizes = [5, 1, 300]
    states = [np.arange(size, dtype=np.float32) for size in sizes]
    steps = [np.full(size, 2.0, np.float32) for size in sizes]
    rates = np.array([0.25], np.float32)
    # The state is updated in its place: operand and result are one parameter.
    loops = [LoopArguments(size, (2 * i, 2 * i + 1, 6), (2 * i,)) for i, size in enumerate(sizes)]
    source = write_merged_loops(function, loops, ["F32"] * 7, waits=False)
    pairs = [array for pair in zip(states, steps, strict=True) for array in pair]
    run_on_host(source, 3, [*pairs, rates])
    for state, size in zip(states, sizes, strict=True):
        np.testing.assert_array_equal(state, np.arange(size) - 0.5)


def test_a_kernel_waits_where_it_is_asked_to_before_all_else() -> None:
    loops = [LoopArguments(3, (0, 1), (2,))]
    body = re.compile(r"KERNEL\(256\) merged_loops\([^)]*\) \{\n(.*)\n")
    for waits in (True, False):
        source = write_merged_loops(make("add", 2), loops, ["F32"] * 3, waits=waits)
        found = body.search(source)
        assert found is not None
        assert found[1].strip() == ("wait();" if waits else "int count = 0;")


def test_a_planted_fault_is_found() -> None:
    (right,) = apply(make("add", 2), VALUES[:3], OTHERS[:3])
    (wrong,) = apply(make("subtract", 2), VALUES[:3], OTHERS[:3])
    assert not np.array_equal(right, wrong)
