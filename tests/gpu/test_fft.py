"""Fourier transforms in graphs on a GPU: the bits of `jax.jit`, and the plans of cuFFT."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed

pytestmark = pytest.mark.usefixtures("gpu")

CACHE = tg.backends.cufft_plan_cache


def draw(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    return (values if np.issubdtype(dtype, np.complexfloating) else values.real).astype(dtype)


C64, C128, F32, F64 = np.complex64, np.complex128, np.float32, np.float64
TRANSFORMS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "fft": (jnp.fft.fft, C64, (64,)),
    "fft of a batch": (jnp.fft.fft, C64, (5, 3, 64)),
    "fft of an odd length": (jnp.fft.fft, C64, (3, 63)),
    "fft of a prime length": (jnp.fft.fft, C64, (2, 1009)),
    "fft along another axis": (lambda x: jnp.fft.fft(x, axis=0), C64, (16, 6)),
    "fft of doubles": (jnp.fft.fft, C128, (4, 96)),
    "ifft": (jnp.fft.ifft, C64, (5, 48)),
    "ifft of an odd length": (jnp.fft.ifft, C128, (5, 27)),
    "fft2": (jnp.fft.fft2, C64, (3, 16, 20)),
    "ifft2": (jnp.fft.ifft2, C64, (3, 15, 20)),
    "fftn": (lambda x: jnp.fft.fftn(x, axes=(1, 2, 3)), C64, (2, 8, 9, 10)),
    "ifftn of doubles": (lambda x: jnp.fft.ifftn(x, axes=(0, 1, 2)), C128, (8, 9, 10)),
    "rfft": (jnp.fft.rfft, F32, (7, 64)),
    "rfft of an odd length": (jnp.fft.rfft, F32, (7, 65)),
    "rfft2": (jnp.fft.rfft2, F32, (3, 16, 18)),
    "rfftn of doubles": (jnp.fft.rfftn, F64, (8, 10, 12)),
    "irfft": (jnp.fft.irfft, C64, (7, 33)),
    "irfft of an odd length": (lambda x: jnp.fft.irfft(x, 65), C64, (7, 33)),
    "irfft2": (jnp.fft.irfft2, C64, (3, 16, 10)),
    "irfftn of doubles": (lambda x: jnp.fft.irfftn(x, (8, 10, 12)), C128, (8, 10, 7)),
    "a large one": (jnp.fft.fft, C64, (1 << 20,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_jit_in_whole_mode(name: str) -> None:
    function, dtype, shape = TRANSFORMS[name]
    with jax.enable_x64(dtype in (C128, F64)):
        captured: Any = tg.capture(function)
        for seed in range(3):
            x = jnp.asarray(draw(dtype, *shape, seed=seed))
            result = captured(x)
            assert_replayed(captured, result, (x,))
            assert np.asarray(result).tobytes() == np.asarray(jax.jit(function)(x)).tobytes()
        assert captured.cache_info().captures == 1


def filter_signal(x: Any, keep: Any) -> Any:
    spectrum = jnp.fft.rfft(x)
    low = jnp.where(jnp.arange(spectrum.shape[-1]) < keep, spectrum, 0)
    return jnp.fft.irfft(low, x.shape[-1]), jnp.abs(spectrum)


def test_a_filter_and_its_gradient() -> None:
    def loss(x: Any, keep: Any) -> Any:
        return (filter_signal(x, keep)[0] ** 2).sum()

    for function in (filter_signal, jax.value_and_grad(loss)):
        captured: Any = tg.capture(function)
        for seed in range(3):
            x, keep = jnp.asarray(draw(F32, 4, 128, seed=seed)), jnp.int32(10 + seed)
            assert_replayed(captured, captured(x, keep), (x, keep))


def test_values_that_no_number_is() -> None:
    # The scaling is that of cuBLAS, so that zeros keep their signs and NaNs their places.
    x = jnp.asarray(np.array([[0, -0.0, np.inf, 1], [np.nan, 1, 2, 3], [0, 0, 0, -0.0]], C64))
    captured: Any = tg.capture(jnp.fft.ifft)
    assert np.asarray(captured(x)).tobytes() == np.asarray(jax.jit(jnp.fft.ifft)(x)).tobytes()


def test_transforms_in_loops() -> None:
    def spread(x: Any, steps: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            return jnp.fft.ifft(jnp.fft.fft(c) * 0.5) + x

        return jax.lax.fori_loop(0, steps, body, x)

    captured: Any = tg.capture(spread)
    for steps in (1, 3, 0, 5):
        x = jnp.asarray(draw(C64, 4, 32, seed=steps))
        assert_replayed(captured, captured(x, jnp.int32(steps)), (x, jnp.int32(steps)))


def test_plans_are_shared_and_outlive_the_cache() -> None:
    CACHE.clear()
    assert CACHE.size == 0
    one: Any = tg.capture(lambda x: jnp.fft.fft(x) * 2)
    two: Any = tg.capture(lambda x: jnp.fft.fft(x) + 1)
    x = jnp.asarray(draw(C64, 3, 40))
    wanted = np.asarray(jnp.fft.fft(x))
    one(x)
    two(x)
    assert CACHE.size == 1
    CACHE.clear()
    for _ in range(3):
        np.testing.assert_allclose(one(x), wanted * 2, rtol=1e-5)
        np.testing.assert_allclose(two(x), wanted + 1, rtol=1e-4, atol=1e-4)
    assert CACHE.size == 0


def test_a_small_cache_and_none() -> None:
    x = jnp.asarray(draw(C64, 3, 60))
    try:
        for size in (1, 0):
            CACHE.clear()
            CACHE.max_size = size
            captured: Any = tg.capture(lambda x: jnp.fft.fft2(jnp.fft.ifft(x)))
            for _ in range(2):
                assert_replayed(captured, captured(x), (x,))
            assert size == CACHE.size == CACHE.max_size
    finally:
        CACHE.max_size = 4096


def test_partial_mode_cuts_at_callbacks_only() -> None:
    def run(x: Any) -> Any:
        y = jnp.fft.fft(x)
        y = jax.pure_callback(lambda a: np.asarray(a) * 2, y, y)
        return jnp.fft.ifft(y)

    captured: Any = tg.capture(run, mode="partial", prefer="graph")
    x = jnp.asarray(draw(C64, 3, 32))
    for _ in range(2):
        np.testing.assert_allclose(captured(x), 2 * x, rtol=1e-5, atol=1e-5)
    stages = captured.lower(x).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True, False, True]


def test_memory_of_plans_and_graphs_goes() -> None:
    captured: Any = tg.capture(lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)))
    captured(jnp.asarray(draw(F32, 64, 64)))
    before = tg.memory.memory_allocated()
    captured.clear_cache()
    CACHE.clear()
    assert tg.memory.memory_allocated() < before
