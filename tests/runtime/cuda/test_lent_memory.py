"""LentMemory: JAX reads the bytes where they are, and frees the record but not the bytes."""

from __future__ import annotations

import ctypes

import jax
import numpy as np
import pytest

from tracegraph.runtime.cuda.memory import lent_memory
from tracegraph.runtime.cuda.memory.lent_memory import LentMemory


def make_aligned(count: int) -> np.ndarray:
    """Returns memory that JAX takes as it is."""
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count]


def test_bytes_are_read_where_they_are() -> None:
    memory, device = make_aligned(1000), jax.devices("cpu")[0]
    memory[:] = np.arange(1000)
    lent = LentMemory(memory.ctypes.data, 1000, device)
    array = jax.dlpack.from_dlpack(lent)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    assert (array.shape, array.dtype, array.devices()) == ((1000,), np.uint8, {device})
    np.testing.assert_array_equal(array, memory)
    copied = jax.block_until_ready(jax.device_put(array, device, may_alias=False))
    assert copied.unsafe_buffer_pointer() != memory.ctypes.data
    del array
    memory[:] = 7
    np.testing.assert_array_equal(copied, np.arange(1000).astype(np.uint8))


def test_the_record_of_each_array_is_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(freed.append)
    monkeypatch.setattr(lent_memory, "_FREE", ctypes.cast(free, ctypes.c_void_p))
    memory = make_aligned(64)
    lent = LentMemory(memory.ctypes.data, 64, jax.devices("cpu")[0])
    arrays = [jax.dlpack.from_dlpack(lent) for _ in range(3)]
    assert not freed
    arrays.pop()
    assert len(freed) == 1
    arrays.clear()
    assert len(set(freed)) == 3
    for place in freed:
        lent_memory._C.free(ctypes.c_void_p(place))
