"""One mistake is one message: violations are grouped by their cause."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line
from tracegraph.constraints import Violation, make_capture_error
from tracegraph.constraints.mismatch import describe_mismatch
from tracegraph.runtime.errors import VerificationError
from tracegraph.verification.report import VerificationReport, compare_results

X = np.arange(4, dtype=np.float32)
FILE = "tests/tracegraph/constraints/test_violation.py"


def make_violation(number: int, what: str = "`f` prints", rule: str = "callback") -> Violation:
    return Violation(rule, what, f"a.py:{number} in f, %{number} = p", "no host code runs", "print")


def count_lines(error: BaseException) -> int:
    notes = getattr(error, "__notes__", [])
    return sum(text.count("\n") + 1 for text in (str(error), *notes))


def test_one_cause_has_eight_examples_and_a_count():
    broken = [make_violation(number) for number in range(1, 121)]
    error = make_capture_error(broken, graph_name="f")
    assert str(error).split("\n") == [
        "`f` prints, 120 times",
        "  where: a.py:1 in f, %1 = p",
        *[f"         a.py:{number} in f, %{number} = p" for number in range(2, 9)],
        "         and 112 more",
        "  why:   no host code runs",
        "  fix:   print          python -m tracegraph error callback",
    ]
    assert error.violations == tuple(broken)


def test_whats_that_differ_are_one_group_if_one_change_mends_them():
    broken = [make_violation(number, f"x[{number}] is a str") for number in range(3)]
    error = make_capture_error(broken, graph_name="f")
    assert error.what == "x[0] is a str, and 2 more like it"
    assert error.where.count("\n") == 2


@pytest.mark.parametrize("kinds", [2, 3, 5, 7, 8, 30])
@pytest.mark.parametrize("count", [1, 9])
def test_an_error_has_at_most_forty_lines(kinds: int, count: int):
    broken = [
        make_violation(number, rule=f"rule-{kind}")
        for kind in range(kinds)
        for number in range(count)
    ]
    error = make_capture_error(broken, graph_name="f")
    assert count_lines(error) <= 40
    assert f"`f` breaks {len(broken)} capture constraints" in str(error)
    assert len(error.violations) == len(broken)
    named = sum(f"tracegraph error rule-{kind}\n" in f"{error}\n" for kind in range(kinds))
    assert named == kinds or f"and {kinds - named} more causes, see `error.violations`" in str(
        error
    )


def test_many_prints_of_a_function_are_one_message():
    def step(x):
        for _ in range(50):
            jax.debug.print("{}", x)
            x = x + 1
        return x

    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(step)(X)
    assert caught.value.what == "`step` prints a traced value while it is being captured"
    assert count_lines(caught.value) <= 40


def test_many_bad_leaves_are_one_message():
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(lambda tree: tree, name="f")([{index} for index in range(120)])
    assert caught.value.what.endswith("and 119 more like it")
    assert f"{FILE}:{at} in test_many_bad_leaves_are_one_message" in caught.value.where
    assert count_lines(caught.value) <= 12
    assert len(caught.value.violations) == 120


def test_many_leaves_of_another_shape_are_counted():
    wanted = [(f"x[{index}]", (2,), "float32", False) for index in range(120)]
    got = [(path, (3,), dtype, weak) for path, _, dtype, weak in wanted]
    text = describe_mismatch(wanted, got)
    assert text.startswith("x[0]: wanted f32[2], got f32[3]; x[1]")
    assert text.endswith("x[7]: wanted f32[2], got f32[3]; and 112 more")


def test_many_results_that_differ_are_counted():
    paths = [f"result[{index}]" for index in range(120)]
    with pytest.raises(VerificationError) as caught:
        compare_results("f", paths, [X] * 120, [X + 1] * 120, VerificationReport())
    assert "in 120 of 120 results" in caught.value.what
    assert caught.value.where.endswith("and 112 more")
    assert count_lines(caught.value) == 4
