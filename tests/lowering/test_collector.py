"""The collector is held off for a while, and as it was afterwards."""

from __future__ import annotations

import gc
import pathlib
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.stepping import step_through
from tracegraph.lowering import collector
from tracegraph.lowering.collector import collect_ahead, find_wait_seconds, hold_collector


@pytest.fixture(autouse=True)
def is_put_back() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled()


@hold_collector
def look() -> bool:
    return gc.isenabled()


def test_it_is_off_inside_and_on_afterwards():
    assert [look(), look()] == [False, False]


def test_it_stays_off_until_the_outer_one_ends():
    assert hold_collector(lambda: (look(), gc.isenabled()))() == (False, False)


def test_it_is_on_after_an_error():
    @hold_collector
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_one_that_is_off_stays_off():
    gc.disable()
    try:
        assert not look()
        assert not gc.isenabled()
    finally:
        gc.enable()


def count_left_off(function: Callable[[], object]) -> int:
    """Interrupts a function at each of its points; returns after how many the collector is off."""
    left_off = 0
    for _ in step_through(pathlib.Path(collector.__file__).parent, lambda: function):
        left_off += not gc.isenabled()
        gc.enable()
    return left_off


def test_an_interrupt_leaves_it_on():
    assert count_left_off(look) == 0


def test_one_that_an_interrupt_leaves_off_is_found():
    # Compiled as a part of the folder that is stepped through.
    body = "gc.disable()\n    try:\n        look()\n    finally:\n        gc.enable()"
    space = {"gc": gc, "look": look}
    exec(compile(f"def hold():\n    {body}", collector.__file__, "exec"), space)
    assert count_left_off(space["hold"]) > 0


class Cycle:
    """An object that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def has_gone() -> bool:
    """True where looking ahead finds a dead object of the oldest generation."""
    cycle = Cycle()
    gc.collect()
    found = weakref.ref(cycle)
    del cycle
    collect_ahead()
    return found() is None


def test_what_is_old_and_dead_is_found_ahead(monkeypatch: pytest.MonkeyPatch):
    # A process that has run thousands of tests may have more.
    monkeypatch.setattr(collector, "MAX_BLOCKS", sys.maxsize)
    assert has_gone()


def test_nothing_is_looked_at_ahead_where_that_takes_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collector, "MAX_BLOCKS", 0)
    assert not has_gone()


def test_a_look_waits_longer_where_there_is_more_to_look_at():
    before = find_wait_seconds()
    more = [[] for _ in range(100_000)]
    assert find_wait_seconds() > before > 0
    del more


def test_nothing_is_looked_at_ahead_by_a_collector_that_is_off():
    gc.disable()
    try:
        assert not has_gone()
    finally:
        gc.enable()
