"""Large arguments that kernels read where the caller has them: results, and bytes on the GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.device_memory import measure_used_bytes

pytestmark = pytest.mark.usefixtures("gpu")
ROWS, COLUMNS = 8192, 4096
NBYTES = ROWS * COLUMNS * 4  # 128 MiB


def pool(weights: dict[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads all weights in two kernels, and returns little."""
    mixed = jnp.tanh(weights["w"]) * x
    return mixed.sum(0), jnp.abs(weights["w"]).max(1)


def make(seed: int) -> tuple[dict[str, jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    weights = {"w": jax.random.normal(keys[0], (ROWS, COLUMNS))}
    return jax.block_until_ready((weights, jax.random.normal(keys[1], (COLUMNS,))))


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-3)


def test_weights_are_in_memory_once() -> None:
    weights, x = make(0)
    wanted = jax.block_until_ready(jax.jit(pool)(weights, x))
    before = measure_used_bytes()
    captured = tg.capture(pool)
    for _ in range(3):
        assert_equal(captured(weights, x), wanted)
    assert captured.pool_bytes < NBYTES // 4
    assert measure_used_bytes() - before < NBYTES // 2
    others, x = make(1)
    assert_equal(captured(others, x), jax.jit(pool)(others, x))
    assert captured.pool_bytes < NBYTES // 4
    assert f"1 argument, {NBYTES:,} bytes, read where" in captured.explain(others, x)


def test_weights_of_numpy_take_memory_when_they_come() -> None:
    weights, x = make(2)
    captured = tg.capture(pool)
    wanted = [np.asarray(each) for each in captured(weights, x)]
    before = captured.pool_bytes
    for found in (captured({"w": np.asarray(weights["w"])}, x), captured(weights, x)):
        assert_equal(found, wanted)
    assert before + NBYTES <= captured.pool_bytes < before + NBYTES + (1 << 22)


def test_a_profile_of_a_graph_with_lent_weights() -> None:
    weights, x = make(3)
    captured = tg.capture(pool)
    wanted = [np.asarray(each) for each in captured(weights, x)]
    profile = captured.profile(weights, x)
    # 128 MiB take 26 us at the rate of an H200's memory.
    assert sum(node.cold_us or 0 for node in profile.nodes) > 26
    assert_equal(captured(weights, x), wanted)


def test_a_loop_over_batches_reads_each() -> None:
    captured, (_, x) = tg.capture(pool), make(4)
    batches = [make(seed)[0] for seed in range(5, 9)]
    results = [captured(batch, x) for batch in batches for _ in range(2)]
    for index, batch in enumerate(batches):
        assert_equal(results[2 * index + 1], jax.jit(pool)(batch, x))


def test_lent_weights_in_a_saved_graph(tmp_path: Any) -> None:
    captured, (weights, x) = tg.capture(pool), make(9)
    wanted = [np.asarray(each) for each in captured(weights, x)]
    captured.save(tmp_path / "pool.tg")
    loaded = tg.load(tmp_path / "pool.tg")
    assert_equal(loaded(weights, x), wanted)
