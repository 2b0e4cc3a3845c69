"""Handlers of `jax.ffi` in graphs on a GPU: jaxlib's, and one that the test compiles."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.failed_arrays import forget_last_error
from tests.gpu.reference import assert_replayed
from tests.ptx_kernels import add_arrays
from tracegraph.lowering.reference import run_regions
from tracegraph.verification import reference_run

pytestmark = pytest.mark.usefixtures("gpu")

RNG = np.random.default_rng(3)
SQUARE = RNG.normal(size=(48, 48)).astype(np.float32)
POSITIVE = SQUARE @ SQUARE.T + 48 * np.eye(48, dtype=np.float32)
BATCH = np.stack([POSITIVE, POSITIVE * 2, POSITIVE.T + np.eye(48, dtype=np.float32)])
FUNCTIONS: dict[str, Any] = {
    "cholesky": (lambda x: jnp.linalg.cholesky(x) * 2, POSITIVE),
    "cholesky of a batch": (lambda x: jnp.linalg.cholesky(x) * 2, BATCH),
    "lu": (lambda x: jax.scipy.linalg.lu(x + 1), SQUARE),
    "lu of a batch": (lambda x: jax.lax.linalg.lu(x), BATCH),
    "qr": (lambda x: jnp.linalg.qr(x + 1), SQUARE),
    "eigh": (lambda x: jnp.linalg.eigh(x + x.T), SQUARE),
    "eigh of a small batch": (lambda x: jnp.linalg.eigh(x + 1), BATCH[:, :8, :8]),
    "two calls": (lambda x: jnp.linalg.cholesky(jnp.linalg.cholesky(x) @ x + x), POSITIVE),
    "sort": (lambda x: jnp.sort(x.ravel()), RNG.normal(size=(256, 512)).astype(np.float32)),
}
PLANTED = "planted: the handler fails"
SOURCE = pathlib.Path(__file__).with_name("ffi_copy.c")


def test_a_kernel_in_ptx_equals_jit() -> None:
    def run(x: Any) -> Any:
        return add_arrays(jnp.sin(x), x) * 2

    captured: Any = tg.capture(run)
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (4096,))
        np.testing.assert_array_equal(np.asarray(captured(x)), np.asarray(jax.jit(run)(x)))
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_equal_jit_in_whole_mode(name: str) -> None:
    function, x = FUNCTIONS[name]
    captured: Any = tg.capture(function)
    for scale in (1.0, 1.5, 0.5):
        argument = jnp.asarray(x * np.float32(scale))
        assert_replayed(captured, captured(argument), (argument,))
    assert captured.cache_info().misses == 1
    stages = captured.lower(jnp.asarray(x)).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True]


def test_memory_of_calls_goes_with_the_graph() -> None:
    captured: Any = tg.capture(lambda x: jnp.linalg.cholesky(x))
    captured(jnp.asarray(POSITIVE))
    assert captured.pool_bytes > 0
    before = tg.memory.memory_allocated()
    captured.clear_cache()
    assert tg.memory.memory_allocated() < before


# Once a process, which registers each name once: workers may come back to this file.
@pytest.fixture(scope="session")
def copying(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A handler that copies its operand through scratch, and one that waits for its stream."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a compiler of C: there is no cc, gcc or clang on the path")
    path = tmp_path_factory.mktemp("ffi") / "ffi_copy.so"
    include = f"-I{jax.ffi.include_dir()}"
    subprocess.run([compiler, "-shared", "-fPIC", include, "-o", path, SOURCE, "-ldl"], check=True)
    library = ctypes.CDLL(os.fspath(path))
    for name in ("copy_through_scratch", "wait_for_stream"):
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"tracegraph_{name}", capsule, platform="CUDA")
    return library


@pytest.fixture
def failing(copying: ctypes.CDLL) -> Iterator[Any]:
    """The number that makes the handlers fail while it is 1."""
    flag = ctypes.c_int.in_dll(copying, "is_failing")
    yield flag
    flag.value = 0


def read(result: Any) -> np.ndarray:
    return np.asarray(result)


@pytest.mark.usefixtures("copying")
def test_handler_of_a_user_is_captured() -> None:
    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("tracegraph_copy_through_scratch", x)(x * 2) + 1

    captured: Any = tg.capture(call)
    for scale in (1.0, 3.0):
        x = jnp.asarray(SQUARE * np.float32(scale))
        np.testing.assert_array_equal(captured(x), jax.jit(call)(x))
    assert captured.cache_info().misses == 1


def test_singular_values_have_a_way_that_waits_for_nothing() -> None:
    """The one of `docs/gpu.md`."""

    def compute(x: Any) -> Any:
        u, h = jax.scipy.linalg.polar(x)
        v, s = jax.lax.linalg.eigh(h, implementation=jax.lax.linalg.EighImplementation.QR)
        return (u @ v)[:, ::-1], s[::-1], v[:, ::-1].T

    captured: Any = tg.capture(compute)
    for seed, rows in ((0, 24), (1, 24), (2, 90)):
        x = np.random.default_rng(seed).normal(size=(rows, rows // 2)).astype(np.float32)
        found = captured(x)
        for one, other in zip(found, jax.jit(compute)(x), strict=True):
            np.testing.assert_array_equal(one, other)
        wanted = np.linalg.svd(x, compute_uv=False)
        np.testing.assert_allclose(found[1], wanted, rtol=2e-4)
    assert captured.cache_info().captures == 2


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: jnp.linalg.svd(x + 1, full_matrices=False), SQUARE),
        (lambda x: jnp.linalg.eigh(x + 1), POSITIVE[:4, :4]),
    ],
    ids=["svd", "small eigh"],
)
def test_jacobi_methods_wait_for_the_gpu_and_are_cut(function: Any, x: Any) -> None:
    x = jnp.asarray(x)
    with pytest.raises(tg.UnsupportedError) as raised:
        tg.capture(function)(x)
    assert "which waits for the GPU: cuSOLVER decides on the host" in raised.value.why
    captured: Any = tg.capture(function, mode="partial")
    for found, wanted in zip(captured(x), jax.jit(function)(x), strict=True):
        np.testing.assert_array_equal(found, wanted)
    # The failed captures leave the library usable.
    expected = jax.jit(jnp.linalg.cholesky)(POSITIVE)
    np.testing.assert_array_equal(tg.capture(jnp.linalg.cholesky)(POSITIVE), expected)


@pytest.mark.usefixtures("copying")
def test_handler_that_waits_is_refused_and_cut() -> None:
    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("tracegraph_wait_for_stream", x)(x * 2) + 1

    x = jnp.asarray(SQUARE)
    with pytest.raises(tg.UnsupportedError, match="calls tracegraph_wait_for_stream, "):
        tg.capture(call)(x)
    captured: Any = tg.capture(call, mode="partial")
    np.testing.assert_array_equal(captured(x), jax.jit(call)(x))
    stages = captured.lower(x).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True, False, True]


def test_error_of_a_handler_at_the_capture(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("tracegraph_copy_through_scratch", x)(x * 2) + 1

    def run_failing(*arguments: Any) -> Any:
        # It was tried out and captured; only XLA's own call fails.
        failing.value = 1
        return run_regions(*arguments)

    x = jnp.asarray(SQUARE)
    captured: Any = tg.capture(call)
    with monkeypatch.context() as patch:
        patch.setattr(reference_run, "run_regions", run_failing)
        with pytest.raises(tg.VerificationError, match=PLANTED) as caught:
            captured(x)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    failing.value = 0
    np.testing.assert_array_equal(captured(x), jax.jit(call)(x))


@pytest.mark.parametrize("verify", [True, False])
def test_error_of_a_handler_in_an_eager_part(failing: Any, verify: bool) -> None:
    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("tracegraph_wait_for_stream", x)(x * 2) + 1

    x = jnp.asarray(SQUARE)
    captured: Any = tg.capture(call, mode="partial", prefer="graph", verify=verify)
    for _ in range(3):
        failing.value = 1
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=PLANTED):
            read(captured(x))
        failing.value = 0
        np.testing.assert_array_equal(captured(x), x * 2 + 1)


def test_error_of_a_callback_in_an_eager_part() -> None:
    is_broken: list[bool] = [True]

    def call_back(x: Any) -> Any:
        if is_broken:
            raise ValueError(PLANTED)
        return x

    def call(x: Any) -> Any:
        return jax.pure_callback(call_back, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2) + 1

    x = jnp.asarray(SQUARE)
    captured: Any = tg.capture(call, mode="partial", prefer="graph")
    for _ in range(3):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=PLANTED):
            read(captured(x))
        is_broken.clear()
        np.testing.assert_array_equal(captured(x), x * 2 + 1)
        is_broken.append(True)
    forget_last_error()


def test_result_of_a_failed_program_is_an_argument(failing: Any) -> None:
    fail = jax.jit(lambda x: jax.ffi.ffi_call("tracegraph_copy_through_scratch", x)(x))
    x = jnp.asarray(SQUARE)
    for donated in ((), (0,)):
        captured: Any = tg.capture(lambda x: x * 2 + 1, donate_argnums=donated)
        np.testing.assert_array_equal(captured(x.copy()), x * 2 + 1)
        failing.value = 1
        for _ in range(2):
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=PLANTED):
                read(captured(fail(x)))
        failing.value = 0
        np.testing.assert_array_equal(captured(x.copy()), x * 2 + 1)
