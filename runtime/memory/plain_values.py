"""Plain values: dict, list, tuple, str, bool, None, int and float, and pickles of these alone."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

# The web viewer of snapshots reads protocols 2 to 4.
PICKLE_PROTOCOL = 4
# Snapshots are seven levels deep; a file that nests far deeper is not one.
DEEPEST = 50
_SCALARS = (bool, int, float, str)
# What `pickle` raises on bytes that are no pickle, besides its own error.
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
)


class NotPlainError(Exception):
    """A value is none of the plain kinds; the text names it."""


class BrokenPickleError(Exception):
    """Bytes are no pickle, or a part of one; the text says which."""


def write_plain(value: Any) -> bytes:
    """Returns the pickle of a value after `to_plain`."""
    return pickle.dumps(to_plain(value), protocol=PICKLE_PROTOCOL)


def read_plain(data: bytes) -> Any:
    """Returns the plain value in a pickle. Nothing in the pickle is ever called.

    Raises:
        NotPlainError: the pickle holds an object, or names a class or function.
        BrokenPickleError: it is no pickle.

    Example:
        >>> read_plain(write_plain({"sizes": [1, 2]}))
        {'sizes': [1, 2]}
        >>> read_plain(pickle.dumps(print))
        Traceback (most recent call last):
        tracegraph.runtime.memory.plain_values.NotPlainError: builtins.print
    """
    try:
        loaded = _PlainUnpickler(io.BytesIO(data)).load()
    except _BROKEN as error:
        raise BrokenPickleError(_explain_broken(data, error)) from error
    return to_plain(loaded)


def to_plain(value: Any) -> Any:
    """Copies a value with exact plain types; what is shared stays shared, which keeps files small.

    Raises:
        NotPlainError: a part of it is no plain value, holds itself, or nests too deep.

    Example:
        >>> import collections
        >>> to_plain(collections.OrderedDict(pair=collections.namedtuple("Pair", "a b")(1, 2)))
        {'pair': (1, 2)}
    """
    return _copy(value, (), {})


class _PlainUnpickler(pickle.Unpickler):
    """Finds no class and no function, so that nothing in a file can be called."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise NotPlainError(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotPlainError(f"persistent object {pid!r}")


def _copy(value: Any, path: tuple[int, ...], done: dict[int, tuple[Any, Any]]) -> Any:
    if value is None or type(value) in _SCALARS:
        return value
    if id(value) in done:
        return done[id(value)][1]
    if id(value) in path or len(path) > DEEPEST:
        raise NotPlainError("a value that holds itself or nests too deep")
    path = (*path, id(value))
    if isinstance(value, dict):
        plain: Any = {_copy(key, path, done): _copy(value[key], path, done) for key in value}
    elif isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        plain = kind([_copy(each, path, done) for each in value])
    else:
        return _copy_scalar(value)
    # The original is kept too: while it lives, no other value gets its id.
    done[id(value)] = value, plain
    return plain


def _copy_scalar(value: Any) -> Any:
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def _explain_broken(data: bytes, error: Exception) -> str:
    if not data:
        return "is empty"
    if data[:1] == b"\x80" and data[-1:] != b".":
        return "is truncated"
    return f"is not a pickle ({type(error).__name__}: {error})"
