"""Comparing device memory bit for bit, measuring floats, and copying arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, place
from tracegraph.runtime.cuda import comparison, measurement
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.verification.difference import measure_difference, relate

# The fixture puts another in its place.
MAKE_ALLOCATOR = jax_arrays._make_allocator


def pair(device: CudaOnHost, one: Any, other: Any) -> tuple[int, int, int]:
    return one.unsafe_buffer_pointer(), other.unsafe_buffer_pointer(), one.nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 129, 200])
def test_ranges_are_compared_to_the_last_bit(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(comparison, "PIECE_BYTES", 64)
    bytes_of = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    one, equal = place(bytes_of, dtype=np.uint8), place(bytes_of, dtype=np.uint8)
    assert device.comparison.find_unequal([pair(device, one, equal)]) == []
    for index in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        changed = bytes_of.copy()
        changed[index] ^= 1
        other = place(changed, dtype=np.uint8)
        assert device.comparison.find_unequal([pair(device, one, other)]) == [0]
        pairs = [pair(device, one, each) for each in (equal, other, equal, other, equal)]
        assert device.comparison.find_unequal(pairs) == [1, 3]


def test_nan_equals_the_same_nan_only(device: CudaOnHost) -> None:
    nan = place(np.asarray([0x7FC00000] * 4, np.uint32).view(np.float32))
    other = place(np.asarray([0x7FC00001] * 4, np.uint32).view(np.float32))
    assert device.comparison.find_unequal([pair(device, nan, nan), pair(device, nan, other)]) == [1]
    assert device.comparison.find_unequal([]) == []


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "bool", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3), (0, 2)])
def test_copies_are_private_and_rotated(
    device: CudaOnHost, dtype: str, shape: tuple[int, ...]
) -> None:
    size = int(np.prod(shape))
    values = (np.arange(size) % 7).reshape(shape).astype(jax.numpy.dtype(dtype))
    array = place(values, dtype=values.dtype)
    (same,) = device.comparison.copy_arrays([array], is_rotated=False)
    (rotated,) = device.comparison.copy_arrays([array], is_rotated=True)
    assert (same.dtype, same.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(np.asarray(same), values)
    expected = np.roll(values.ravel(), -(size // 2)).reshape(shape)
    np.testing.assert_array_equal(np.asarray(rotated), expected)
    if size:
        pointers = {a.unsafe_buffer_pointer() for a in (array, same, rotated)}
        assert len(pointers) == 3


def test_copies_and_comparisons_compile_nothing(
    device: CudaOnHost, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = [place(np.full(3 + index, index, np.float32)) for index in range(40)]
    with jax.log_compiles():
        copies = device.comparison.copy_arrays(arrays, is_rotated=True)
        pairs = [pair(device, *both) for both in zip(arrays, copies, strict=True)]
        assert device.comparison.find_unequal(pairs) == []
        assert "ompil" not in caplog.text
        # What is logged is seen.
        jax.jit(lambda x: x + 41)(1.0)
        assert "ompil" in caplog.text
    assert len({copy.unsafe_buffer_pointer() for copy in copies}) == len(arrays)
    assert device.comparison.copy_arrays([], is_rotated=True) == []


@pytest.mark.parametrize("is_rotated", [False, True])
def test_many_copies_are_allocated_by_one_program(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch, is_rotated: bool
) -> None:
    weak = jax.numpy.asarray(2.0)
    values = [np.arange(size, dtype=dtype) for size, dtype in ((0, "i4"), (1, "f4"), (5, "i1"))]
    arrays = [weak, *(place(each, dtype=each.dtype) for each in values)]
    monkeypatch.setattr(jax_arrays, "_make_allocator", MAKE_ALLOCATOR)
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    device.prepare_copies([(array.shape, array.dtype) for array in arrays])

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("an array is copied by JAX")

    monkeypatch.setattr(jax, "device_put", refuse)
    copies = device.comparison.copy_arrays(arrays, is_rotated=is_rotated)
    assert [copy.aval for copy in copies] == [array.aval for array in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        flat = np.asarray(array).ravel()
        wanted = np.roll(flat, -(flat.size // 2)) if is_rotated else flat
        np.testing.assert_array_equal(np.asarray(copy).ravel(), wanted)
    # Other types have no program.
    with pytest.raises(AssertionError, match="copied by JAX"):
        device.comparison.copy_arrays(arrays[1:], is_rotated=is_rotated)


def test_copies_keep_the_weak_type(device: CudaOnHost) -> None:
    weak = jax.numpy.asarray(2.0)
    assert weak.aval.weak_type
    strong = place([1, 2, 3, 4])
    copies = device.comparison.copy_arrays([weak, strong], is_rotated=False)
    assert [copy.aval for copy in copies] == [weak.aval, strong.aval]


@pytest.mark.parametrize("dtype", measurement.FORMATS)
def test_floats_are_measured_where_they_are(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(comparison, "PIECE_BYTES", 16)
    nan, inf = math.nan, math.inf
    values = np.arange(-9, 10.0)
    changes = {0: -9.5, 7: nan, 12: 8.0, 18: inf}
    for index, value in changes.items():
        changed = values.copy()
        changed[index] = value
        for got, wanted in ((changed, values), (values, changed), (changed, changed)):
            one, other = (place(each, dtype=jnp.dtype(dtype)) for each in (got, wanted))
            addresses = [each.unsafe_buffer_pointer() for each in (one, other)]
            pairs = [(*addresses, one.size, one.dtype), (addresses[1],) * 2 + (1, one.dtype)]
            found, same = device.comparison.measure_floats(pairs)
            np.testing.assert_equal(relate(found), measure_difference(one, other))
            assert relate(same) == 0.0
    assert device.comparison.measure_floats([]) == []
    assert device.comparison.measures(jnp.dtype(dtype))
    assert not device.comparison.measures(np.dtype(np.int32))
