"""Large arguments are in memory once, captured for a GPU over host memory."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.cuda import buffer

SHAPE = (640, 512)  # 1.25 MiB
NBYTES = 640 * 512 * 4
rng = np.random.default_rng(0)
W, X = rng.normal(size=SHAPE).astype(np.float32), rng.normal(size=(4, 640)).astype(np.float32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    # That of host memory.
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch)


def read_reserved(device: CudaOnHost) -> int:
    gc.collect()
    return device.allocator.statistics.all.reserved_bytes.current


def put(array: np.ndarray[Any, Any]) -> jax.Array:
    return jax.block_until_ready(jnp.array(array))


def apply(weights: dict[str, Any], x: Any) -> Any:
    return jnp.tanh(x @ weights["w"])


def test_weights_are_not_in_the_pool(device: CudaOnHost) -> None:
    before, captured = read_reserved(device), tg.capture(apply)
    weights, x = {"w": put(W)}, put(X)
    for _ in range(3):
        np.testing.assert_array_equal(captured(weights, x), jax.jit(apply)(weights, x))
    assert read_reserved(device) - before < NBYTES
    # Other weights are read where they are, too.
    weights = {"w": put(-W)}
    np.testing.assert_array_equal(captured(weights, x), jax.jit(apply)(weights, x))
    assert read_reserved(device) - before < NBYTES
    line = f"not in it: 1 argument, {NBYTES:,} bytes, read where the caller has them"
    assert line in captured.explain(weights, x)
    assert f", lent {NBYTES:,}" in captured.explain(weights, x, show="plan")


def test_weights_of_numpy_get_memory(device: CudaOnHost) -> None:
    before, captured = read_reserved(device), tg.capture(apply)
    for factor in (1, 2, 3):
        weights = {"w": W * np.float32(factor)}
        np.testing.assert_array_equal(captured(weights, X), jax.jit(apply)(weights, X))
    assert NBYTES <= read_reserved(device) - before < 2 * NBYTES
    del captured
    assert read_reserved(device) == before


def test_an_argument_that_was_deleted_is_refused(device: CudaOnHost) -> None:
    captured, x = tg.capture(apply), put(X)
    weights = {"w": put(W)}
    expected = np.asarray(captured(weights, x))
    weights["w"].delete()
    with pytest.raises(tg.CaptureError, match="deleted"):
        captured(weights, x)
    np.testing.assert_array_equal(captured({"w": put(W)}, x), expected)


def test_a_donated_state_and_a_result_keep_their_places(device: CudaOnHost) -> None:
    def step(state: Any, w: Any) -> Any:
        return state + w, w

    captured = tg.capture(step, donate_argnums=0)
    before, state, w = read_reserved(device), put(W), put(W)
    for count in (2, 3, 4):
        state, same = captured(state, w)
        np.testing.assert_allclose(state, count * W, rtol=1e-6)
        np.testing.assert_array_equal(same, W)
    assert read_reserved(device) - before >= 2 * NBYTES


def test_blocks_keep_their_inputs(device: CudaOnHost) -> None:
    w, graph = put(W), tg.CUDAGraph()
    before = read_reserved(device)
    with tg.graph(graph):
        y = w * 2
    graph.replay()
    np.testing.assert_array_equal(y, 2 * W)
    assert read_reserved(device) - before >= 2 * NBYTES


def test_released_profiled_and_saved(device: CudaOnHost, tmp_path: pathlib.Path) -> None:
    captured, weights, x = tg.capture(apply), {"w": put(W)}, put(X)
    expected = np.asarray(captured(weights, x))
    captured.release()
    np.testing.assert_array_equal(captured(weights, x), expected)
    captured.save(tmp_path / "f.tg")
    loaded = tg.load(tmp_path / "f.tg")
    np.testing.assert_array_equal(loaded(weights, x), expected)
    np.testing.assert_array_equal(loaded({"w": W}, X), expected)
    np.testing.assert_array_equal(captured(weights, x), expected)


def test_a_capture_ahead_of_the_first_call(device: CudaOnHost) -> None:
    kinds = ({"w": jax.ShapeDtypeStruct(SHAPE, np.float32)}, jax.ShapeDtypeStruct((4, 640), "f4"))
    graph = tg.capture(apply).lower(*kinds).instantiate()
    weights, x = {"w": put(W)}, put(X)
    np.testing.assert_array_equal(graph(weights, x), jax.jit(apply)(weights, x))
