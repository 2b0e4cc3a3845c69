"""`tg.backends`: precision of matmuls and convolutions, and cuFFT's plans, as `torch.backends`.

A flag is None until it is set: captured functions then compute what `jax.jit` computes. Assigning
it holds in the whole process, ``flags(...)`` in a with-block of one thread. The flags hold for what
`tg.capture` compiles; a precision that an op or JAX's settings name always wins.
``cufft_plan_cache`` holds the plans of Fourier transforms on a GPU.

Example:
    >>> import jax.numpy as jnp
    >>> import tracegraph as tg
    >>> matmul = tg.capture(lambda x: x @ x)
    >>> with tg.backends.matmul.flags(allow_tf32=False):
    ...     print("HIGHEST" in matmul.lower(jnp.ones((2, 2))).as_text())
    True
"""

from tracegraph.plan_caches import cufft_plan_cache
from tracegraph.precision.flag_groups import cudnn, matmul

__all__ = ["cudnn", "cufft_plan_cache", "matmul"]


def __dir__() -> list[str]:
    # No other names of modules.
    return __all__
