"""Errors as values: what they carry, through copies and pickles too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tracegraph.runtime.errors import (
    CaptureError,
    InternalError,
    RefusedWork,
    TracegraphError,
    UnsupportedError,
)

LINES: dict[str, Any] = {"where": "a.py:3 in f", "why": "no graph holds it", "fix": "leave it out"}
WORK = (RefusedWork("region0", "fft"), RefusedWork("region1", "program", "is unknown", "jit(f)/a"))


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("`f` prints", anchor="callback", **LINES),
        UnsupportedError("`f` sorts", anchor="unsupported", **LINES),
        UnsupportedError("`f` sorts", anchor="unsupported", refused=WORK, **LINES),
        CaptureError("`f` prints", anchor="callback", violations=["one", "two"], **LINES),
        InternalError("the plan is wrong", where="arena", why="a replay writes there"),
    ],
    ids=["capture", "unsupported", "refused", "violations", "internal"],
)
@pytest.mark.parametrize(
    "take",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_an_error_is_equal_after_a_copy(error: TracegraphError, take: Callable):
    taken = take(error)
    assert type(taken) is type(error)
    assert (str(taken), vars(taken)) == (str(error), vars(error))


def test_a_copy_keeps_the_notes():
    error = CaptureError("`f` prints", anchor="callback", **LINES)
    error.add_note("In the graph of `f`:")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["In the graph of `f`:"]


def test_an_internal_error_asks_for_a_report():
    error = InternalError("the plan is wrong", where="arena", why="a replay writes there")
    assert isinstance(error, TracegraphError)
    assert str(error).splitlines() == [
        "the plan is wrong",
        "  where: arena",
        "  why:   a replay writes there",
        "  fix:   internal error in tracegraph: please report this text"
        "          python -m tracegraph error internal",
    ]


def test_an_error_names_the_violations_that_it_reports():
    error = CaptureError("`f` prints", anchor="callback", violations=iter("ab"), **LINES)
    assert error.violations == ("a", "b")
    assert CaptureError("`f` prints", anchor="callback", **LINES).violations == ()


def test_an_error_names_the_work_that_it_refuses():
    error = UnsupportedError("`f` sorts", anchor="unsupported", refused=iter(WORK), **LINES)
    assert error.refused == WORK
    assert str(error).splitlines() == [
        "`f` sorts",
        "  where: a.py:3 in f",
        "  why:   no graph holds it",
        "  fix:   leave it out          python -m tracegraph error unsupported",
    ]
    assert UnsupportedError("`f` sorts", anchor="unsupported", **LINES).refused == ()
