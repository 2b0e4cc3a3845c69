"""Field checks: from the annotation of a field to what tells whether a value belongs there."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], bool]


def make_check(annotation: Any) -> Check:
    """Returns what tells whether a value fits an annotation; a bool is no int here.

    Example:
        >>> check = make_check(tuple[int, ...] | None)
        >>> [check(each) for each in (None, (1, 2), (1, True), [1])]
        [True, True, False, False]
    """
    if annotation is Any:
        return _accept
    if annotation is None or annotation is type(None):
        return _is_none
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _Union(tuple(map(make_check, inner)))
    if origin is typing.Literal:
        return _Literal(inner)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return _Every(tuple, make_check(inner[0]))
        return _Each(tuple(map(make_check, inner)))
    if origin is frozenset:
        return _Every(frozenset, make_check(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _Pairs(make_check(inner[0]), make_check(inner[1]))
    if origin is not None:
        annotation = origin
    if annotation is float:
        # An annotation of float takes an int, as Python's type checkers do.
        return _Exactly((float, int))
    if annotation is complex:
        return _Exactly((complex, float, int))
    if annotation in (int, bool, str, bytes):
        return _Exactly((annotation,))
    if isinstance(annotation, type):
        return _Instance(annotation)
    raise TypeError(f"no value in a file has the annotation {annotation}")


def _accept(value: Any) -> bool:
    del value
    return True


def _is_none(value: Any) -> bool:
    return value is None


class _Exactly:
    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds

    def __call__(self, value: Any) -> bool:
        return type(value) in self._kinds


class _Instance:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __call__(self, value: Any) -> bool:
        return isinstance(value, self._kind)


class _Literal:
    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    def __call__(self, value: Any) -> bool:
        return any(value == each and type(value) is type(each) for each in self._values)


class _Union:
    def __init__(self, checks: tuple[Check, ...]) -> None:
        self._checks = checks

    def __call__(self, value: Any) -> bool:
        return any(check(value) for check in self._checks)


class _Every:
    def __init__(self, kind: type, check: Check) -> None:
        self._kind, self._check = kind, check

    def __call__(self, value: Any) -> bool:
        return type(value) is self._kind and all(map(self._check, value))


class _Each:
    def __init__(self, checks: tuple[Check, ...]) -> None:
        self._checks = checks

    def __call__(self, value: Any) -> bool:
        if type(value) is not tuple or len(value) != len(self._checks):
            return False
        return all(check(item) for check, item in zip(self._checks, value, strict=True))


class _Pairs:
    def __init__(self, key: Check, value: Check) -> None:
        self._key, self._value = key, value

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(self._key(k) and self._value(v) for k, v in value.items())
