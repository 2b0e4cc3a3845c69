"""JAX's harnesses on a GPU: each captured, replayed, and held against its own executables."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

import tracegraph as tg
from tests.conformance import harnesses
from tests.conformance.results import Outcome, Result
from tests.gpu.reference import Likeness, Verdict, copy_arguments, judge
from tracegraph.runtime.errors import CaptureError, UnsupportedError

Judge = Callable[[tg.GraphedFunction, Any, tuple[Any, ...]], Verdict]
_OUTCOMES = {
    Likeness.EQUAL: Outcome.PASSED,
    Likeness.CLOSE: Outcome.TOLERANCE,
    Likeness.DIFFERING: Outcome.DIFFERING,
}
# Worst first.
_RANKS = (Likeness.DIFFERING, Likeness.CLOSE, Likeness.EQUAL)
# What a refusal has of the names of one program: quoted names, numbers.
_PARTICULARS = re.compile(r"`[^`]*`|\b\d+\b")


def choose_cases(count: int, seed: int) -> tuple[harnesses.Case, ...]:
    """Returns a sample of the cases that JAX implements on a GPU; the same for the same seed."""
    return harnesses.sample_cases(harnesses.load_cases("gpu"), count, seed)


def run_case(case: harnesses.Case, judge_replay: Judge = judge) -> Result:
    """Captures a case, replays it on two inputs, and judges both replays at the end.

    Args:
        case: what to run.
        judge_replay: compares a result with what the executables give.

    Returns:
        The outcome with its reason.
    """
    with warnings.catch_warnings():
        # Harnesses use deprecated dtypes and casts on purpose.
        warnings.simplefilter("ignore")
        return _run_quietly(case, judge_replay)


def _run_quietly(case: harnesses.Case, judge_replay: Judge) -> Result:
    first, second, has_two_inputs = harnesses.make_two_inputs(case)

    def finish(outcome: Outcome, rule: str = "", reason: str = "") -> Result:
        return Result(case.group, case.name, outcome, rule, reason, has_two_inputs)

    captured = tg.capture(case.function, verify=False)
    try:
        calls = [(copy_arguments(tuple(given)), captured(*given)) for given in (first, second)]
        verdicts = [judge_replay(captured, result, args) for args, result in calls]
    except (CaptureError, UnsupportedError) as error:
        return finish(Outcome.REFUSED, classify_refusal(error), _first_line(error))
    except Exception as error:  # noqa: BLE001 - an error that is no refusal is the outcome
        if _does_jit_fail(case.function, first):
            return finish(Outcome.JIT_FAILS, reason=_first_line(error))
        return finish(Outcome.ERROR, reason=_first_line(error))
    worst = min(verdicts, key=lambda verdict: _RANKS.index(verdict.likeness))
    return finish(_OUTCOMES[worst.likeness], reason=worst.text)


def classify_refusal(error: tg.TracegraphError) -> str:
    """Returns what refusals of one kind have in common: class, section and text without names.

    Example:
        >>> classify_refusal(UnsupportedError("`f` has a kFft thunk `fft.3`", where="w", why="y",
        ...                                   fix="f", anchor="unsupported"))
        'UnsupportedError unsupported: … has a kFft thunk …'
    """
    return f"{type(error).__name__} {error.anchor}: {_PARTICULARS.sub('…', error.what)}"


def _does_jit_fail(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    try:
        jax.block_until_ready(jax.jit(function)(*args))
    except Exception:  # noqa: BLE001 - whatever jit raises, the case is not ours
        return True
    return False


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
