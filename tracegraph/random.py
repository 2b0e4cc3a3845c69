"""`tg.random`: stateful generators of JAX keys, with the names of ``torch.cuda.random``.

A key that a function takes as an argument needs none of this: it is data. A generator draws keys
inside of a function, and a replay draws the next ones, as a run of the function would.

Example:
    >>> import jax
    >>> import tracegraph as tg
    >>> _ = tg.random.manual_seed(42)
    >>> noise = tg.capture(lambda: jax.random.normal(tg.random.next_key(), (2,)))
    >>> first, second = noise(), noise()
    >>> _ = tg.random.manual_seed(42)
    >>> bool((first == jax.random.normal(tg.random.next_key(), (2,))).all())
    True
"""

from tracegraph.randomness.default_generator import (
    default_generator,
    fork_rng,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    next_key,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from tracegraph.randomness.generator import Generator

__all__ = [
    "Generator",
    "default_generator",
    "fork_rng",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "next_key",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]
