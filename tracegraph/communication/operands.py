"""The arguments of `tg.comm`: arrays and devices, checked at the door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.default_device import find_jax_device
from tracegraph.runtime.errors import CaptureError, ConfigError
from tracegraph.runtime.jax_interop import to_plain
from tracegraph.runtime.streams.stream import is_tracing

# What can be copied to a device.
CopyOperand: TypeAlias = jax.Array | np.ndarray[Any, Any]


def read_array(value: Any, argument: str, call: str) -> CopyOperand:
    """Returns an argument as a plain array.

    Args:
        value: a `jax.Array` or a NumPy array.
        argument: its name, as ``tensors[1]``.
        call: name of the function.

    Raises:
        ConfigError: it is something else.
        CaptureError: it has no value yet, or a function is being captured on this thread.
    """
    if isinstance(value, Tracer) or is_tracing():
        raise CaptureError(
            f"{call}() is called while a function is being traced",
            where=f"{locate_caller()}, argument `{argument}`",
            why="it moves arrays between devices, and a graph's buffers belong to one device",
            fix="call it before or after the captured function, on its arguments or results",
            anchor="several-devices",
        )
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, jax.Array | np.ndarray):
        return to_plain(value)
    raise make_argument_error(
        f"`{argument}` is of type {type(value).__name__}",
        f"argument `{argument}` of {call}()",
        "arrays are moved between devices",
        "pass a jax.Array or a NumPy array",
    )


def read_arrays(values: Any, argument: str, call: str) -> list[CopyOperand]:
    """Returns an argument as a list of plain arrays, at least one.

    Args:
        values: an iterable of arrays.
        argument: its name, as ``tensors``.
        call: name of the function.

    Raises:
        ConfigError: it is no iterable of arrays, or an empty one.
        CaptureError: see `read_array`.
    """
    found = list_items(values, argument, call)
    return [read_array(each, f"{argument}[{i}]", call) for i, each in enumerate(found)]


def list_items(values: Any, argument: str, call: str) -> list[Any]:
    """Returns the items of an iterable argument that is no array, at least one.

    Raises:
        ConfigError: it is no iterable, or an empty one.
    """
    is_list = isinstance(values, Iterable) and not isinstance(values, jax.Array | np.ndarray | str)
    items = list(values) if is_list else []
    if items:
        return items
    raise make_argument_error(
        f"`{argument}` is {'empty' if is_list else f'of type {type(values).__name__}'}",
        f"argument `{argument}` of {call}()",
        "it takes one item per device or array",
        f"pass a list: {call}(..., {argument}=[...])",
    )


def read_devices(devices: Any, call: str) -> list[Any]:
    """Returns the JAX devices that an argument names, all local ones if it is None.

    Raises:
        ConfigError: it is no iterable, it is empty, or there is no such device.
    """
    if devices is None:
        return jax.local_devices()
    found = list_items(devices, "devices", call)
    return [find_jax_device(each, f"devices[{i}]") for i, each in enumerate(found)]


def read_dim(dim: Any, arrays: Sequence[CopyOperand], call: str) -> int:
    """Returns a dimension that all arrays have, counted from the front.

    Raises:
        ConfigError: it is no dimension of each.
    """
    count = min(array.ndim for array in arrays)
    is_index = isinstance(dim, int) and not isinstance(dim, bool)
    if is_index and -count <= dim < count:
        return dim % count
    raise make_argument_error(
        f"`dim` is {dim!r}",
        f"argument `dim` of {call}()",
        f"the shapes are {', '.join(str(array.shape) for array in arrays[:3])}",
        f"pass an int from {-count} to {count - 1}" if count else "a scalar has none: pass x[None]",
    )


def check_alike(
    arrays: Mapping[str, CopyOperand], call: str, *, but_for: int | None = None
) -> None:
    """Refuses arrays of different shapes or dtypes.

    Args:
        arrays: at least one, by the name of each.
        call: name of the function.
        but_for: the one dimension in which they may differ.

    Raises:
        ConfigError: one differs from the first.
    """
    types = {name: describe_type(array) for name, array in arrays.items()}
    first_name, first = next(iter(types.items()))
    for name, other in types.items():
        if _leave_out(first, but_for) == _leave_out(other, but_for):
            continue
        but = "" if but_for is None else f" but for dimension {but_for}"
        raise make_argument_error(
            f"`{name}` is {_format_type(other)}, and `{first_name}` is {_format_type(first)}",
            f"argument `{name}` of {call}()",
            f"they become one array, so shapes and dtypes must be the same{but}",
            "convert with x.astype(dtype), or reshape",
        )


def describe_type(array: CopyOperand) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype as on a device: without 64 bits where x64 is off."""
    aval = jax.typeof(array)
    return aval.shape, aval.dtype


def _leave_out(
    described: tuple[tuple[int, ...], Any], dim: int | None
) -> tuple[tuple[int | None, ...], Any]:
    shape, dtype = described
    return tuple(None if i == dim else size for i, size in enumerate(shape)), dtype


def _format_type(described: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = described
    return f"{dtype}[{','.join(map(str, shape))}]"


def make_argument_error(what: str, where: str, why: str, fix: str) -> ConfigError:
    """Returns the error about an argument, with the user's line before ``where``."""
    return ConfigError(what, where=f"{locate_caller()}, {where}", why=why, fix=fix, anchor="comm")
