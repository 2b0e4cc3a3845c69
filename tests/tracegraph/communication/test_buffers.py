"""Buffers of small arrays: which are joined, and that they come out as they went in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.communication.buffers import join_buffers, plan_buffers, split_buffers

FLOATS = [jnp.arange(n, dtype=jnp.float32) for n in (2, 3, 4)]


@pytest.mark.parametrize(
    ("nbytes", "buffers"),
    [
        (36, [[0, 1, 2]]),
        (35, [[0, 1], [2]]),
        (20, [[0, 1], [2]]),
        (19, [[0], [1], [2]]),
        (1, [[0], [1], [2]]),
    ],
)
def test_a_buffer_is_never_larger_than_asked(nbytes: int, buffers: list[list[int]]) -> None:
    assert plan_buffers([FLOATS], nbytes) == buffers


def test_a_large_array_is_copied_alone_and_closes_its_buffer() -> None:
    large = jnp.zeros(100)
    arrays = [FLOATS[0], large, FLOATS[1], FLOATS[2]]
    assert plan_buffers([arrays], 100) == [[0], [1], [2, 3]]
    assert join_buffers(arrays, [[1]])[0] is large


def test_what_has_no_plain_bytes_stays_alone() -> None:
    keys = [jax.random.key(0), jax.random.key(1)]
    weak = [jnp.asarray(2.0), jnp.asarray(3.0)]
    assert all(each.weak_type for each in weak)
    arrays = [FLOATS[0], *keys, *weak, FLOATS[1]]
    assert plan_buffers([arrays], 1000) == [[0, 5], [1], [2], [3], [4]]


def test_dtypes_and_kinds_of_memory_are_kept_apart() -> None:
    arrays = [
        FLOATS[0],
        np.zeros(2, np.float32),
        FLOATS[0].astype(jnp.int32),
        np.ones(1, np.float32),
    ]
    assert plan_buffers([arrays], 1000) == [[0], [1, 3], [2]]


def test_arrays_are_joined_only_where_every_source_has_them_together() -> None:
    first = [FLOATS[0], FLOATS[1]]
    second = [FLOATS[0], np.asarray(FLOATS[1])]
    assert plan_buffers([first, first], 1000) == [[0, 1]]
    assert plan_buffers([first, second], 1000) == [[0], [1]]


@pytest.mark.parametrize("nbytes", [1, 24, 1000])
def test_arrays_come_out_as_they_went_in(nbytes: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (), (0,), (4,), (1, 1), (0, 2), (3,)]
    arrays = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    arrays[3] = arrays[3].astype(jnp.bfloat16)
    buffers = plan_buffers([arrays], nbytes)
    assert sorted(index for indices in buffers for index in indices) == list(range(len(shapes)))
    joined = [jnp.asarray(each) for each in join_buffers(arrays, buffers)]
    for found, wanted in zip(split_buffers(joined, arrays, buffers), arrays, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.array_equal(found, wanted)
