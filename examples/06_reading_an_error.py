"""Read an error: what is wrong, where, why, and what to type.

Every error of tracegraph has these four lines, and names your own file and line.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg


def lookup(x: np.ndarray) -> np.ndarray:
    """An example of Python work that JAX cannot see into."""
    return np.interp(x, [0.0, 1.0], [0.0, 10.0]).astype(np.float32)


def step(x: jax.Array) -> jax.Array:
    """Calls back into Python, which a graph cannot do."""
    y = jnp.sin(x)
    z = jax.pure_callback(lookup, jax.ShapeDtypeStruct(x.shape, x.dtype), y)
    return z * 2.0


def main() -> None:
    """Shows the error, then repairs it as its last line says."""
    x = jnp.linspace(0.0, 1.0, 5)
    lines: list[str] = []
    try:
        tg.capture(step)(x)
    except tg.CaptureError as error:
        lines = str(error).splitlines()
    print("\n".join(lines), end="\n\n")
    what, where, why, fix = lines[:4]
    assert "`step`" in what
    assert where.startswith("  where: ")
    assert "06_reading_an_error.py:23 in step" in where
    assert why.startswith("  why:   ")
    assert fix.startswith("  fix:   ")
    assert 'mode="partial"' in fix

    # The failure left nothing behind: the repaired function is captured at once.
    repaired = tg.capture(step, mode="partial")
    wanted = lookup(np.sin(np.asarray(x))) * 2.0
    assert np.allclose(repaired(x), wanted, rtol=1e-6)
    print("repaired:", np.asarray(repaired(x)))


if __name__ == "__main__":
    main()
