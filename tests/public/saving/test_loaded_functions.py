"""Loaded functions in use: memory, threads, reports, and calls that a file cannot serve."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_program


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "step.tg"


def test_pools_release_and_restore(path: pathlib.Path) -> None:
    step = tg.capture(lambda state, x: (state + x, x * 2), donate_argnums=0)
    for size in (2, 4096):
        step(jnp.zeros(size), jnp.ones(size))
    step.release()
    step.save(path)
    assert step.pool_bytes == 0, "saved from its recipes"
    loaded: Any = tg.load(path)
    held = loaded.pool_bytes
    assert held > 0
    state, double = loaded(jnp.zeros(2), jnp.ones(2))
    loaded.release()
    assert loaded.pool_bytes == 0
    np.testing.assert_array_equal(double, [2, 2])
    state, _ = loaded(state, jnp.ones(2))
    np.testing.assert_array_equal(state, [2, 2])
    loaded.restore()
    assert loaded.pool_bytes == held
    shared = tg.load(path, pool=loaded.pool())
    assert shared.pool() == loaded.pool()
    with pytest.raises(tg.ConfigError, match="pool= is not a pool"):
        tg.load(path, pool=1)  # pyright: ignore[reportArgumentType]


def test_a_loaded_function_from_several_threads(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: x * 2)
    for size in (2, 3):
        step(jnp.ones(size))
    step.save(path)
    loaded = tg.load(path)
    wrong = []

    def call(size: int) -> None:
        for i in range(50):
            result = np.asarray(loaded(jnp.full(size, float(i), jnp.float32)))
            wrong.extend([i] * int((result != 2 * i).any()))

    threads = [threading.Thread(target=call, args=(2 + i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_a_file_has_can_be_read(path: pathlib.Path) -> None:
    step = tg.capture(lambda s, x, n: (s + x.sum() * n, x), donate_argnums=0, static_argnums=2)
    step(jnp.zeros(2), jnp.ones((2, 3)), 4)
    step.save(path)
    text = tg.load(path).explain()
    for line in (
        f"`<lambda>`, loaded from {path}",
        f"JAX {jax.__version__}, tracegraph {tg.__version__}",
        "  s: f32[2], donated",
        "  x: f32[2,3]",
        "  static argument n: 4",
        "verification: 2 of 2 results equal XLA's executable bit for bit",
    ):
        assert line in text, text


def test_python_objects_behave_as_functions_do(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: x * 2, name="step")
    step(jnp.ones(2))
    step.save(str(path))
    loaded: Any = tg.load(str(path))
    assert loaded.__name__ == "step"
    with pytest.raises(tg.ConfigError, match="cannot be pickled"):
        loaded.__reduce_ex__(4)


@pytest.mark.parametrize(
    ("make_call", "message"),
    [
        (lambda f: f(), "missing a required argument"),
        (lambda f: f(jnp.ones(2), jnp.ones(2)), "too many positional arguments"),
        (lambda f: f({1, 2}), "not an array"),
        (lambda f: f(jnp.ones(3)), r"x: wanted f32\[2\], got f32\[3\]"),
        (lambda f: f({"a": jnp.ones(2)}), r"x\['a'\]: wanted nothing, got f32\[2\]"),
        (lambda f: f(jnp.ones(2, jnp.int32)), r"x: wanted f32\[2\], got i32\[2\]"),
        (lambda f: jax.jit(f)(jnp.ones(2)), "inside of another program of JAX"),
        (lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(2)), "inside of another program"),
        (lambda f: jax.vmap(f)(jnp.ones((2, 2))), "inside of another program of JAX"),
    ],
)
def test_calls_that_a_file_cannot_serve(path: pathlib.Path, make_call: Any, message: str) -> None:
    step = tg.capture(lambda x: x * 2, name="step")
    step(jnp.ones(2))
    step.save(path)
    loaded = tg.load(path)
    with pytest.raises((tg.ReplayError, tg.CaptureError), match=message) as raised:
        make_call(loaded)
    assert len(str(raised.value).splitlines()) >= 4
    np.testing.assert_array_equal(loaded(jnp.ones(2)), [2, 2])


def test_settings_are_part_of_a_signature(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: x * 2, name="step")
    step(np.ones(2, np.float32))
    with jax.enable_x64(True):
        step(np.ones(2, np.float64))
    with jax.default_matmul_precision("highest"):
        step(np.ones(3, np.float32))
    step.save(path)
    loaded = tg.load(path)
    assert loaded(np.ones(2, np.float32)).dtype == np.float32
    with jax.enable_x64(True):
        assert loaded(np.ones(2, np.float64)).dtype == np.float64
    with pytest.raises(tg.ReplayError, match="jax_default_matmul_precision: wanted 'highest'"):
        loaded(np.ones(3, np.float32))


def test_invalid_floats_are_named_without_their_op(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: jnp.log(x), name="step")
    step(jnp.ones(2))
    step.save(path)
    with jax.debug_nans(True):
        loaded = tg.load(path)
        with pytest.raises(tg.ReplayError, match="a result of the loaded `step` is invalid"):
            loaded(-jnp.ones(2))


TWO_DEVICES = """
import sys
import jax, jax.numpy as jnp
import tracegraph as tg

path = sys.argv[1]

def train(state, x):
    return state * 2 + x, state.sum()

def run(step):
    state = jnp.ones(2)
    for _ in range(3):
        state, total = step(state, jnp.ones(2))
    assert float(total) == 14.0, total
    return state.devices() | total.devices()

step = tg.capture(train, donate_argnums=0, name="step")
assert run(step) == {jax.devices()[0]}
step.save(path)
with tg.device(1):
    loaded = tg.load(path)
    assert run(loaded) == {jax.devices()[1]}
    try:
        step.save(path)
    except tg.SavedFileError as error:
        print(error.what)
try:
    run(loaded)
except tg.ReplayError as error:
    print(error.where.partition(": ")[2], "-", error.fix)
with tg.device(1):
    run(step)
    step.save(path)
assert repr(tg.load(path)) == "<LoadedFunction step, 1 signature>"
assert run(tg.load(path)) == {jax.devices()[0]}
"""


def test_a_graph_belongs_to_the_device_that_it_is_loaded_on(tmp_path: pathlib.Path) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(TWO_DEVICES, tmp_path / "step.tg", XLA_FLAGS=flags) == (
        "`step` has nothing to save: no graph is captured on this device\n"
        "jax_default_device: wanted CpuDevice(id=1), got None - call it under the settings that it "
        "was saved with, on the device that is current when it is loaded: with tg.device(i)\n"
    )
