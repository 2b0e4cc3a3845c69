"""Matches are measured in a thread, beside the candidate that is lowered with all of them."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from tracegraph.capturing.measured_matches import NO_MEMORY, MeasuredMatches, measure_beside
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.errors import UnsupportedError

LIMIT_S = 60.0
NOTHING = MeasuredMatches({}, [])
NO_ROOM = MeasuredMatches({}, [Replacement("rule", (), ("here",), NO_MEMORY)])


class Steps:
    """Gives one of some values at each call, or raises it."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def __call__(self) -> Any:
        value = self.values.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


def test_both_run_at_once_and_the_candidate_is_made_once() -> None:
    begun, measured = threading.Event(), threading.Event()
    make = Steps("candidate")

    def measure() -> MeasuredMatches:
        assert begun.wait(LIMIT_S)
        measured.set()
        return NOTHING

    def make_candidate() -> Any:
        begun.set()
        assert measured.wait(LIMIT_S)
        return make()

    found, give = measure_beside(measure, make_candidate)
    assert found is NOTHING
    assert (give(), make.values) == ("candidate", [])


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        UnsupportedError("a kernel", where="here", why="it is new", fix="update", anchor="new"),
    ],
)
def test_a_candidate_that_fails_is_made_again_alone(error: Exception) -> None:
    found, give = measure_beside(Steps(NOTHING), Steps(error, "candidate"))
    assert (found, give()) == (NOTHING, "candidate")
    _, give = measure_beside(Steps(NOTHING), Steps(error, error))
    with pytest.raises(type(error)):
        give()


def test_what_found_no_memory_is_measured_again_alone() -> None:
    makes = Steps("candidate")
    found, _ = measure_beside(Steps(NO_ROOM, NOTHING), makes)
    assert found is NOTHING
    found, _ = measure_beside(Steps(NO_ROOM, NO_ROOM), Steps("candidate"))
    assert found is NO_ROOM


def test_what_the_thread_raises_is_raised_behind_the_candidate() -> None:
    makes = Steps("candidate")
    with pytest.raises(ZeroDivisionError):
        measure_beside(Steps(ZeroDivisionError()), makes)
    assert makes.values == []


def test_the_thread_has_the_settings_of_the_call() -> None:
    seen: list[bool] = []

    def measure() -> MeasuredMatches:
        seen.append(bool(jax.config.read("jax_enable_x64")))
        return NOTHING

    with jax.enable_x64(not jax.config.read("jax_enable_x64")):
        measure_beside(measure, Steps("candidate"))
    assert seen == [not jax.config.read("jax_enable_x64")]
