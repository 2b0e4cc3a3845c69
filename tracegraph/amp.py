"""`tg.amp`: mixed precision, with the names of `torch.amp`.

`autocast` computes matmuls and convolutions in 16 bits. `GradScaler` scales the loss for float16,
and skips the steps whose gradients overflow, without asking the device.

Example:
    >>> import jax.numpy as jnp
    >>> import tracegraph as tg
    >>> @tg.capture
    ... def layer(w, x):
    ...     with tg.amp.autocast(jnp.bfloat16):
    ...         return jnp.tanh(x @ w)
    >>> "bf16" in layer.explain(jnp.ones((4, 2)), jnp.ones((1, 4))).ir
    True
"""

from tracegraph.mixed_precision.grad_scaler import GradScaler
from tracegraph.mixed_precision.regions import autocast

__all__ = ["GradScaler", "autocast"]
