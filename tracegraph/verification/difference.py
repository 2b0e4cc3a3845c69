"""How far apart two arrays are: the largest difference, relative to the largest magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracegraph.constraints.traces import read_array
from tracegraph.runtime.device import FloatDifference


def measure_difference(got: Any, wanted: Any) -> float:
    """Returns 0.0 for equal bits, else the largest difference relative to the largest magnitude.

    NaNs at equal places are equal; a NaN at one side only, or any difference of another kind than
    a float's, is infinite.

    Args:
        got: an array.
        wanted: what it should be.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    return _measure_on_host(read_array(got), read_array(wanted))


def relate(found: FloatDifference) -> float:
    """Returns what `measure_difference` does, of floats that were measured where they are."""
    if not found.is_alike:
        return float("inf")
    return _divide(found.largest, found.magnitude) if found.is_changed else 0.0


def _measure_on_host(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    # Arrays may be large and differ in a few elements only: no more than those are converted.
    changed = _find_changed(got, wanted)
    if not changed.size:
        return 0.0
    if got.dtype.kind not in "fcV":
        return float("inf")
    kind = complex if got.dtype.kind == "c" else float
    ours, theirs = got.ravel()[changed].astype(kind), wanted.ravel()[changed].astype(kind)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return float("inf")
    difference = np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0)
    if difference == 0.0 and not finite.any():
        return 0.0
    return _divide(float(difference), _find_magnitude(wanted))


def _divide(difference: float, magnitude: float) -> float:
    """Returns the relative difference of arrays that are not equal bit for bit."""
    # Zeros of other signs differ, too.
    return difference / (magnitude or 1.0) or float(np.finfo(np.float64).tiny)


def _find_changed(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the flat indices of the elements that differ in any bit."""
    itemsize = one.dtype.itemsize
    width = min(itemsize, 8)
    words = [
        np.ascontiguousarray(array).ravel().view(f"u{width}").reshape(-1, itemsize // width)
        for array in (one, other)
    ]
    return np.flatnonzero((words[0] != words[1]).any(axis=1))


def _find_magnitude(array: np.ndarray[Any, Any]) -> float:
    """Returns the largest finite magnitude."""
    magnitudes = np.abs(array)
    finite = np.isfinite(magnitudes)
    return float(np.max(magnitudes, initial=0, where=finite))
