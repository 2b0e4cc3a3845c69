"""Trip counts of loops that XLA does not count: which iterations are certain, which may come."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.fakes.xla_programs import read_computation
from tracegraph.lowering.xla.trip_counts import MOST_TRIPS, TripCounts, find_trip_counts

AROUND, BODY, CONDITION, FUSED = 1, 2, 3, 4
# Numbers of the instructions that all computations of a loop have: its state, and what is in it.
STATE, COUNT, FIRST, DATA = 1, 2, 3, 4


def write(number: int, opcode: str, *operands: int, kind: str = "S32", more: str = "") -> str:
    ids = " ".join(f"operand_ids: {each}" for each in operands)
    shape = f"shape {{ element_type: {kind} }}"
    return (
        f'instructions {{ name: "i{number}" id: {number} opcode: "{opcode}" {shape} {ids} {more} }}'
    )


def constant(number: int, value: int, kind: str = "S32") -> str:
    field = {"S32": "s32s", "U32": "u32s", "S64": "s64s"}[kind]
    literal = f"literal {{ shape {{ element_type: {kind} }} {field}: {value} }}"
    return write(number, "constant", kind=kind, more=literal)


def compare(number: int, direction: str, *operands: int) -> str:
    more = f'comparison_direction: "{direction}"'
    return write(number, "compare", *operands, kind="PRED", more=more)


def element(number: int, index: int, kind: str = "S32") -> str:
    return write(number, "get-tuple-element", STATE, kind=kind, more=f"tuple_index: {index}")


STATE_ELEMENTS = [
    write(STATE, "parameter", kind="TUPLE"),
    element(COUNT, 0),
    element(FIRST, 1),
    element(DATA, 2, "F32"),
]
# The count starts at 0, and the stages at the first or the second.
START = [
    write(10, "parameter", kind="PRED"),
    constant(11, 0),
    constant(12, 1),
    write(13, "select", 10, 11, 12),
    write(14, "parameter", kind="F32", more="parameter_number: 1"),
    write(15, "tuple", 11, 13, 14, kind="TUPLE"),
]
STAGES = [
    *STATE_ELEMENTS,
    write(10, "add", COUNT, FIRST),
    constant(11, 7),
    compare(12, "LT", 10, 11),
    compare(13, "LT", COUNT, 11),
    write(14, "and", 12, 13, kind="PRED"),
]
NEXT = [
    *STATE_ELEMENTS,
    constant(10, 1),
    write(11, "add", COUNT, 10),
    write(12, "negate", DATA, kind="F32"),
    write(13, "tuple", 11, FIRST, 12, kind="TUPLE"),
]


def find(
    start: list[str] = START,
    body: list[str] = NEXT,
    condition: list[str] = STAGES,
    *,
    fused: list[str] | None = None,
) -> TripCounts:
    calls = f"called_computation_ids: {BODY} called_computation_ids: {CONDITION}"
    loop = write(100, "while", 15, kind="TUPLE", more=calls)
    texts = {AROUND: [*start, loop], BODY: body, CONDITION: condition, FUSED: fused or []}
    computations = {number: read_computation(" ".join(lines)) for number, lines in texts.items()}
    return find_trip_counts("i100", computations)


def fuse(number: int, *operands: int, kind: str = "S32") -> str:
    return write(number, "fusion", *operands, kind=kind, more=f"called_computation_ids: {FUSED}")


def replace(lines: list[str], **others: str) -> list[str]:
    """Returns the lines with others in the place of those of some numbers."""
    names = {f'name: "{name}"': text for name, text in others.items()}
    return [next((text for name, text in names.items() if name in line), line) for line in lines]


def start_after(opcode: str, count: int) -> list[str]:
    """Returns a start whose count is 0 after some operations with two operands, both the last."""
    numbers = range(20, 20 + count)
    lines = [constant(20, 0), *(write(each + 1, opcode, each, each) for each in numbers)]
    return replace(START, i11=" ".join([*lines, write(11, "copy", 20 + count)]))


def test_stages_from_the_first_or_the_second() -> None:
    assert find() == (6, 7)


def test_a_value_that_is_used_twice_is_looked_at_once() -> None:
    assert find(start=start_after("add", 50)) == (6, 7)


def test_one_start_has_one_count() -> None:
    assert find(replace(START, i13=write(13, "copy", 11))) == (7, 7)


def test_a_condition_in_a_fusion_is_read() -> None:
    fused = [
        write(1, "parameter", more="parameter_number: 1"),
        write(2, "parameter"),
        write(3, "add", 1, 2),
        constant(4, 7),
        compare(5, "LT", 3, 4),
    ]
    condition = [*STATE_ELEMENTS, fuse(10, COUNT, FIRST, kind="PRED")]
    assert find(condition=condition, fused=fused) == (6, 7)


def test_an_element_of_a_fusion_with_several_results() -> None:
    fused = [
        write(1, "parameter"),
        constant(2, 2),
        write(3, "add", 1, 2),
        write(4, "tuple", 1, 3, kind="TUPLE"),
    ]
    second = write(12, "get-tuple-element", 11, more="tuple_index: 1")
    last = write(13, "tuple", 12, FIRST, DATA, kind="TUPLE")
    body = [*STATE_ELEMENTS, fuse(11, COUNT, kind="TUPLE"), second, last]
    assert find(body=body, fused=fused) == (3, 4)


def test_what_only_data_tells_may_end_it_at_once() -> None:
    unknown = [
        *STATE_ELEMENTS,
        constant(11, 7),
        compare(12, "GT", DATA, DATA),
        compare(13, "LT", COUNT, 11),
        write(14, "and", 12, 13, kind="PRED"),
    ]
    assert find(condition=unknown) == (0, None)
    # One that data can only make longer is certain so far.
    longer = replace(unknown, i14=write(14, "or", 12, 13, kind="PRED"))
    assert find(condition=longer) == (7, None)


def test_a_loop_that_does_not_end_is_followed_for_a_while() -> None:
    assert find(condition=replace(STAGES, i11=constant(11, 1 << 30))) == (MOST_TRIPS, None)


def test_a_loop_that_never_runs() -> None:
    assert find(condition=replace(STAGES, i11=constant(11, 0))) == (0, 0)


UNKNOWN: Mapping[str, Mapping[str, Any]] = {
    "the count starts at an argument": {
        "start": replace(START, i11=write(11, "parameter", more="parameter_number: 2"))
    },
    "the body counts by data": {
        "body": replace(
            NEXT, i11=write(11, "add", COUNT, 10, more=""), i10=write(10, "convert", DATA)
        )
    },
    "an operation that is not followed": {
        "condition": replace(STAGES, i10=write(10, "divide", COUNT, FIRST))
    },
    "an effect comes last": {"body": [*NEXT, write(20, "custom-call", DATA, kind="F32")]},
    "an operand that is not there": {"start": replace(START, i11=write(11, "copy", 77))},
    "an operand that is itself": {"start": replace(START, i11=write(11, "copy", 11))},
    "a sum of one": {"start": replace(START, i11=write(11, "add", 12))},
    "an element of nothing": {
        "start": replace(START, i11=write(11, "get-tuple-element", more="tuple_index: 1"))
    },
    "an element behind the last": {"condition": replace(STAGES, i2=element(COUNT, 9))},
    "an element before the first": {"body": replace(NEXT, i2=element(COUNT, -1))},
    "a fusion of nothing": {"start": replace(START, i11=fuse(11, 12))},
    "its start is far from a constant": {"start": start_after("add", 500)},
    "an array": {
        "start": replace(
            START, i13=write(13, "select", 10, 11, 12).replace("S32 }", "S32 dimensions: 3 }")
        )
    },
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_loop_of_which_nothing_is_known(case: str) -> None:
    assert find(**UNKNOWN[case]) == (0, None)


@pytest.mark.parametrize(("opcode", "operands"), [("convert", (COUNT,)), ("add", (12, 12))])
def test_truth_values_are_not_computed_as_numbers(opcode: str, operands: tuple[int, ...]) -> None:
    condition = [
        *STATE_ELEMENTS,
        constant(11, 7),
        compare(12, "LT", COUNT, 11),
        write(13, opcode, *operands, kind="PRED"),
        write(14, "or", 12, 13, kind="PRED"),
    ]
    # As numbers of one bit, 8 is false, and twice true is false.
    assert find(condition=condition) == (7, None)


def test_what_is_no_loop_has_no_count() -> None:
    assert find_trip_counts("absent", {}) == (0, None)
    lines = " ".join(START)
    assert find_trip_counts("i13", {AROUND: read_computation(lines)}) == (0, None)


def test_integers_wrap_as_their_type_does() -> None:
    top = (1 << 31) - 3
    start = replace(START, i11=constant(11, top), i12=constant(12, top))
    positive = [*STATE_ELEMENTS, constant(10, 0), compare(11, "GE", COUNT, 10)]
    assert find(start, condition=positive) == (3, 3)


OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
DIRECTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def count_directly(count: int, first: int, update: str, by: int, ask: str, end: int) -> int:
    """Returns how often a loop of two 32-bit integers runs, as numpy computes it."""
    now, trips = np.array(count, np.int32), 0
    while trips < MOST_TRIPS and DIRECTIONS[ask](now + np.array(first, np.int32), np.int32(end)):
        now, trips = OPERATIONS[update](now, np.array(by, np.int32)), trips + 1
    return trips


@pytest.mark.filterwarnings("ignore:overflow")
def test_random_loops_run_as_often_as_in_numpy() -> None:
    rng, counted = random.Random(0), 0
    for _ in range(400):
        update, ask = rng.choice([*OPERATIONS]), rng.choice([*DIRECTIONS])
        zero, one, by, end = (rng.choice([-9, -1, 0, 1, 2, 3, 7, 20, 1 << 30]) for _ in range(4))
        start = replace(START, i11=constant(11, zero), i12=constant(12, one))
        body = [
            *STATE_ELEMENTS,
            constant(10, by),
            write(11, update, COUNT, 10),
            write(13, "tuple", 11, FIRST, DATA, kind="TUPLE"),
        ]
        condition = [
            *STATE_ELEMENTS,
            write(10, "add", COUNT, FIRST),
            constant(11, end),
            compare(12, ask, 10, 11),
        ]
        found = find(start, body, condition)
        trips = [count_directly(zero, first, update, by, ask, end) for first in (zero, one)]
        ends = max(trips) if max(trips) < MOST_TRIPS else None
        assert found == (min(trips), ends), (update, ask, zero, one, by, end)
        counted += 0 < found.least < MOST_TRIPS
    assert counted > 20
