"""Static values and other values of Python: to records that a file holds, and back.

Note [Names in a file]. A class or a function is written by its name. Who loads the file has it, or
passes it: it is looked up among the types that are registered with JAX, in the modules that are
imported, and among what was passed. Nothing is imported, called or made because a file says so:
classes of values are found, and their fields set, without a call of their constructors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from tracegraph.jax_internals import find_key_dtype, list_registered_types
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.reports.differences import print_value
from tracegraph.runtime.jax_interop import KeyTy
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.tracing.static_leaves import StaticLeaf

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MISSING: Any = object()
# Deeper values than anybody writes would only exhaust the stack.
MAX_DEPTH = 16


@dataclasses.dataclass(frozen=True)
class NamedObject:
    """A class, a function or an object that a module has, by its name.

    Attributes:
        module: as ``jax.numpy``.
        name: in it, as ``Outer.Inner``.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(frozen=True)
class EnumMember:
    """A member of an enum."""

    kind: NamedObject
    name: str


@dataclasses.dataclass(frozen=True)
class ListValue:
    """A list."""

    items: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class FieldsValue:
    """An object of a dataclass or a named tuple, with all of its fields."""

    kind: NamedObject
    fields: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class KeyDtype:
    """The dtype of typed PRNG keys of an implementation, as ``threefry2x32``."""

    implementation: str


VALUE_TYPES: tuple[type, ...] = (NamedObject, EnumMember, ListValue, FieldsValue, KeyDtype)
_FLOAT0 = NamedObject("jax.dtypes", "float0")


class UnknownNameError(Exception):
    """A file names a class, a function or an object that this process does not have.

    Args:
        name: as it was when the file was written.
        change: how what has the name now differs; empty where nothing has it.
    """

    def __init__(self, name: NamedObject, change: str = "") -> None:
        super().__init__(str(name), change)
        self.name, self.change = name, change


class Names:
    """Finds what a file names, see Note [Names in a file].

    Args:
        given: classes and functions that the user passes; these come first.

    Example:
        >>> Names().find(NamedObject("jax.numpy", "sin")) is jnp.sin
        True
    """

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self._given = list(given)

    def find(self, named: NamedObject) -> Any:
        """Returns what has the name.

        Raises:
            UnknownNameError: nothing has it.
        """
        found = self._find_given(named)
        if found is _MISSING:
            found = _find_in_process(named)
        if found is _MISSING:
            raise UnknownNameError(named)
        return found

    def _find_given(self, named: NamedObject) -> Any:
        alike = [each for each in self._given if getattr(each, "__qualname__", "") == named.name]
        exact = [each for each in alike if getattr(each, "__module__", "") == named.module]
        # A script that is run is called `__main__`, and has another name where it is imported.
        return next(iter(exact or alike), _MISSING)


def pack_value(value: Any) -> Any:
    """Returns a value as what a `RecordCodec` with `VALUE_TYPES` writes.

    Raises:
        SaveProblem: it holds what only this process has.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple(map(pack_value, value))
    if kind is list:
        return ListValue(tuple(map(pack_value, value)))
    if kind is frozenset:
        return frozenset(map(pack_value, value))
    if kind is dict:
        return {pack_value(key): pack_value(each) for key, each in value.items()}
    if isinstance(value, enum.Enum):
        return EnumMember(_name_kind(kind, value), value.name)
    if isinstance(value, np.dtype | KeyTy):
        return pack_dtype(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(each.name for each in dataclasses.fields(value))
    elif isinstance(value, tuple):
        names = getattr(kind, "_fields", ())
    else:
        return _name(value)
    fields = tuple((name, pack_value(getattr(value, name))) for name in names)
    return FieldsValue(_name_kind(kind, value), fields)


def unpack_value(packed: Any, names: Names, depth: int = MAX_DEPTH) -> Any:
    """Returns the value of what `pack_value` returned.

    Args:
        packed: as it came from a file.
        names: of classes and functions.
        depth: how deep it may be nested.

    Raises:
        ContentProblem: it is not as `pack_value` writes it.
        UnknownNameError: it names what this process does not have.
    """
    kind = type(packed)
    if kind in _PLAIN or isinstance(packed, np.dtype):
        return packed
    if not depth:
        raise ContentProblem("a value", f"it is nested more than {MAX_DEPTH} deep")
    unpack = functools.partial(unpack_value, names=names, depth=depth - 1)
    if kind is tuple:
        return tuple(map(unpack, packed))
    if kind is frozenset:
        return frozenset(map(unpack, packed))
    if kind is ListValue:
        return list(map(unpack, packed.items))
    if isinstance(packed, Mapping):
        return {key: unpack(each) for key, each in packed.items()}
    if kind is NamedObject:
        return jax.dtypes.float0 if packed == _FLOAT0 else names.find(packed)
    if kind is KeyDtype:
        return _find_key_dtype(packed.implementation)
    if kind is EnumMember:
        return _find_member(packed, names)
    if kind is FieldsValue:
        return _make_fields(packed, names, [(name, unpack(each)) for name, each in packed.fields])
    raise ContentProblem("a value", f"a {kind.__name__} stands for none")


def pack_static(value: Any) -> Any:
    """Does what `pack_value` does for a static value, which must be equal to itself when loaded.

    Raises:
        SaveProblem: it would not be, or it holds what only this process has.
    """
    packed = pack_value(value)
    try:
        is_same = StaticLeaf(unpack_value(packed, Names())) == StaticLeaf(value)
    except (UnknownNameError, ContentProblem, TypeError):
        is_same = False
    if not is_same:
        raise SaveProblem(f"{_describe(value)} is not equal to what a file would hold of it")
    return packed


def pack_dtype(dtype: Any) -> Any:
    """Returns a dtype of JAX: of NumPy, of typed keys, or ``float0``."""
    if isinstance(dtype, KeyTy):
        return KeyDtype(dtype._impl.name)
    return _FLOAT0 if dtype == jax.dtypes.float0 else np.dtype(dtype)


def unpack_dtype(packed: Any) -> Any:
    """Returns the dtype of what `pack_dtype` returned.

    Raises:
        ContentProblem: it is none, or no implementation of keys has this name.
    """
    if not isinstance(packed, np.dtype | KeyDtype) and packed != _FLOAT0:
        raise ContentProblem("a dtype", f"a {type(packed).__name__} stands for none")
    return unpack_value(packed, Names())


def name_object(value: Any) -> NamedObject | None:
    """Returns the name by which this process finds an object; None if it does not."""
    module, name = (getattr(value, each, None) for each in ("__module__", "__qualname__"))
    if isinstance(module, str) and isinstance(name, str):
        named = NamedObject(module, name)
        return named if _find_in_process(named) is value else None
    # A single object of its kind, as a sentinel, is in the module of its class.
    held = getattr(sys.modules.get(type(value).__module__), "__dict__", {})
    found = next((key for key, each in held.items() if each is value), None)
    return None if found is None else NamedObject(type(value).__module__, found)


def _name(value: Any) -> NamedObject:
    named = name_object(value)
    if named is None:
        raise SaveProblem(
            f"{_describe(value)} is not a plain value, and no module has it by a name"
        )
    return named


def _name_kind(kind: type, value: Any) -> NamedObject:
    named = name_object(kind)
    if named is None:
        raise SaveProblem(f"{_describe(value)} is of a class that no module has by its name")
    return named


def _find_in_process(named: NamedObject) -> Any:
    # The one that was registered last: a cell of a notebook may define a class again.
    for kind in reversed(list_registered_types()):
        if (kind.__module__, kind.__qualname__) == (named.module, named.name):
            return kind
    # By `__dict__`: a look-up of an attribute may run code of the module or class.
    found: Any = sys.modules.get(named.module)
    for part in named.name.split("."):
        if not isinstance(found, type | types.ModuleType):
            return _MISSING
        found = vars(found).get(part, _MISSING)
    return found


def _find_member(packed: EnumMember, names: Names) -> Any:
    kind = names.find(packed.kind)
    members = kind.__members__ if isinstance(kind, enum.EnumMeta) else {}
    if packed.name not in members:
        raise UnknownNameError(packed.kind, f"has no member {packed.name[:80]}")
    return members[packed.name]


def _make_fields(packed: FieldsValue, names: Names, fields: list[tuple[str, Any]]) -> Any:
    """Returns an object with these fields; no code of its class runs."""
    kind: Any = names.find(packed.kind)
    wanted: tuple[str, ...] | None = None
    is_tuple = isinstance(kind, type) and issubclass(kind, tuple)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        wanted = tuple(each.name for each in dataclasses.fields(kind))
    elif is_tuple:
        wanted = getattr(kind, "_fields", None)
    if wanted != tuple(name for name, _ in fields):
        raise UnknownNameError(packed.kind, "has other fields than when the file was saved")
    values: list[Any] = [value for _, value in fields]
    if is_tuple:
        new: Any = tuple.__new__
        return new(kind, values)
    try:
        made = object.__new__(kind)
        for name, value in fields:
            object.__setattr__(made, name, value)
    except (TypeError, AttributeError) as error:
        raise ContentProblem(f"a value of {packed.kind}", f"it cannot be made: {error}") from None
    return made


def _find_key_dtype(implementation: str) -> Any:
    dtype = find_key_dtype(implementation)
    if dtype is None:
        problem = f"no implementation of PRNG keys is called {implementation[:80]!r}"
        raise ContentProblem("a dtype", problem)
    return dtype


def _describe(value: Any) -> str:
    return f"{print_value(value)} (of type {type(value).__qualname__})"
