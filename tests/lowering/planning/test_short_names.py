"""Short names: as long as allowed, and as different as the names themselves."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from tracegraph.lowering.planning import short_names
from tracegraph.lowering.planning.memory_plan import Lifetime, plan_memory
from tracegraph.lowering.planning.short_names import shorten, shorten_names

PATHS = [
    f"state{moment}['params']['Block_{block}']['MultiHeadAttention_0']['query']['kernel']"
    for moment in ("[0]", "[1][0].mu", "[1][0].nu")
    for block in range(12)
]


@given(st.lists(st.text("ab.", max_size=16), max_size=30), st.integers(6, 12))
def test_different_names_stay_different(names: list[str], columns: int):
    short = shorten_names(names, columns)
    assert short.keys() == set(names)
    assert len(set(short.values())) == len(set(names))
    assert all(short[name] == name for name in names if len(name) <= columns)
    assert all(len(text.partition("#")[0]) <= columns for text in short.values())


def test_the_paths_of_a_model_show_where_they_differ():
    short = shorten_names(PATHS, 60)
    assert len(set(short.values())) == len(PATHS)
    assert not any("#" in text for text in short.values())
    assert all(len(text) <= 60 for text in short.values())


def test_names_that_differ_where_nothing_is_shown_are_numbered():
    names = [f"{'a' * 30}{letter}{'b' * 30}" for letter in "xyz"]
    short = shorten_names(names, 20)
    assert [short[name] for name in names] == [
        f"aaaaaa…{'b' * 13}{end}" for end in ("", "#2", "#3")
    ]


def test_a_plan_names_its_buffers_apart():
    plan = plan_memory("f", [Lifetime(path, 64, 0, 1) for path in PATHS])
    rows = [line.split()[0] for line in str(plan).splitlines()[2:-1]]
    assert len(set(rows)) == len(PATHS)


def test_a_text_keeps_its_beginning():
    assert [shorten("abcdef", columns) for columns in (6, 5)] == ["abcdef", "abcd…"]


def test_the_examples():
    assert doctest.testmod(short_names).failed == 0
