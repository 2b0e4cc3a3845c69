"""PlanCache: the least recently used plan goes first, and no plan of a graph is freed."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable

import pytest

from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.plan_cache import DEFAULT_MAX_SIZE, PlanCache, find_fft_plans


class Plan:
    """A plan with a number."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


class Plans:
    """A cache, and which plans it has freed."""

    def __init__(self, max_size: int = DEFAULT_MAX_SIZE) -> None:
        self.cache: PlanCache[Plan] = PlanCache(max_size)
        self.freed: list[int] = []

    def find(self, key: str) -> Plan:
        return self.cache.find(key, Plan, self._schedule)

    def _schedule(self, plan: Plan) -> Callable[[], None]:
        freed, number = self.freed, plan.number
        return lambda: freed.append(number)


def test_a_plan_is_made_once() -> None:
    plans = Plans()
    assert plans.find("a") is plans.find("a")
    assert plans.cache.size == 1
    assert plans.cache.max_size == DEFAULT_MAX_SIZE == 4096


def test_the_least_recently_used_plan_goes_first() -> None:
    plans = Plans(2)
    first, second = plans.find("a").number, plans.find("b").number
    assert plans.find("a").number == first
    plans.find("c")
    assert plans.cache.keys == ("a", "c")
    plans.find("c")
    assert plans.freed == [second]


def test_a_plan_of_a_graph_is_taken_out_and_not_freed() -> None:
    plans = Plans(1)
    held = plans.find("a")
    plans.find("b")
    plans.cache.clear()
    assert plans.cache.size == 0
    assert held.number not in plans.freed
    number = held.number
    del held
    plans.cache.clear()
    assert number in plans.freed


def test_clear_frees_at_once_what_no_graph_holds() -> None:
    plans = Plans()
    numbers = [plans.find(key).number for key in "abc"]
    plans.cache.clear()
    assert (plans.cache.size, plans.freed) == (0, numbers)
    assert plans.find("a").number not in numbers


def test_a_smaller_cache_drops_the_oldest_at_once() -> None:
    plans = Plans()
    numbers = [plans.find(key).number for key in "abcd"]
    plans.cache.max_size = 1
    assert plans.cache.keys == ("d",)
    assert plans.freed == numbers[:3]
    plans.cache.max_size = 3
    plans.find("a")
    assert plans.cache.keys == ("d", "a")


def test_a_cache_of_no_plans_keeps_none() -> None:
    plans = Plans(0)
    held = plans.find("a")
    assert plans.find("a") is not held
    assert plans.cache.size == 0
    assert held.number not in plans.freed


def test_a_plan_is_not_freed_by_a_finaliser() -> None:
    # It may run where a stream is being captured: Note [Plans].
    plans = Plans(0)
    held = [plans.find("a")]
    held.append(held)  # type: ignore[arg-type]
    del held
    gc.collect()
    assert plans.freed == []
    plans.cache.clear()
    assert len(plans.freed) == 1


def test_a_plan_that_cannot_be_made_leaves_nothing() -> None:
    plans = Plans()

    def fail() -> Plan:
        raise MemoryError

    with pytest.raises(MemoryError):
        plans.cache.find("a", fail, plans._schedule)
    assert plans.cache.size == 0
    assert plans.find("a") is plans.find("a")


@pytest.mark.parametrize("value", [-1, 1.0, None, True, "8"])
def test_max_size_is_a_count(value: object) -> None:
    plans = Plans()
    with pytest.raises(ConfigError, match="`max_size` of a plan cache is"):
        plans.cache.max_size = value  # type: ignore[assignment]
    assert plans.cache.max_size == DEFAULT_MAX_SIZE


def test_threads_share_a_cache() -> None:
    plans = Plans(3)
    found: list[Plan] = []

    def use() -> None:
        found.extend(plans.find(key) for key in "abcdeabcde" * 20)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plans.cache.size == 3
    found.clear()
    plans.cache.clear()
    assert len(plans.freed) == len(set(plans.freed))


def test_each_device_has_a_cache() -> None:
    assert find_fft_plans("cuda:60") is find_fft_plans("cuda:60")
    assert find_fft_plans("cuda:60") is not find_fft_plans("cuda:61")
