"""The precision flags on a GPU: the bits that they change, and those that they do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(512, 512)), jnp.float32)


def square(x: Any) -> Any:
    return x @ x


def measure_error(result: jax.Array, *, operand: Any) -> float:
    exact = np.asarray(operand, np.float64)
    exact = exact @ exact
    return float(np.abs(np.asarray(result, np.float64) - exact).max() / np.abs(exact).max())


def test_tf32_changes_bits() -> None:
    captured = tg.capture(square)
    usual = captured(X)
    assert (usual == jax.jit(square)(X)).all()
    with tg.backends.matmul.flags(allow_tf32=True):
        assert (captured(X) == usual).all()
    with tg.backends.matmul.flags(allow_tf32=False):
        precise = captured(X)
    assert (precise != usual).any()
    # 10 bits of mantissa against 23.
    assert measure_error(precise, operand=X) < 1e-5 < measure_error(usual, operand=X)


@pytest.mark.parametrize(("dtype", "name"), [("float16", "fp16"), ("bfloat16", "bf16")])
def test_long_sums_of_16_bits_are_rounded_once(dtype: Any, name: str) -> None:
    x = jnp.asarray(RNG.normal(size=(64, 16384)), dtype)
    y = jnp.asarray(RNG.normal(size=(16384, 64)), dtype)
    captured = tg.capture(lambda x, y: x @ y)
    flag = f"allow_{name}_reduced_precision_reduction"
    with tg.backends.matmul.flags(**{flag: False}):
        result = np.asarray(captured(x, y), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    # Half of the last place of the largest result.
    bound = float(jnp.finfo(dtype).eps) * np.abs(exact).max() / 2 + 1e-3
    assert np.abs(result - exact).max() <= bound


def test_convolutions_change_bits() -> None:
    images = jnp.asarray(RNG.normal(size=(4, 32, 16, 16)), jnp.float32)
    filters = jnp.asarray(RNG.normal(size=(32, 32, 3, 3)), jnp.float32)

    def convolve(i: Any, f: Any) -> Any:
        return jax.lax.conv(i, f, (1, 1), "SAME") + 1

    captured = tg.capture(convolve)
    usual = captured(images, filters)
    with tg.backends.cudnn.flags(allow_tf32=False):
        precise = captured(images, filters)
    assert (precise != usual).any()
