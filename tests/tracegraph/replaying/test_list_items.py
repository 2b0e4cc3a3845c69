"""ListItems: lists are the same while they hold the same objects, wherever in memory these are."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tracegraph.replaying import list_items
from tracegraph.replaying.list_items import CAN_READ_LISTS, ListItems, can_read_lists

needs_lists = pytest.mark.skipif(not CAN_READ_LISTS, reason="this Python has other lists")


class Leaf:
    def __eq__(self, other: object) -> bool:
        raise AssertionError("identities are compared, not values")

    __hash__ = object.__hash__


def make(count: int) -> list[Any]:
    return [Leaf() for _ in range(count)]


def test_this_pythons_lists_can_be_read():
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert can_read_lists() == has_lock


def test_lists_that_are_laid_out_otherwise_are_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(list_items, "_LENGTH_OFFSET", list_items._LENGTH_OFFSET - 8)
    monkeypatch.setattr(list_items, "find_view", lambda _: pytest.fail("items are looked at"))
    assert not can_read_lists()


@needs_lists
@pytest.mark.parametrize(
    "change",
    [
        lambda one, _: one.append(Leaf()),
        lambda one, _: one.pop(),
        lambda one, _: one.clear(),
        lambda one, _: one.reverse(),
        lambda one, _: one.insert(0, one.pop()),
        lambda one, _: one.__setitem__(2, Leaf()),
        lambda one, _: one.__setitem__(slice(1, 3), []),
        lambda one, _: one.extend(make(1000)),
        lambda one, other: other.insert(0, one.pop()),
        lambda _, other: other.append(None),
        lambda one, other: one.__setitem__(0, other),
        # As many items, in another place, with the other list's items.
        lambda one, other: (one.extend(other[:1]), other.pop(0), other.append(one.pop(0))),
    ],
)
@pytest.mark.parametrize("count", [3, 5000])
def test_a_change_of_a_list_is_seen(change: Callable[[Any, Any], Any], count: int):
    one, other = make(count), make(count)
    items = ListItems([one, other, []])
    assert items.are_same()
    change(one, other)
    assert not items.are_same()
    assert not items.are_same()


@needs_lists
def test_an_empty_list_that_gets_an_item():
    lists: list[list[Any]] = [[], make(1), []]
    items = ListItems(lists)
    assert items.are_same()
    lists[2].append(Leaf())
    assert not items.are_same()
    lists[2].clear()
    assert items.are_same()


@needs_lists
@pytest.mark.parametrize("count", [0, 1, 100, 20_000])
def test_the_same_items_elsewhere_in_memory_are_the_same(count: int):
    one = make(count)
    items, held, before = ListItems([one]), list(one), list_items.read_word(id(one) + 24)
    one.extend(make(100_000))
    assert not items.are_same()
    del one[count:]
    one[:] = held
    one *= 1
    assert items.are_same()
    one.extend(one[:0] or [None])
    assert not items.are_same()
    one.pop()
    assert items.are_same()
    assert count == 0 or list_items.read_word(id(one) + 24) != before


@needs_lists
def test_what_is_elsewhere_is_looked_for_once(monkeypatch: pytest.MonkeyPatch):
    one = make(100)
    items = ListItems([one])
    looks: list[int] = []
    look = ListItems._look
    monkeypatch.setattr(ListItems, "_look", lambda self: (looks.append(1), look(self)))
    one.extend(make(10_000))
    del one[100:]
    assert [items.are_same() for _ in range(3)] == [True] * 3
    assert len(looks) == 1


@needs_lists
def test_items_that_were_replaced_live_on():
    # Else an identity could become that of another object.
    one = make(3)
    first = weakref.ref(one[0])
    items = ListItems([one])
    one[0] = None
    gc.collect()
    assert first() is not None
    assert not items.are_same()
    del items
    assert first() is None


@needs_lists
def test_another_thread_changes_the_list_all_the_time():
    one = make(300)
    held = list(one)
    items = ListItems([one])
    stop = threading.Event()

    def change() -> None:
        generator = random.Random(0)
        while not stop.is_set():
            # An array of this size is unmapped when the list frees it.
            one.extend([None] * generator.randrange(200_000))
            one[:] = held[: generator.randrange(300)]
        one[:] = held

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        answers = [items.are_same() for _ in range(20_000)]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not all(answers)
    assert items.are_same()
