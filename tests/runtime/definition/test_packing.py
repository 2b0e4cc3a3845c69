"""Packing: elements of less than a byte, as JAX lays them out in a device's memory."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.runtime.definition.packing import (
    PACKED_BITS,
    count_packed_bytes,
    is_packable,
    pack,
    unpack,
)


@pytest.mark.parametrize("name", PACKED_BITS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
def test_bytes_are_those_of_jax(name: str, count: int) -> None:
    dtype = np.dtype(getattr(jnp, name))
    values = (np.arange(count) % 4 - (0 if name.startswith("u") else 2)).astype(dtype)
    array = jax.block_until_ready(jnp.asarray(values))
    nbytes = count_packed_bytes(values.shape, dtype)
    content = ctypes.string_at(array.unsafe_buffer_pointer(), nbytes) if count else b""
    packed = pack(values)
    assert packed.dtype == np.uint8
    # What is left of the last byte belongs to no element, and may be anything.
    last = (1 << ((count * PACKED_BITS[name] - 1) % 8 + 1)) - 1
    assert packed.tobytes()[:-1] == content[:-1]
    assert packed.tobytes()[-1:] == bytes(each & last for each in content[-1:])
    back = unpack(packed, values.shape, dtype)
    # The bytes that NumPy has are those of JAX, too: results are compared by them.
    assert back.tobytes() == values.tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, jnp.int8, jnp.float8_e4m3fn])
def test_whole_bytes_are_left_alone(dtype: np.dtype) -> None:
    values = np.ones((2, 3), dtype)
    assert not is_packable(values.dtype)
    assert pack(values) is values
    assert count_packed_bytes(values.shape, values.dtype) == values.nbytes
    content = np.frombuffer(values.tobytes(), np.uint8)
    assert (unpack(content, values.shape, values.dtype) == values).all()


def test_shapes_come_back() -> None:
    values = np.arange(15).reshape(3, 5).astype(jnp.uint4)
    assert (unpack(pack(values), (3, 5), values.dtype) == values).all()
    assert pack(values.T).tolist() != pack(values).tolist()
