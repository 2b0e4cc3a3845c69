"""`static_input`: an array that is filled between replays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.constraints.frames import hides_own_frames, locate_caller
from tracegraph.jax_internals import is_key_dtype
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.live_buffers import StaticInput, place
from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import CaptureError, ConfigError


@hides_own_frames
def static_input(shape_or_array: Any, dtype: Any = None) -> Array:
    """Returns an array that graphs read by reference, to be filled by ``copy_``.

    Args:
        shape_or_array: a shape, as an int or a tuple of ints, for zeros; anything else is an array
            whose value is copied.
        dtype: of the new array; None is that of the given one, or float32 for a shape.

    Returns:
        An array that shows what ``copy_`` wrote last.

    Raises:
        CaptureError: this thread records: an input is made before its block.
        ConfigError: the value is a typed key, or no array; or the shape or dtype is none.

    Example:
        >>> x = tg.static_input((2,))
        >>> step = tg.capture(lambda x: x + 1)
        >>> print(step(x), step(x.copy_(jnp.ones(2))))
        [1. 1.] [2. 2.]
    """
    if recorder_state.recorder is not None:
        raise CaptureError(
            "static_input is called inside a block that is recorded",
            where=locate_caller(),
            why="an input has its memory before the graph that reads it",
            fix="call it before `with tg.graph(g):`",
            anchor="graph-order",
        )
    value = _make_value(shape_or_array, dtype)
    device = find_device(is_checking=read_check_replay())
    value = place(value, device.jax_device)
    return Array(StaticInput(value, device.jax_device, device.input_writer), 0, ArrayState.LIVE)


def _make_value(given: Any, dtype: Any) -> jax.Array:
    """Returns a new array of a strong type."""
    try:
        # None is float64 here; of Python's own types JAX has others than NumPy.
        jnp.dtype(dtype)
    except TypeError:
        raise _make_type_error(f"dtype={dtype!r}") from None
    sizes: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
    if all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        if any(size < 0 for size in sizes):
            raise _make_type_error(f"the shape {sizes}")
        return jnp.zeros(sizes, jnp.float32 if dtype is None else dtype)
    own = getattr(given, "dtype", None)
    if own is None or is_key_dtype(own):
        raise _make_value_error(given)
    return jnp.array(given, own if dtype is None else dtype)


def _make_type_error(given: str) -> ConfigError:
    return ConfigError(
        f"static_input is given {given}",
        where=locate_caller(),
        why="a shape has sizes of zero and more, a dtype is one of NumPy's or of jax.numpy's",
        fix="tg.static_input((2, 3), jnp.float32)",
        anchor="config",
    )


def _make_value_error(given: Any) -> ConfigError:
    return ConfigError(
        f"static_input is given {type(given).__name__}",
        where=f"{locate_caller()}, argument 0 `shape_or_array`",
        why="an input is an array of numbers, which `copy_` fills",
        fix="pass a shape or an array; of a typed key, pass `jax.random.key_data(key)`",
        anchor="config",
    )
