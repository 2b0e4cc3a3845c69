"""Plain values: dict, list, tuple, str, bool, None, int and float, and pickles of these alone."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NoReturn

# The web viewer of snapshots reads protocols 2 to 4.
PICKLE_PROTOCOL = 4
# Snapshots are seven levels deep; a file that nests far deeper is not one.
DEEPEST = 50
_SCALARS = (bool, int, float, str)
# The opcodes of plain values since protocol 2, which are those that the web viewer knows.
_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT"),
        *("BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"),
        *("LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "DICT", "SETITEM"),
        *("SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
        *("TUPLE2", "TUPLE3"),
    )
)
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE")
_NAMES = ("GLOBAL", "INST", "PERSID")
# What `pickle` raises on bytes that are no pickle, besides its own error.
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
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
        tracegraph.runtime.memory.snapshots.plain_values.NotPlainError: builtins.print
    """
    try:
        _check_opcodes(data)
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


def _check_opcodes(data: bytes) -> None:
    """Looks at a pickle without loading it: at nothing but plain values, and no absurd sizes."""
    texts: list[str] = []
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL":
            raise NotPlainError(".".join(texts[-2:]))
        if opcode.name not in _OPCODES:
            name = str(argument).replace(" ", ".") if opcode.name in _NAMES else ""
            raise NotPlainError(name or f"pickle opcode {opcode.name}")
        if opcode.name in _TEXTS:
            texts = [*texts[-1:], str(argument)]
        # A number far beyond the values before it would cost memory for all numbers below.
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > (position or 0):
            raise ValueError(f"value {position} is stored as number {argument}")


class _PlainUnpickler(pickle.Unpickler):
    """Second line of defence: finds no class and no function, so nothing in a file is called."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise NotPlainError(f"{module_name}.{global_name}")


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
