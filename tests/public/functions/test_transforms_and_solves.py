"""Fourier transforms and triangular solves on the host device: the bits of `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

import tracegraph as tg

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(3, 4, 5)).astype(np.float32)
COMPLEX = (REAL + 1j * REAL[::-1]).astype(np.complex64)
SQUARE = (RNG.normal(size=(2, 4, 4)) + 4 * np.eye(4)).astype(np.float32)


def filter_signal(x: Any) -> Any:
    spectrum = jnp.fft.rfft(x)
    return jnp.fft.irfft(spectrum * jnp.exp(-jnp.arange(3.0)), 5), jnp.abs(spectrum)


def gaussian_process(x: Any, y: Any) -> Any:
    kernel = jnp.exp(-0.5 * (x[:, None] - x[None]) ** 2) + 0.1 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    return y @ cho_solve((factor, True), y) / 2 + jnp.log(jnp.diag(factor)).sum()


def cut(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a callback in front of it."""

    def run(x: Any, *rest: Any) -> Any:
        return function(jax.pure_callback(lambda a: np.asarray(a), x, x), *rest)

    return run


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "complex": (lambda x: (jnp.fft.fft(x), jnp.fft.ifft2(x), jnp.fft.fftn(x)), (COMPLEX,)),
    "real": (lambda x: (jnp.fft.rfft2(x), jnp.fft.rfftn(x)), (REAL,)),
    "to real": (lambda x: (jnp.fft.irfft(x, 9), jnp.fft.irfftn(x)), (COMPLEX,)),
    "filter": (filter_signal, (REAL,)),
    "gradient": (jax.grad(lambda x: (filter_signal(x)[0] ** 2).sum()), (REAL,)),
    "left": (lambda a, b: solve_triangular(a, b, lower=True), (SQUARE, SQUARE[:, :, :3])),
    "right": (
        lambda a, b: lax.linalg.triangular_solve(a, b, lower=True, unit_diagonal=True),
        (SQUARE, SQUARE[:, :3]),
    ),
    "gaussian process": (
        jax.value_and_grad(gaussian_process),
        (np.linspace(0, 1, 6, dtype=np.float32), np.ones(6, np.float32)),
    ),
}


@pytest.mark.parametrize("mode", ["whole", "partial"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_equal_jit(name: str, mode: Any) -> None:
    function, arguments = PROGRAMS[name]
    function = cut(function) if mode == "partial" else function
    captured = tg.capture(function, mode=mode)
    for factor in (np.float32(1), np.float32(0.5)):
        given = tuple(each * factor for each in arguments)
        got, wanted = captured(*given), jax.jit(function)(*given)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)
    assert captured.cache_info().captures == 1
