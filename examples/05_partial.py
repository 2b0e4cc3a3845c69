"""Keep a callback into Python between two graphs.

A graph replays work of the device only, so a function of NumPy cannot be in it. By default that is
an error. With mode="partial" the part before and the part after are captured, and the callback runs
between them. A branch on the same value needs none of it: `lax.cond` is captured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg


def choose_scale(length: np.ndarray) -> np.ndarray:
    """Returns a factor, chosen in Python."""
    return np.asarray(0.125 if length > 8.0 else 1.0, np.float32)


def clip_step(weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Subtracts the gradient, and scales it down first if it is long."""
    length = jnp.sqrt(jnp.sum(gradient * gradient))
    scale = jax.pure_callback(choose_scale, jax.ShapeDtypeStruct((), jnp.float32), length)
    return weights - gradient * scale, length


def main() -> None:
    """Shows the refusal, then the split."""
    weights, small, large = jnp.ones(64), jnp.full(64, 0.5), jnp.full(64, 4.0)
    refusal = ""
    try:
        tg.capture(clip_step)(weights, small)
    except tg.CaptureError as error:
        refusal = str(error)
    print(refusal, end="\n\n")

    partial = tg.capture(clip_step, mode="partial")
    print(partial.explain(weights, small))
    reference = jax.jit(clip_step)
    for gradient in (small, large, small):
        result, wanted = partial(weights, gradient), reference(weights, gradient)
        print(f"length {float(result[1]):5.1f}, first weight {float(result[0][0]):.3f}")
        assert all(np.array_equal(r, w) for r, w in zip(result, wanted, strict=True))

    assert 'mode="partial"' in refusal
    assert partial.cache_info().captures == 1


if __name__ == "__main__":
    main()
