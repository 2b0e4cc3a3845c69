"""Kernels that exchange arrays, run on the host by all GPUs at once, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array
from tests.fakes.ranks_on_host import Edit, RanksOnHost
from tracegraph.lowering.kernels import collectives
from tracegraph.runtime.definition.collective_nodes import CollectiveKind, Exchange

KIND = CollectiveKind
DTYPES = {
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "S32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "S64": np.dtype(np.int64),
}
JOINS: dict[str, Any] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.fmin,
    "MAX": np.fmax,
}


def draw(members: int, count: int, dtype: np.dtype[Any], seed: int) -> list[np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(seed).normal(size=(members, count)) * 8
    values = np.abs(drawn) if dtype.kind == "u" else drawn
    return [align_array(each.astype(dtype)) for each in values]


def join(arrays: list[np.ndarray[Any, Any]], reduction: str) -> np.ndarray[Any, Any]:
    """Returns all of them joined in order; narrow floats are rounded once."""
    dtype = arrays[0].dtype
    is_narrow = dtype.itemsize == 2 and dtype.kind != "i"
    wide = [each.astype(np.float32) if is_narrow else each for each in arrays]
    return functools.reduce(JOINS[reduction], wide).astype(dtype)


def add_all(
    ranks: RanksOnHost,
    exchange: Exchange,
    seed: int,
    *,
    in_place: bool = True,
    edit: Edit | None = None,
) -> bool:
    """Runs a sum; True if every GPU has what NumPy has."""
    members = len(ranks.signals)
    arrays = draw(members, exchange.count, DTYPES[exchange.dtype], seed)
    wanted = join(arrays, exchange.reduction)
    targets = arrays if in_place else [align_array(np.zeros_like(wanted)) for _ in arrays]
    ranks.run(exchange, arrays, targets, edit)
    return all(np.array_equal(each, wanted) for each in targets)


def make_sum(members: int, count: int, dtype: str = "F32", reduction: str = "SUM") -> Exchange:
    return Exchange(KIND.ALL_REDUCE, dtype, count, (tuple(range(members)),), reduction)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("small", [True, False], ids=["one shot", "two shots"])
@pytest.mark.parametrize("in_place", [True, False])
def test_sums_of_all_sizes(
    members: int, small: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(collectives, "is_one_shot", lambda _: False)
    ranks = RanksOnHost(members)
    # The third launch goes to the places of the first.
    for seed, count in enumerate((1, 3, 64, 203)):
        assert add_all(ranks, make_sum(members, count), seed, in_place=in_place)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("reduction", list(JOINS))
def test_sums_of_all_types(dtype: str, reduction: str) -> None:
    assert add_all(RanksOnHost(2), make_sum(2, 77, dtype, reduction), 3)


def test_a_nan_loses_against_a_number_as_in_nccl() -> None:
    arrays = [align_array(np.array(each, np.float32)) for each in ([np.nan, 1], [2, np.nan])]
    RanksOnHost(2).run(make_sum(2, 2, "F32", "MAX"), arrays, arrays)
    np.testing.assert_array_equal(arrays[0], [2, 1])
    np.testing.assert_array_equal(arrays[1], [2, 1])


@pytest.mark.parametrize("small", [True, False], ids=["one shot", "two shots"])
def test_arrays_at_odd_places(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(collectives, "is_one_shot", lambda _: False)
    arrays = [each[1:] for each in draw(2, 70, DTYPES["F32"], 0)]
    wanted = arrays[0] + arrays[1]
    RanksOnHost(2).run(make_sum(2, 69), arrays, arrays)
    np.testing.assert_array_equal(arrays[0], wanted)
    np.testing.assert_array_equal(arrays[1], wanted)


@pytest.mark.parametrize("count", [48, 51])
@pytest.mark.parametrize("members", [2, 3])
def test_what_is_moved(members: int, count: int) -> None:
    group = (tuple(range(members)),)
    ranks = RanksOnHost(members)
    arrays = draw(members, count, DTYPES["U8"], 1)
    whole = [align_array(np.zeros(count * members, np.uint8)) for _ in arrays]
    ranks.run(Exchange(KIND.ALL_GATHER, "U8", count, group), arrays, whole)
    for each in whole:
        np.testing.assert_array_equal(each, np.concatenate(arrays))
    parts = draw(members, count * members, DTYPES["U8"], 2)
    turned = [align_array(np.zeros_like(each)) for each in parts]
    ranks.run(Exchange(KIND.ALL_TO_ALL, "U8", count * members, group), parts, turned)
    for number, each in enumerate(turned):
        wanted = [part[number * count : (number + 1) * count] for part in parts]
        np.testing.assert_array_equal(each, np.concatenate(wanted))
    # The last one gets nothing.
    pairs = tuple((number, number - 1) for number in range(1, members))
    moved = [align_array(np.full(count, 7, np.uint8)) for _ in arrays]
    ranks.run(Exchange(KIND.PERMUTE, "U8", count, group, pairs=pairs), arrays, moved)
    for number, each in enumerate(moved):
        wanted = arrays[number + 1] if number + 1 < members else np.zeros(count, np.uint8)
        np.testing.assert_array_equal(each, wanted)


@pytest.mark.parametrize("count", [24, 35])
def test_parts_of_a_sum(count: int) -> None:
    arrays = draw(2, count * 2, DTYPES["F32"], 4)
    targets = [align_array(np.zeros(count, np.float32)) for _ in arrays]
    exchange = Exchange(KIND.REDUCE_SCATTER, "F32", count * 2, ((0, 1),), "SUM")
    RanksOnHost(2).run(exchange, arrays, targets)
    np.testing.assert_array_equal(np.concatenate(targets), arrays[0] + arrays[1])


MEETING = "generation = meet(table, generation);"


def drop_first(source: str) -> str:
    head, found, rest = source.rpartition(MEETING)
    while MEETING in head:
        last, _, more = head.rpartition(MEETING)
        head, rest = last, f"{more}{found}{rest}"
    return head + rest


def drop_last(source: str) -> str:
    return "".join(source.rpartition(MEETING)[::2])


def drop_middle(source: str) -> str:
    parts = source.split(MEETING)
    return MEETING.join([parts[0], parts[1] + parts[2], *parts[3:]])


def use_one_place(source: str) -> str:
    return source.replace("(generation & 1) *", "0 *")


def add_in_turn(exchange: Exchange, launches: int, edit: Edit | None = None) -> bool:
    """Runs sums one after another without a wait between; True if all are right."""
    members = len(exchange.groups[0])
    rounds = [draw(members, exchange.count, DTYPES["F32"], seed) for seed in range(launches)]
    wanted = [join(arrays, "SUM") for arrays in rounds]
    RanksOnHost(members).run_all(exchange, rounds, rounds, edit)
    pairs = zip(rounds, wanted, strict=True)
    return all(np.array_equal(each, right) for arrays, right in pairs for each in arrays)


@pytest.mark.parametrize("small", [True, False], ids=["one shot", "two shots"])
def test_launches_overtake_each_other(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(collectives, "is_one_shot", lambda _: False)
    assert add_in_turn(make_sum(3, 203), 6)


@pytest.mark.parametrize(
    ("edit", "small"),
    [(drop_first, True), (use_one_place, True), (drop_middle, False)],
)
def test_a_missing_meeting_shows(edit: Edit, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(collectives, "is_one_shot", lambda _: False)
    assert not add_in_turn(make_sum(2, 203), 12, edit)


def clear_source(source: str) -> str:
    """What the next node of a graph may do; each block clears what it has read."""
    clearing = "FOR_OWN(i, 0, table.count / 16) store_vector((char *)source + 16 * i, {});"
    return source.replace("    leave(", f"    {clearing}\n    leave(")


def drop_last_and_clear(source: str) -> str:
    return clear_source(drop_last(source))


@pytest.mark.parametrize(("edit", "is_right"), [(clear_source, True), (drop_last_and_clear, False)])
def test_no_array_changes_while_others_read_it(edit: Edit, is_right: bool) -> None:
    exchange = Exchange(KIND.ALL_GATHER, "U8", 48, ((0, 1),))
    rounds = [draw(2, 48, DTYPES["U8"], seed) for seed in range(12)]
    wanted = [np.concatenate(arrays) for arrays in rounds]
    targets = [draw(2, 96, DTYPES["U8"], seed) for seed in range(12)]
    RanksOnHost(2).run_all(exchange, rounds, targets, edit)
    pairs = zip(targets, wanted, strict=True)
    assert is_right == all(
        np.array_equal(each, right) for arrays, right in pairs for each in arrays
    )
