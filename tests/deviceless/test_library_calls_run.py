"""What XLA compiles for an H200 and is library calls alone, run over host memory by stand-ins."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import pipeline
from tests.fakes.compilers import WORKSPACE_BYTES
from tests.fakes.cuda_on_host import make_cuda_replay, make_device
from tests.fakes.definitions import take_results
from tests.fakes.fake_libraries import BLAS_MAPS, FFT_MAPS, make_libraries
from tracegraph.runtime.cuda.libraries.cublas import CuBlas
from tracegraph.runtime.cuda.libraries.cufft import CuFft
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.plan_cache import PlanCache

F32, C64, C128 = np.float32, np.complex64, np.complex128
PROGRAMS: dict[str, tuple[Any, Any, tuple[int, ...], Any]] = {
    "fft": (jnp.fft.fft, C64, (3, 8), np.fft.fft),
    "ifft of an odd length": (jnp.fft.ifft, C64, (3, 7), np.fft.ifft),
    "fft2": (jnp.fft.fft2, C128, (2, 4, 6), np.fft.fft2),
    "ifftn": (jnp.fft.ifftn, C128, (3, 4, 5), np.fft.ifftn),
    "rfft": (jnp.fft.rfft, F32, (3, 9), np.fft.rfft),
    "rfft2": (jnp.fft.rfft2, F32, (3, 4, 6), np.fft.rfft2),
    "irfft": (jnp.fft.irfft, C64, (3, 5), np.fft.irfft),
    "there and back": (lambda x: jnp.fft.ifft(jnp.fft.fft(x)), C64, (3, 8), lambda x: x),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_device(monkeypatch)
    nvmath, maps = make_libraries(made.driver), FFT_MAPS + BLAS_MAPS
    nvmath.bindings.cufft.workspace_bytes = WORKSPACE_BYTES["fft"]
    order = made.context.order
    monkeypatch.setattr(made, "_cufft", CuFft(order, PlanCache(), lambda: nvmath, lambda: maps))
    monkeypatch.setattr(made, "_cublas", CuBlas(made.context, lambda: nvmath, lambda: maps))
    return made


def capture(name: str, h200: Any, device: Any) -> tuple[Any, np.ndarray]:
    function, dtype, shape, _ = PROGRAMS[name]
    rng = np.random.default_rng(1)
    values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    x = (values.real if dtype is F32 else values).astype(dtype)
    with jax.enable_x64(dtype is C128 or bool(jax.config.read("jax_enable_x64"))):
        request = pipeline.make_capture_request(function, (x,))
        definition = pipeline.lower_for_gpu(request, h200).definition
    return make_cuda_replay(device, definition), x


@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_give_the_numbers_of_numpy(name: str, h200: Any, device: Any) -> None:
    replay, x = capture(name, h200, device)
    for factor in (1, -2):
        given = (x * factor).astype(x.dtype)
        replay.settle()
        replay.load([(0, given)])
        replay.launch()
        (result,) = take_results(replay)
        wanted = PROGRAMS[name][3](given)
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_planted_failure_leaves_the_device_usable(h200: Any, device: Any) -> None:
    before = device.allocator.statistics.all.allocated_bytes.current
    device._cufft.bindings.fail_on = "exec_c2c"
    with pytest.raises(CudaError, match="cufftExecC2C failed"):
        capture("fft", h200, device)
    gc.collect()
    assert device.allocator.statistics.all.allocated_bytes.current == before
    test_replays_give_the_numbers_of_numpy("fft", h200, device)
