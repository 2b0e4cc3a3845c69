"""How far two results are apart: bits first, then the largest difference of the floats."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.runtime.device import FloatDifference
from tracegraph.verification.difference import measure_difference, relate

NAN, INF = math.nan, math.inf
TINY = float(np.finfo(np.float64).tiny)


VALUES = [
    ([], [], 0.0),
    ([1, 2], [1, 2], 0.0),
    ([1, NAN, INF], [1, NAN, INF], 0.0),
    ([1, 3], [1, 4], 0.25),
    # The largest finite magnitude is the measure, wherever it stands.
    ([-8, 3, INF], [-8, 4, INF], 0.125),
    ([0.0, 0.0], [0.0, -0.0], TINY),
    ([1, NAN], [1, 2], NAN),
    ([1, 2], [1, NAN], INF),
    ([1, INF], [1, 2], INF),
    ([1, INF], [1, -INF], INF),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize(("got", "wanted", "expected"), VALUES)
def test_floats(dtype: str, got: Any, wanted: Any, expected: float):
    arrays = [np.asarray(values, jnp.dtype(dtype)) for values in (got, wanted)]
    np.testing.assert_equal(measure_difference(*arrays), expected)
    np.testing.assert_equal(measure_difference(*(each[::-1] for each in arrays)), expected)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (FloatDifference(1.0, 4.0, True, True), 0.25),
        (FloatDifference(0.0, 0.0, True, False), 0.0),
        (FloatDifference(0.0, 4.0, True, True), TINY),
        (FloatDifference(NAN, 4.0, True, True), NAN),
        (FloatDifference(1.0, 4.0, False, True), INF),
    ],
)
def test_what_a_device_measured_is_judged_like_arrays(found: FloatDifference, expected: float):
    np.testing.assert_equal(relate(found), expected)


def test_nans_of_other_bits_are_one_nan():
    bits = np.asarray([0x7FC00000, 0x7FC00001], np.uint32)
    one, other = bits.view(np.float32)
    assert measure_difference(np.asarray(one), np.asarray(other)) == 0.0


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_other_kinds_are_equal_or_not(dtype: str):
    one, other = np.asarray([0, 1], dtype), np.asarray([1, 1], dtype)
    assert measure_difference(one, one.copy()) == 0.0
    assert measure_difference(one, other) == INF


@pytest.mark.parametrize("other", [np.zeros((3, 2)), np.zeros((2, 3), np.float32)])
def test_other_shapes_and_dtypes_are_never_close(other: np.ndarray[Any, Any]):
    assert measure_difference(np.zeros((2, 3)), other) == INF


def test_scalars():
    assert measure_difference(np.asarray(3.0), np.asarray(4.0)) == 0.25
