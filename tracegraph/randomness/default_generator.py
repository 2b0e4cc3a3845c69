"""The default generator of the process, and the functions that speak of it, as in PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.randomness.errors import (
    make_generator_error,
    make_generators_error,
    make_state_error,
)
from tracegraph.randomness.generator import Generator

# Of the process: keys belong to no device.
default_generator = Generator()


@hides_own_frames
def next_key() -> jax.Array:
    """Returns a key of the default generator; see `Generator.next_key`.

    Example:
        >>> _ = tg.random.manual_seed(0)
        >>> key = tg.random.next_key()
        >>> bool(key == tg.random.next_key())
        False
    """
    return default_generator.next_key()


@hides_own_frames
def manual_seed(seed: int) -> Generator:
    """Seeds the default generator and returns it; see `Generator.manual_seed`.

    Args:
        seed: an int of 64 bits, signed or not.
    """
    return default_generator.manual_seed(seed)


@hides_own_frames
def manual_seed_all(seed: int) -> None:
    """Seeds the default generator, which is that of all devices.

    Args:
        seed: an int of 64 bits, signed or not.
    """
    default_generator.manual_seed(seed)


@hides_own_frames
def seed() -> int:
    """Seeds the default generator from the system; returns the seed."""
    return default_generator.seed()


@hides_own_frames
def seed_all() -> None:
    """Seeds the default generator, which is that of all devices, from the system."""
    default_generator.seed()


def initial_seed() -> int:
    """Returns the seed of the default generator."""
    return default_generator.initial_seed()


@hides_own_frames
def get_rng_state() -> np.ndarray[Any, Any]:
    """Returns the state of the default generator; see `Generator.get_state`."""
    return default_generator.get_state()


@hides_own_frames
def set_rng_state(state: Any) -> None:
    """Sets the state of the default generator; see `Generator.set_state`.

    Args:
        state: a uint32 array, as of `get_rng_state`.
    """
    default_generator.set_state(state)


@hides_own_frames
def get_rng_state_all() -> list[np.ndarray[Any, Any]]:
    """Returns the states of all default generators: there is one for all devices."""
    return [default_generator.get_state()]


@hides_own_frames
def set_rng_state_all(states: Iterable[Any]) -> None:
    """Sets what `get_rng_state_all` has returned.

    Args:
        states: one uint32 array.

    Raises:
        ConfigError: it is not one state.
    """
    if not isinstance(states, Iterable):
        raise make_state_error(type(states).__name__, "in a list, one for all devices")
    given = list(states)
    if len(given) != 1:
        raise make_state_error(f"{len(given)} states", "one for all devices")
    default_generator.set_state(given[0])


@contextlib.contextmanager
def fork_rng(
    generators: Iterable[Generator] | None = None, *, enabled: bool = True
) -> Iterator[None]:
    """Gives generators the states back that they have now when the with-block ends.

    Args:
        generators: that the block may draw from; None for the default generator.
        enabled: False makes the block an ordinary one.

    Raises:
        CaptureError: it is called inside a capture.
        ConfigError: it is no list, or one of them is no generator.

    Example:
        >>> _ = tg.random.manual_seed(0)
        >>> with tg.random.fork_rng():
        ...     key = tg.random.next_key()
        >>> bool(key == tg.random.next_key())
        True
    """
    if generators is not None and not isinstance(generators, Iterable):
        raise make_generators_error(generators)
    given = [default_generator] if generators is None else list(generators)
    for each in given:
        if not isinstance(each, Generator):
            raise make_generator_error(each)
    saved = [(each, each.get_state()) for each in given] if enabled else []
    try:
        yield
    finally:
        for each, state in saved:
            each.set_state(state)
