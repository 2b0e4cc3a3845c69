"""Compares two results bit for bit, and says how far apart they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a result differs from the expected one.

    Attributes:
        what: in words, as ``result 0: 3 of 400 elements differ``.
        max_absolute: largest absolute difference of two elements; None when they have none.
        max_ulp: the same in units in the last place, floats only.
        is_within_tolerance: True when structure and dtypes agree and every element is close.
    """

    what: str
    max_absolute: float | None = None
    max_ulp: int | None = None
    is_within_tolerance: bool = False

    def __str__(self) -> str:
        parts = [self.what]
        if self.max_absolute is not None:
            parts.append(f"max abs {self.max_absolute:.3g}")
        if self.max_ulp is not None:
            parts.append(f"max ulp {self.max_ulp}")
        return ", ".join(parts)


def find_difference(
    expected: Any, actual: Any, tolerance_of: Callable[[np.dtype[Any]], float]
) -> Difference | None:
    """Compares two pytrees of arrays: tree, shape, dtype, weak type, then every bit.

    Two NaN at the same place are equal whatever their payload; -0.0 differs from 0.0.

    Args:
        expected: pytree of ``jax.Array``.
        actual: the pytree that should equal it.
        tolerance_of: gives the relative and absolute tolerance for a dtype.

    Returns:
        None when they are equal; else the worst difference of all leaves.
    """
    wanted, got = jax.tree.structure(expected), jax.tree.structure(actual)
    if wanted != got:
        return Difference(f"tree: wanted {wanted}, got {got}")
    differences = []
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
    for index, (wanted_leaf, got_leaf) in enumerate(pairs):
        difference = _compare_leaf(f"result {index}", wanted_leaf, got_leaf, tolerance_of)
        if difference is not None:
            differences.append(difference)
    return min(differences, key=_rank, default=None)


def _rank(difference: Difference) -> tuple[bool, bool, float]:
    size = difference.max_absolute
    return difference.is_within_tolerance, size is not None, -(size or 0.0)


def _compare_leaf(
    name: str, expected: Any, actual: Any, tolerance_of: Callable[[np.dtype[Any]], float]
) -> Difference | None:
    if not isinstance(actual, jax.Array):
        return Difference(f"{name}: wanted a jax.Array, got {type(actual).__name__}")
    wanted, got = _describe(expected), _describe(actual)
    if wanted != got:
        return Difference(f"{name}: wanted {wanted}, got {got}")
    expected_host, actual_host = _to_host(expected), _to_host(actual)
    is_unequal = ~are_bits_equal(expected_host, actual_host)
    if not is_unequal.any():
        return None
    return _measure(name, expected_host, actual_host, is_unequal, tolerance_of)


def _describe(array: Any) -> str:
    weak = " weak" if getattr(jax.typeof(array), "weak_type", False) else ""
    return f"{array.dtype}{list(array.shape)}{weak}"


def _to_host(array: Any) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(np.asarray(array)).reshape(array.shape)


def are_bits_equal(
    expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns, per element, whether the bytes are equal or both are NaN (parts of complex alone).

    Example:
        >>> are_bits_equal(np.float32([0, np.nan]), np.float32([-0.0, -np.nan])).tolist()
        [False, True]
    """
    if expected.size == 0:
        return np.ones(expected.shape, bool)
    if np.iscomplexobj(expected):
        real = are_bits_equal(*(np.ascontiguousarray(a.real) for a in (expected, actual)))
        imag = are_bits_equal(*(np.ascontiguousarray(a.imag) for a in (expected, actual)))
        return real & imag
    width = expected.dtype.itemsize
    both = [a.reshape(-1).view(np.uint8).reshape(-1, width) for a in (expected, actual)]
    is_equal = (both[0] == both[1]).all(axis=1).reshape(expected.shape)
    if jnp.issubdtype(expected.dtype, jnp.floating):
        is_equal = is_equal | (np.isnan(expected) & np.isnan(actual))
    return is_equal


def _measure(
    name: str,
    expected: np.ndarray[Any, Any],
    actual: np.ndarray[Any, Any],
    is_unequal: np.ndarray[Any, np.dtype[np.bool_]],
    tolerance_of: Callable[[np.dtype[Any]], float],
) -> Difference:
    dtype = expected.dtype
    what = f"{name}: {int(is_unequal.sum())} of {expected.size} elements of {dtype} differ"
    wanted, got = expected[is_unequal], actual[is_unequal]
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    wanted_wide, got_wide = wanted.astype(wide), got.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(wanted_wide - got_wide)
    tolerance = tolerance_of(dtype)
    is_close = np.allclose(got_wide, wanted_wide, rtol=tolerance, atol=tolerance, equal_nan=True)
    return Difference(what, float(distance.max()), _max_ulp(wanted, got), bool(is_close))


def _max_ulp(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> int | None:
    if np.iscomplexobj(wanted):
        parts = (_max_ulp(wanted.real, got.real), _max_ulp(wanted.imag, got.imag))
        return max((part for part in parts if part is not None), default=None)
    if not jnp.issubdtype(wanted.dtype, jnp.floating):
        return None
    pairs = zip(_order_floats(wanted), _order_floats(got), strict=True)
    return max(abs(a - b) for a, b in pairs)


def _order_floats(array: np.ndarray[Any, Any]) -> list[int]:
    # Sign and magnitude as one integer: neighbouring floats are then one apart, across zero too.
    width = array.dtype.itemsize
    sign = 1 << (8 * width - 1)
    raw = np.ascontiguousarray(array).view(f"u{width}").tolist()
    return [-(bits ^ sign) if bits & sign else bits for bits in raw]
