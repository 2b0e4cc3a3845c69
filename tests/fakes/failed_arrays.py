"""Arrays that hold an error in place of a value, as XLA returns them where a program fails."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


def make_failed_array(shape: tuple[int, ...] = (4,)) -> jax.Array:
    """Returns a float32 array that is ready and raises when it is waited for; "planted" it says.

    It comes about as on a GPU: a program is called, and fails after the call has returned.
    """
    fail, start = _make_programs(shape)
    try:
        for _ in range(100):
            # A program whose argument is late is late itself; else it fails at once.
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
                array = fail(start(1.0))
                break
        else:
            raise AssertionError("the argument was never late")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            array.block_until_ready()
            raise AssertionError("the program has not failed")
        assert array.is_ready()
        return array
    finally:
        forget_last_error()


def forget_last_error() -> None:
    """Keeps the error of the last callback from `jax.effects_barrier`, and so from later tests.

    JAX remembers a program with a callback when it is called for the first time, one at a time.
    """
    result = jax.ShapeDtypeStruct((), jnp.float32)
    jax.jit(lambda x: jax.pure_callback(np.negative, result, x))(1.0).block_until_ready()


@functools.cache
def _make_programs(shape: tuple[int, ...]) -> Any:
    def raise_error(_: Any) -> NoReturn:
        raise ValueError("planted")

    def compute_long(x: Any) -> jax.Array:
        square = jnp.full((400, 400), x)
        for _ in range(10):
            square = jnp.sin(square @ square)
        return square[0, 0]

    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return (
        jax.jit(lambda x: jax.pure_callback(raise_error, result, x)),
        jax.jit(compute_long),
    )
