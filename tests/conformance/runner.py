"""Runs cases through `jax.jit` and through capture with two replays, and classes what comes out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

import tracegraph as tg
from tests.conformance import compare, harnesses
from tests.conformance.results import Outcome, Result
from tracegraph.runtime.errors import CaptureError, UnsupportedError

MakeCallable = Callable[[Callable[..., Any]], Callable[..., Any]]
# The CPU compiler maps memory for every program that it keeps; the kernel limits the maps.
CASES_PER_CACHE = 100


def capture_unverified(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the captured function; the comparison here takes the place of ``verify``."""
    return tg.capture(function, verify=False)


def jit_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under a `jax.jit` that shares no compiled program with the first."""
    return jax.jit(lambda *arguments: function(*arguments))


def run_cases(
    cases: Iterable[harnesses.Case], make_callable: MakeCallable = capture_unverified
) -> Iterator[Result]:
    """Yields one result per case, in order.

    Args:
        cases: what to run.
        make_callable: what is held against `jax.jit`: turns a function into its captured form.
    """
    for index, case in enumerate(cases):
        if index % CASES_PER_CACHE == CASES_PER_CACHE - 1:
            jax.clear_caches()
        yield run_case(case, make_callable)


def run_case(case: harnesses.Case, make_callable: MakeCallable = capture_unverified) -> Result:
    """Runs one case: the capturing call, a replay of the same input, a replay of another one.

    The three results are kept and compared at the end, so a result that a later replay overwrote
    differs as well.

    Args:
        case: what to run.
        make_callable: turns the case's function into what is held against `jax.jit`.

    Returns:
        The outcome with its reason.
    """
    with warnings.catch_warnings():
        # Harnesses use deprecated dtypes and casts on purpose.
        warnings.simplefilter("ignore")
        return _run_quietly(case, make_callable)


def _run_quietly(case: harnesses.Case, make_callable: MakeCallable) -> Result:
    first, second, has_two_inputs = harnesses.make_two_inputs(case)

    def finish(outcome: Outcome, rule: str = "", reason: str = "") -> Result:
        return Result(case.group, case.name, outcome, rule, reason, has_two_inputs)

    try:
        jitted = jax.jit(case.function)
        expected = [jax.block_until_ready(jitted(*inputs)) for inputs in (first, second)]
    except Exception as error:  # noqa: BLE001 - whatever jit raises is the outcome
        return finish(Outcome.JIT_FAILS, reason=_first_line(error))
    try:
        captured = make_callable(case.function)
        actual = [captured(*inputs) for inputs in (first, first, second)]
        jax.block_until_ready(actual)
        difference = _find_worst((expected[0], expected[0], expected[1]), actual)
    except (CaptureError, UnsupportedError) as error:
        rule = f"{type(error).__name__} {error.anchor}".strip()
        return finish(Outcome.REFUSED, rule, _first_line(error))
    except Exception as error:  # noqa: BLE001 - an error that is no refusal is the outcome
        return finish(Outcome.ERROR, reason=_first_line(error))
    if difference is None:
        return finish(Outcome.PASSED)
    if difference.is_within_tolerance:
        return finish(Outcome.TOLERANCE, reason=str(difference))
    return finish(Outcome.DIFFERING, reason=str(difference))


def _find_worst(expected: Iterable[Any], actual: Iterable[Any]) -> compare.Difference | None:
    calls = ("capture", "replay of the same input", "replay of another input")
    found = []
    for call, wanted, got in zip(calls, expected, actual, strict=True):
        difference = compare.find_difference(wanted, got, harnesses.tolerance_of)
        if difference is not None:
            found.append(dataclasses.replace(difference, what=f"{call}: {difference.what}"))
    return min(found, key=lambda difference: difference.is_within_tolerance, default=None)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
