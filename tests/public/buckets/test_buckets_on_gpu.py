"""Buckets, release and restore on a CudaDevice over host memory, with a fake driver."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, place
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.streams.stream_capture import thread_state


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    # Another test of this process may have chosen a stream for its thread.
    monkeypatch.setattr(thread_state, "streams", [])
    return capture_for_gpu(monkeypatch)


def total(x: Any) -> Any:
    is_true = (jnp.arange(x.shape[0]) < tg.bucket_size())[:, None]
    return x * 2, jnp.where(is_true, x, 0).sum(0)


def make_rows(size: int) -> Any:
    return place(np.arange(3.0 * size, dtype=np.float32).reshape(size, 3))


def check(step: Any, size: int) -> None:
    double, summed = step(make_rows(size))
    np.testing.assert_array_equal(double, 2 * np.asarray(make_rows(size)))
    np.testing.assert_allclose(summed, np.asarray(make_rows(size)).sum(0))


@pytest.mark.usefixtures("device")
def test_buckets_share_memory_which_is_given_back_and_taken_again() -> None:
    step: Any = tg.capture(total, buckets={"x": {0: (2, 4, 64)}}, verify=False)
    for size in (1, 4, 40, 3, 2):
        check(step, size)
    infos = step.bucket_info()
    assert step.pool_bytes <= 1.15 * infos[-1].pool_bytes + 512 * len(infos)
    step.release()
    assert step.pool_bytes == 0
    check(step, 3)
    step.restore()
    for size in (1, 50):
        check(step, size)
    assert step.cache_info().captures == 3


@pytest.mark.usefixtures("device")
def test_state_is_loaded_again_after_a_release() -> None:
    add: Any = tg.capture(lambda state, x: state + x, donate_argnums=0, verify=False)
    state = add(place([1, 2]), place([1, 1]))
    add.release()
    np.testing.assert_array_equal(state, [2, 3])
    np.testing.assert_array_equal(add(state, place([1, 1])), [3, 4])
    assert add.cache_info().captures == 1
