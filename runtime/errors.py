"""The error tree. Every error says what, where, why and how to fix it, in that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

REPORT_FIX = "internal error in tracegraph: please report this text"
# How many of the things that are wrong in the same way a message names.
MAX_EXAMPLES = 8


class TracegraphError(Exception):
    """Base of all errors of tracegraph: four lines, always in the same order.

    Args:
        what: what is wrong, naming the thing that the user wrote.
        where: the user's file, line and function, and our op or argument.
        why: the one fact about CUDA graphs or memory that makes it wrong.
        fix: one or two things to type.
        anchor: the section of ``docs/errors.md`` that explains it; the last line ends in a command
            that prints it.

    Example:
        >>> error = tg.CaptureError("`f` prints", where="a.py:3 in f", fix="print outside",
        ...                         why="no host code is replayed", anchor="callback")
        >>> print(error)
        `f` prints
          where: a.py:3 in f
          why:   no host code is replayed
          fix:   print outside          python -m tracegraph error callback
    """

    def __init__(self, what: str, *, where: str, why: str, fix: str, anchor: str) -> None:
        self.what, self.where, self.why, self.fix, self.anchor = what, where, why, fix, anchor
        super().__init__(format_error(what, where, why, fix, anchor))

    def __reduce__(self) -> tuple[object, ...]:
        # By attributes, not by the arguments of a constructor: subclasses differ in these.
        return _make_empty_error, (type(self),), {**vars(self), "args": self.args}


def format_error(what: str, where: str, why: str, fix: str, anchor: str) -> str:
    """Returns the four lines of an error message."""
    explain = f"python -m tracegraph error {anchor}"
    return f"{what}\n  where: {where}\n  why:   {why}\n  fix:   {fix}          {explain}"


def shorten_list(items: Sequence[str], limit: int = MAX_EXAMPLES) -> list[str]:
    """Returns the first items, and as the last one how many more there are.

    Example:
        >>> from tracegraph.runtime.errors import shorten_list
        >>> shorten_list(["a", "b", "c", "d"], 2)
        ['a', 'b', 'and 2 more']
    """
    rest = len(items) - limit
    return [*items[:limit], f"and {rest} more"] if rest > 0 else list(items)


def count_noun(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun; the plural of most nouns ends in an s.

    Example:
        >>> from tracegraph.runtime.errors import count_noun
        >>> count_noun(1, "step"), count_noun(2000, "step"), count_noun(2, "leaf", "leaves")
        ('1 step', '2,000 steps', '2 leaves')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def _make_empty_error(kind: type[TracegraphError]) -> TracegraphError:
    return kind.__new__(kind)


class CaptureError(TracegraphError):
    """The function cannot be captured as it is written or called.

    Attributes:
        violations: each broken capture constraint that the error is about, a record with `rule`,
            `what`, `where`, `why` and `fix`; empty if it is about anything else.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str,
        why: str,
        fix: str,
        anchor: str,
        violations: Iterable[Any] = (),
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix, anchor=anchor)
        self.violations: tuple[Any, ...] = tuple(violations)


@dataclasses.dataclass(frozen=True)
class RefusedWork:
    """A piece of a compiled region that no graph holds.

    Attributes:
        region: the region's name.
        kind: XLA's word for it, as ``fft``; ``program`` for the compiled program as a whole.
        reason: reads on after ``it``; empty where the kind is the reason.
        path: XLA's name of the operation in the traced function, as ``jit(region0)/fft``; empty
            where XLA does not know it.
    """

    region: str
    kind: str
    reason: str = ""
    path: str = ""


class UnsupportedError(TracegraphError):
    """The function is fine, but this version cannot lower it.

    Attributes:
        refused: each piece of work that the error is about; empty if it is about anything else.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str,
        why: str,
        fix: str,
        anchor: str,
        refused: Iterable[RefusedWork] = (),
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix, anchor=anchor)
        self.refused = tuple(refused)


class VerificationError(TracegraphError):
    """The replay of a new graph differs from `jax.jit`; the graph is not used."""


class ReplayError(TracegraphError):
    """A captured graph cannot be replayed with these arguments or in this state."""


class StaleOutputError(ReplayError):
    """A static output was read after a later replay had overwritten it."""


class InvalidFloatError(ReplayError, FloatingPointError):
    """A replay has made a NaN or an infinity, and ``debug_nans=True`` looks for these."""


class OutOfMemoryError(TracegraphError):
    """The pool has too little memory for the memory plan."""


class CudaError(TracegraphError):
    """A CUDA driver call failed."""


class SavedFileError(TracegraphError):
    """A saved file cannot be read or written, or does not fit this machine or this program."""


class ConfigError(TracegraphError):
    """An option or environment variable has an invalid value."""


class InternalError(TracegraphError):
    """A bug in tracegraph: a graph, a plan or an owner of memory broke a rule of its own."""

    def __init__(self, what: str, *, where: str, why: str) -> None:
        super().__init__(what, where=where, why=why, fix=REPORT_FIX, anchor="internal")


class RecaptureWarning(UserWarning):
    """A function is captured again and again: its signature changes from call to call."""


PUBLIC_ERRORS = (
    TracegraphError,
    CaptureError,
    UnsupportedError,
    VerificationError,
    ReplayError,
    StaleOutputError,
    OutOfMemoryError,
    CudaError,
    SavedFileError,
    ConfigError,
    InternalError,
)
for _error in (*PUBLIC_ERRORS, RecaptureWarning):
    # Users import these from `tracegraph`, so tracebacks name them so.
    _error.__module__ = "tracegraph"
