"""Verification at capture: a new graph must give what its executables give, or it is not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.errors import VerificationError, shorten_list
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.verification.difference import measure_difference

# For floats, relative to the largest magnitude in the array, where something is left to chance, for
# all dtypes. Adam divides a gradient by its own size: the sign of one near zero becomes a step.
TOLERANCE = 5e-2


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """What the comparison found, or is to find.

    More than six fields because it is all that is known of a comparison.

    Attributes:
        exact: number of results that are equal bit for bit.
        close: names of the results that are equal within the tolerance only.
        skipped: why nothing is compared, or an empty text.
        reference: what the results are compared with.
        tolerance: what is allowed for floats, relative to the largest magnitude in the array.
        reason: what is left to chance, where a tolerance is allowed.
        note: what equal bits do not mean here.
    """

    exact: int = 0
    close: tuple[str, ...] = ()
    skipped: str = ""
    reference: str = "XLA's executable"
    tolerance: float = 0.0
    reason: str = ""
    note: str = ""

    @property
    def promise(self) -> str:
        """How equal results have to be, as ``bit for bit``."""
        if not self.tolerance:
            return "bit for bit"
        return f"bit for bit or within {self.tolerance} of the largest magnitude ({self.reason})"

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.skipped:
            return f"not compared with {self.reference}: {self.skipped}{note}"
        total = self.exact + len(self.close)
        text = f"{self.exact} of {total} results equal {self.reference} bit for bit"
        if self.tolerance:
            text += f"; within {self.tolerance} of the largest magnitude ({self.reason}): "
            text += ", ".join(self.close) or "none"
        return text + note


def compare_results(
    name: str,
    paths: Sequence[str],
    replayed: Sequence[Any],
    expected: Sequence[Any],
    report: VerificationReport,
) -> list[str]:
    """Compares the results of a replay with those of a reference.

    Args:
        name: the captured function's name.
        paths: one name per result.
        replayed: flat results of the replay.
        expected: flat results of the reference on the same inputs.
        report: says what the reference is, and the tolerance.

    Returns:
        The names of the results that are equal within the tolerance only.

    Raises:
        VerificationError: a result differs by more than that; all are named.
    """
    differences = [measure_difference(*pair) for pair in zip(replayed, expected, strict=True)]
    return judge_differences(name, paths, differences, expected, report)


def judge_differences(
    name: str,
    paths: Sequence[str],
    differences: Sequence[float],
    expected: Sequence[Any],
    report: VerificationReport,
) -> list[str]:
    """Does what `compare_results` does, with differences that are known: `measure_difference`."""
    close, wrong = [], []
    for path, difference, wanted in zip(paths, differences, expected, strict=True):
        if difference == 0.0:
            continue
        # The difference may be NaN.
        if is_inexact(wanted) and difference <= report.tolerance:
            close.append(path)
        else:
            wrong.append(f"{path} (relative difference {difference:.1e})")
    if wrong:
        raise VerificationError(
            f"the replay of `{name}` differs from {report.reference} "
            f"in {len(wrong)} of {len(paths)} results",
            where=", ".join(shorten_list(wrong)),
            why="a graph that computes something else than the function must not be used",
            fix=_suggest(report),
            anchor="verification",
        )
    return close


def _suggest(report: VerificationReport) -> str:
    if "Python" in report.reason:
        return (
            "callbacks must give the same results for the same arguments; "
            "if they do, please report this text and the function"
        )
    return "internal error in tracegraph: please report this text and the function"


def is_inexact(value: Any) -> bool:
    """True for an array of floats or complex numbers."""
    return bool(jax.numpy.issubdtype(np.dtype(value.dtype), jax.numpy.inexact))


def flatten_results(result: Any) -> list[Any]:
    """Returns the flat results as physical arrays: typed keys as key data, ``float0`` as bool."""
    return [
        np.zeros(np.shape(leaf), bool) if leaf.dtype == jax.dtypes.float0 else unwrap_key(leaf)
        for leaf in jax.tree_util.tree_leaves(result)
    ]
