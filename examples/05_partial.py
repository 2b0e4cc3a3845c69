"""Keep a branch that depends on the data, between two graphs.

A graph runs the same kernels each time, so `lax.cond` on a computed value cannot be in it. By
default that is an error. With mode="partial" the part before and the part after are captured, and
the branch runs between them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tracegraph as tg


def clip_step(weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Subtracts the gradient, and scales it down first if it is long."""
    length = jnp.sqrt(jnp.sum(gradient * gradient))
    clipped = lax.cond(length > 8.0, lambda g: g * 0.125, lambda g: g, gradient)
    return weights - clipped, length


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
