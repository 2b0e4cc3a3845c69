"""Indices: what is simplified has the values of what it stands for."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tracegraph.replacements.indices import (
    Index,
    Quotient,
    Remainder,
    Scalar,
    Variable,
    flatten_index,
    list_quotients,
    list_variables,
    make_scalar,
    make_variable,
    unflatten_index,
)

SIZES = {"a": 4, "b": 6, "c": 5}


def evaluate(index: Index, values: dict[str, int]) -> int:
    total = index.constant
    for atom, factor in index.terms:
        if isinstance(atom, Variable):
            value = values[atom.name]
        elif isinstance(atom, Scalar):
            value = values[f"#{atom.number}"]
        else:
            inner = evaluate(atom.index, values)
            assert inner >= 0
            value = inner // atom.divisor if isinstance(atom, Quotient) else inner % atom.divisor
        total += factor * value
    return total


def list_values() -> list[dict[str, int]]:
    places = itertools.product(*map(range, SIZES.values()))
    return [dict(zip(SIZES, place, strict=True)) for place in places]


@pytest.mark.parametrize("seed", range(20))
def test_reshapes_one_after_another_name_the_same_element(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(4, 6, 5), (24, 5), (2, 2, 3, 10), (120,), (4, 2, 15), (8, 1, 15), (60, 2), (3, 40)]
    index = tuple(make_variable(name, size) for name, size in SIZES.items())
    shape: tuple[int, ...] = (4, 6, 5)
    for wanted in rng.choices(shapes, k=5):
        index = unflatten_index(flatten_index(index, shape), wanted)
        shape = wanted
        for values in rng.choices(list_values(), k=20):
            place = [evaluate(each, values) for each in index]
            assert all(0 <= one < size for one, size in zip(place, shape, strict=True))
            flat = np.ravel_multi_index(place, shape)
            assert flat == values["a"] * 30 + values["b"] * 5 + values["c"]
    # All the way back nothing is left of it.
    back = unflatten_index(flatten_index(index, shape), (4, 6, 5))
    assert flatten_index(back, (4, 6, 5)).low == 0


def test_bounds_hold_for_all_values() -> None:
    a, b, c = (make_variable(name, size) for name, size in SIZES.items())
    index = a.times(7).add(b.times(-3)).add(c).add(40)
    quotient, remainder = index.divide(6)
    for each in (index, quotient, remainder):
        found = [evaluate(each, values) for values in list_values()]
        assert each.low <= min(found)
        assert each.high >= max(found)
    for values in list_values():
        whole = evaluate(index, values)
        parts = evaluate(quotient, values), evaluate(remainder, values)
        assert parts == divmod(whole, 6)


def test_what_makes_no_difference_is_left_out() -> None:
    head, group, element = (make_variable(n, s) for n, s in (("h", 4), ("g", 2), ("d", 16)))
    flat = group.times(4).add(head).times(16).add(element)
    assert unflatten_index(flat, (2, 4, 16)) == (group, head, element)
    assert flat.divide(64) == (group, head.times(16).add(element))
    # 4 heads for each of 2 groups: the quotient is that of the head alone.
    quotient, rest = make_variable("x", 8).times(16).add(element).divide(64)
    assert list_quotients(quotient) == {("x", 4)}
    assert rest.find_factor("d") == 1
    assert rest.find_factor("x") is None
    assert make_variable("one", 1) == Index()
    assert make_scalar(3, 5, 5) == Index(constant=5)
    assert list_variables(make_scalar(3, 0, 5).add(rest)) == {"#3", "x", "d"}


def test_a_factor_is_that_of_the_whole_index() -> None:
    t, d = make_variable("t", 9), make_variable("d", 8)
    index = t.times(32).add(d).add(5)
    assert (index.find_factor("t"), index.find_factor("d"), index.find_factor("g")) == (32, 1, 0)
    assert index.drop("t").drop("d") == Index(constant=5)
    assert index.add(index.times(-1)) == Index()
    assert Index(frozenset([(Remainder(t, 3), 1)])).find_factor("t") is None
