"""Verification at capture: a new graph must give what `jax.jit` gives, or it is not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.errors import VerificationError
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.verification.difference import measure_difference

# Relative to the largest magnitude in the array: what reordering a sum may change, per dtype.
_TOLERANCES = {2: 2e-2, 4: 1e-4, 8: 1e-9}
# The same behind float atomics, for all dtypes. Adam divides a gradient by its own size: the sign
# of one near zero becomes a whole step.
ATOMICS_TOLERANCE = 5e-2


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """What the comparison found.

    Attributes:
        exact: number of results that are equal bit for bit.
        close: names of the results that are equal within the tolerance of their dtype only.
        skipped: why nothing was compared, or an empty text.
        reference: what the results were compared with.
        reason: why a tolerance was allowed, where a reason is known.
    """

    exact: int = 0
    close: tuple[str, ...] = ()
    skipped: str = ""
    reference: str = "jax.jit"
    reason: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"not compared with {self.reference}: {self.skipped}"
        total = self.exact + len(self.close)
        text = f"{self.exact} of {total} results equal {self.reference} bit for bit"
        if not self.close:
            return text
        reason = f" ({self.reason})" if self.reason else ""
        return f"{text}; within tolerance{reason}: {', '.join(self.close)}"


def compare_results(
    name: str,
    paths: Sequence[str],
    replayed: Sequence[Any],
    expected: Sequence[Any],
    *,
    tolerance: float | None = None,
    reference: str = "jax.jit",
) -> VerificationReport:
    """Compares the results of a replay with those of a reference.

    Args:
        name: the captured function's name.
        paths: one name per result.
        replayed: flat results of the replay.
        expected: flat results of the reference on the same inputs.
        tolerance: for floats, relative to the largest magnitude; None for what reordering a sum may
            change in the dtype.
        reference: what gave the expected results.

    Raises:
        VerificationError: a result differs by more than its dtype's tolerance; all are named.
    """
    exact, close, wrong = 0, [], []
    for path, got, wanted in zip(paths, replayed, expected, strict=True):
        difference = measure_difference(got, wanted)
        if difference == 0.0:
            exact += 1
        elif difference <= _find_tolerance(wanted, tolerance):
            close.append(path)
        else:
            wrong.append(f"{path} (relative difference {difference:.1e})")
    if wrong:
        raise VerificationError(
            f"the replay of `{name}` differs from {reference} "
            f"in {len(wrong)} of {len(paths)} results",
            where=", ".join(wrong[:8]),
            why="a graph that computes something else than the function must not be used",
            fix="internal error in tracegraph: please report this text and the function",
            anchor="verification",
        )
    return VerificationReport(exact, tuple(close), reference=reference)


def flatten_results(result: Any) -> list[Any]:
    """Returns the flat results as physical arrays: typed keys as key data, ``float0`` as bool."""
    return [
        np.zeros(np.shape(leaf), bool) if leaf.dtype == jax.dtypes.float0 else unwrap_key(leaf)
        for leaf in jax.tree_util.tree_leaves(result)
    ]


def _find_tolerance(value: Any, tolerance: float | None) -> float:
    size = _float_size(value)
    return _TOLERANCES.get(size, 0.0) if tolerance is None or not size else tolerance


def _float_size(value: Any) -> int:
    """Returns the bytes of one real component, 0 for what is not a float."""
    dtype = np.dtype(value.dtype)
    if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return 0
    return max(dtype.itemsize // (2 if dtype.kind == "c" else 1), 2)
