"""Saved graphs on a GPU: a fresh process replays what this one has captured, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.subprocesses import run_python
from tests.oracles.tree_equality import assert_same

pytestmark = pytest.mark.usefixtures("gpu")
LAYERS, WIDTH = 4, 128
FRESH = """
import sys
import jax
import numpy as np
import tracegraph as tg

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **values: compiled.append(values.get("fun_name", ""))
    if "backend_compile" in name
    else None
)
path, arrays = sys.argv[1:]
held = dict(np.load(arrays))
state = {name: jax.device_put(value) for name, value in held.items() if name != "x"}
step = tg.load(path)
for _ in range(3):
    state, loss = step(state, held["x"])
assert not [name for name in compiled if "train" in name or "region" in name], compiled
np.savez(arrays, loss=np.asarray(loss), **jax.tree.map(np.asarray, state))
"""


def train(state: Any, x: Any) -> Any:
    def measure(state: Any) -> Any:
        hidden = x
        for name in sorted(state):
            hidden = jnp.tanh(hidden @ state[name])
        return (hidden**2).mean()

    loss, grads = jax.value_and_grad(measure)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def make_state() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    shape = (WIDTH, WIDTH)
    return {f"w{i}": jax.random.normal(key, shape) / WIDTH for i, key in enumerate(keys)}


def make_batch() -> Any:
    return np.asarray(jax.random.normal(jax.random.key(1), (32, WIDTH)))


def run(step: Any) -> Any:
    state, _ = step(make_state(), make_batch())
    state, _ = step(state, make_batch())
    return step(state, make_batch())


def test_a_fresh_process_trains_on(tmp_path: pathlib.Path) -> None:
    step: Any = tg.capture(train, donate_argnums=0)
    state, loss = run(step)
    path, arrays = tmp_path / "step.tg", tmp_path / "arrays.npz"
    step.save(path)
    np.savez(arrays, x=make_batch(), **jax.tree.map(np.asarray, make_state()))
    done = run_python(["-c", FRESH, path, arrays])
    assert done.returncode == 0, done.stderr
    got = dict(np.load(arrays))
    assert_same(got, {"loss": np.asarray(loss), **jax.tree.map(np.asarray, state)})


def test_a_loaded_graph_here(tmp_path: pathlib.Path) -> None:
    step: Any = tg.capture(train, donate_argnums=0)
    wanted = jax.tree.map(np.asarray, run(step))
    step.save(tmp_path / "step.tg")
    loaded: Any = tg.load(tmp_path / "step.tg")
    assert_same(jax.tree.map(np.asarray, run(loaded)), wanted)
    loaded.release()
    assert loaded.pool_bytes == 0
    assert_same(jax.tree.map(np.asarray, run(loaded)), wanted)
    origin = loaded.explain().splitlines()[1]
    assert f"({'.'.join(map(str, tg.get_device_capability()))})" in origin


def test_convolutions_loops_and_keys(tmp_path: pathlib.Path) -> None:
    def work(key: Any, x: Any) -> Any:
        kernel = jax.random.normal(key, (3, 3, 4, 4))
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        count, y = jax.lax.while_loop(
            lambda c: jnp.logical_and(c[0] < 5, c[1].max() > 1e-3),
            lambda c: (c[0] + 1, c[1] * 0.5),
            (0, y),
        )
        return jax.random.fold_in(key, count), y, jnp.fft.rfft(y.reshape(-1))

    step = tg.capture(work)
    x = jax.random.normal(jax.random.key(2), (2, 8, 8, 4))
    wanted = step(jax.random.key(0), x)
    step.save(tmp_path / "step.tg")
    assert_same(tg.load(tmp_path / "step.tg")(jax.random.key(0), x), wanted)


def test_sizes_of_buckets_share_memory(tmp_path: pathlib.Path) -> None:
    def double(x: Any) -> Any:
        is_true = (jnp.arange(x.shape[0]) < tg.bucket_size())[:, None]
        return x * 2, jnp.where(is_true, x, 0).sum(0)

    step: Any = tg.capture(double, buckets={"x": {0: (2, 4, 8)}})
    step.warm_up(jnp.zeros((1, WIDTH)))
    step.save(tmp_path / "step.tg")
    loaded: Any = tg.load(tmp_path / "step.tg")
    assert loaded.pool_bytes <= step.pool_bytes
    for size in (1, 8, 3):
        x = jnp.asarray(make_batch()[:size])
        assert_same(loaded(x), step(x))
