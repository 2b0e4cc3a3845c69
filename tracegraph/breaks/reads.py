"""Host reads: how a value is read, and under which key what was read is found again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "array": lambda value: value,
}
# How explain() names them.
READ_NAMES = {
    "bool": "bool()",
    "int": "int()",
    "float": "float()",
    "complex": "complex()",
    "index": "an index",
    "array": "item() or np.asarray()",
}


def read_value(value: Any, kind: str) -> Any:
    """Returns what a read gives: a Python scalar, or the array itself.

    Args:
        value: a plain `jax.Array`; for a Python scalar also an array of NumPy.
        kind: a name of the table.

    Example:
        >>> read_value(jax.numpy.float32(2.5), "int")
        2
    """
    return _READERS[kind](value)


def make_key(read: Any) -> Hashable:
    """Returns what is equal for reads after which Python does the same.

    Floats and arrays are compared by their bytes: 0.0 is not -0.0, and NaN is itself.

    Example:
        >>> make_key(True), make_key(3), make_key(0.0) == make_key(-0.0)
        (True, 3, False)
    """
    if isinstance(read, bool | int):
        return read
    return np.asarray(read).tobytes()


def has_few_values(read: Any) -> bool:
    """True for booleans and integers, whose values recur; floats and arrays hardly ever do.

    Example:
        >>> has_few_values(True), has_few_values(0.5), has_few_values(jax.numpy.int32(1))
        (True, False, True)
    """
    if not isinstance(read, jax.Array):
        return isinstance(read, bool | int)
    return read.size == 1 and (read.dtype == bool or np.issubdtype(read.dtype, np.integer))
