"""What a function keeps in host memory, on a GPU: the bits of `jax.jit`, also in loops."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.offloading import DEVICE, HOST, add_there, make_arguments, train_layers, train_scan
from tests.oracles.tree_equality import assert_same

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize(
    ("train", "layers", "loops"), [(train_layers, 3, 0), (train_scan, 4, 0), (train_scan, 400, 2)]
)
def test_a_train_step_that_offloads(train: Any, layers: int, loops: int) -> None:
    weights, x = make_arguments(layers, 64)
    captured: Any = tg.capture(train, donate_argnums=0)
    jitted, state = jax.jit(train), jnp.asarray(weights)
    weights = jnp.asarray(weights)
    for _ in range(4):
        weights, value = captured(weights, x)
        state, expected = jitted(state, x)
        assert_same((weights, value), (state, expected))
    report = captured.explain(weights, x)
    assert " in host memory, page-locked" in report
    assert captured.cache_info().captures == 1
    nodes = captured.lower(weights, x).lowered.definition.stages[0].nodes
    assert [node.kind for node in nodes].count("while") == loops


def test_a_function_may_compute_there() -> None:
    captured: Any = tg.capture(add_there)
    for seed in range(3):
        x, y = np.random.default_rng(seed).normal(size=(2, 33)).astype(np.float32)
        assert_same(captured(x, y), jax.jit(add_there)(x, y))


def test_arguments_may_be_there() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def gather(table: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda c, r: (c + jax.device_put(r, DEVICE), None), rows, table)[0]

    captured: Any = tg.capture(gather)
    rows = jnp.ones(32)
    for seed in range(3):
        table = np.random.default_rng(seed).normal(size=(6, 32)).astype(np.float32)
        there = jax.device_put(jnp.asarray(table), sharding)
        assert_same(captured(there, rows), jax.jit(gather)(there, rows))
    assert captured.cache_info().captures == 1
    with pytest.raises(tg.CaptureError, match="is in host memory"):
        tg.capture(lambda x: jax.device_put(x * 2, HOST))(rows)


def test_the_memory_waits_for_the_last_launch_when_the_graph_goes() -> None:
    weights, x = make_arguments(8, 1024)
    captured: Any = tg.capture(train_scan)
    expected = jax.jit(train_scan)(weights, x)
    captured(weights, x)
    before = tg.memory.host_memory_stats()["active_bytes.current"]
    assert before >= 8 * weights[0].nbytes
    results = [captured(weights, x) for _ in range(5)]
    del captured
    gc.collect()
    # New pinned memory: what copies are still written to is not among it.
    held = [tg.memory.pin_memory(np.full(weights.shape, i, np.float32)) for i in range(3)]
    for result in results:
        assert_same(result, expected)
    for index, each in enumerate(held):
        np.testing.assert_array_equal(np.asarray(each), np.full(weights.shape, index, np.float32))


def test_another_process_finds_it_in_the_kernel_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    weights, x = make_arguments(3, 64)
    first: Any = tg.capture(train_layers)
    expected = first(weights, x)
    second: Any = tg.capture(train_layers)
    assert_same(second(weights, x), expected)
    assert "kernel cache" in second.explain(weights, x)
    second.save(tmp_path / "step.tg")
    loaded: Any = tg.load(tmp_path / "step.tg")
    assert_same(loaded(weights, x), expected)
