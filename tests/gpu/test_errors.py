"""What a GPU capture refuses: in four lines, with a usable process and a working next capture."""

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed
from tests.gpu.subprocesses import run_python
from tests.oracles.error_lines import line, match

pytestmark = pytest.mark.usefixtures("gpu")


def use_seed(x):
    return jax.lax.rng_uniform(0.0, 1.0, x.shape) * x


SEED_LINE = line() - 3


UNSUPPORTED: dict[str, Any] = {
    "seed": (use_seed, SEED_LINE, ("rng_seed",)),
}


def assert_usable():
    """The process captures, replays and computes as if nothing had happened."""
    captured = tg.capture(lambda x, y: (x @ y, jnp.sort(x)))
    for seed in range(3):
        x, y = np.random.default_rng(seed).normal(size=(2, 32, 32)).astype(np.float32)
        assert_replayed(captured, captured(x, y), (x, y))
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_lowered_yet_is_named_with_its_line(name):
    function, number, kinds = UNSUPPORTED[name]
    captured: Any = tg.capture(function)
    for _ in range(2):
        with pytest.raises(tg.UnsupportedError) as raised:
            captured(np.arange(256, dtype=np.float32))
        match(raised.value, "", "", "", "")
        assert any(kind in raised.value.what for kind in kinds), raised.value
        assert "HLO `" in raised.value.where, raised.value
        assert f"test_errors.py:{number}" in raised.value.where, raised.value
    assert captured.pool_bytes == 0
    assert captured.cache_info().currsize == 0
    assert_usable()


def test_the_report_of_an_unsupported_function_says_so():
    text = tg.capture(use_seed).explain(np.arange(256, dtype=np.float32))
    assert "rng_seed" in text
    assert f"test_errors.py:{SEED_LINE}" in text


def test_an_array_on_another_device():
    there = jax.device_put(np.ones(3, np.float32), jax.devices("cpu")[0])
    captured = tg.capture(lambda x: x * 2)
    captured(jnp.ones(3))
    for each in (captured, tg.capture(lambda x: x * 2)):
        with pytest.raises(tg.CaptureError) as raised:
            each(there)
        match(raised.value, "", "", "", "")
        assert raised.value.anchor == "other-device"
    assert np.array_equal(captured(jnp.full(3, 4.0)), np.full(3, 8.0))
    assert_usable()


def test_a_deleted_array():
    captured = tg.capture(lambda x: x * 2)
    captured(jnp.ones(3))
    for each in (captured, tg.capture(lambda x: x * 2)):
        gone = jnp.ones(3)
        gone.delete()
        with pytest.raises(tg.CaptureError, match="deleted") as raised:
            each(gone)
        match(raised.value, "", "", "", "")
    assert np.array_equal(captured(jnp.full(3, 4.0)), np.full(3, 8.0))
    assert_usable()


def test_another_signature():
    captured = tg.capture(lambda x, y: x + y, name="add")
    graph = captured.lower(jnp.ones(3), jnp.ones(3)).instantiate()
    for wrong in (np.ones(4, np.float32), np.ones(3, np.int32), np.ones((3, 1), np.float32)):
        with pytest.raises(tg.ReplayError) as raised:
            graph(jnp.ones(3), wrong)
        match(raised.value, "the graph of `add`", "", "", "")
        assert "y: wanted f32[3]" in raised.value.where
    assert np.array_equal(graph(np.ones(3, np.float32), jnp.ones(3)), np.full(3, 2.0))
    assert_usable()


def test_a_static_output_read_too_late():
    captured = tg.capture(lambda x: jnp.sort(x), outputs="static")
    first = captured(jnp.arange(5.0))
    second = captured(jnp.arange(5.0) + 1)
    with pytest.raises(tg.StaleOutputError):
        np.asarray(first)
    assert np.array_equal(second, np.arange(5.0) + 1)
    assert_usable()


def run_without_package(package, program):
    """Runs a program in a process where importing a package fails as if it were not there."""
    text = f"import sys\nsys.modules[{package!r}] = None\n{textwrap.dedent(program)}"
    done = run_python(["-c", text])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_matmuls_without_the_bindings_of_the_library():
    # Complex matmuls have no kernel of XLA's own, so they always go to the library.
    report = run_without_package(
        "nvmath",
        """
        import jax.numpy as jnp, tracegraph as tg
        x = jnp.ones((64, 64), jnp.complex64)
        try:
            tg.capture(lambda x: x @ x)(x)
        except tg.TracegraphError as error:
            print(type(error).__name__, error)
        captured = tg.capture(lambda x: jnp.sort(x.real, 0) * 2)
        print(float(captured(x)[0, 0]), float(captured(x * 3)[0, 0]))
        """,
    )
    assert "nvmath-python" in report
    assert "python -m tracegraph error " in report
    assert report.endswith("2.0 6.0\n")


def test_without_the_bindings_of_the_driver():
    report = run_without_package(
        "cuda.bindings",
        """
        import jax, jax.numpy as jnp, tracegraph as tg
        try:
            tg.capture(lambda x: x * 2)(jnp.ones(3))
        except tg.TracegraphError as error:
            print(type(error).__name__, error)
        print(float(jax.jit(lambda x: x * 2)(1.0)))
        """,
    )
    assert "cuda-bindings" in report
    assert "python -m tracegraph error " in report
    assert report.endswith("2.0\n")


def test_many_failures_in_a_row_leave_no_trace(assert_memory_returns):
    def run():
        for _ in range(5):
            captured = tg.capture(use_seed)
            with pytest.raises(tg.UnsupportedError):
                captured(np.arange(256, dtype=np.float32))

    assert_memory_returns(run)
    assert_usable()
