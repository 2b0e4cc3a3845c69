"""`tg.comm`: arrays from device to device, as in ``torch.cuda.comm``.

Devices are JAX devices, or their indices in `jax.local_devices()`. Nothing here waits for a copy:
JAX makes them on streams of its own, as `jax.device_put` does, and results are `jax.Array` objects
on the devices that were asked for.

Example:
    >>> import jax.numpy as jnp
    >>> import tracegraph as tg
    >>> pieces = tg.comm.scatter(jnp.arange(6.0), devices=[0, 0])
    >>> print(tg.comm.gather(pieces))
    [0. 1. 2. 3. 4. 5.]
"""

from tracegraph.communication.copies import broadcast, broadcast_coalesced
from tracegraph.communication.pieces import gather, scatter
from tracegraph.communication.sums import reduce_add, reduce_add_coalesced

__all__ = [
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]
