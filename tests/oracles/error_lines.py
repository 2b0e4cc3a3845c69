"""The four lines of an error, as tests compare them."""

from __future__ import annotations

import re
import sys

from tracegraph.runtime.errors import TracegraphError


def line() -> int:
    """Returns the number of the line that calls this."""
    return sys._getframe(1).f_lineno


def match(error: TracegraphError, what: str, where: str, why: str, fix: str) -> None:
    """Fails unless each of the four lines begins with what is expected."""
    got = (error.what, error.where, error.why, error.fix)
    for one, beginning in zip(got, (what, where, why, fix), strict=True):
        assert one[: len(beginning)] == beginning
        assert len(one) > 5
    text = str(error).split("\n")
    assert [each[:9] for each in text[1:4]] == ["  where: ", "  why:   ", "  fix:   "]
    assert re.search(r"python -m tracegraph error [a-z-]+$", text[3])
