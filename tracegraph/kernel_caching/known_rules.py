"""Who says what an op computes: JAX, tracegraph, an installed package, or other code.

Note [Rules of others]
What XLA is given for an op is not in a program. Where functions of JAX's write it, their names say
enough, for JAX's version is in the key. A user may define a primitive, or register a rule for one
of JAX's, and change it later under the same name; and keys of random numbers may be drawn from by
functions of the user's. Such programs have no key. Rules of an installed package, as Equinox has
for its loops, are what the package's files say, which are digested, with the versions of all that
they may call; unless a function of theirs holds an object, which may come from anywhere.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from tracegraph.jax_internals import list_lowering_rules
from tracegraph.kernel_caching.surroundings import describe_package

_JAX, _OURS = ("jax", "jaxlib"), ("tracegraph",)
_PLAIN = (type(None), bool, int, float, str, bytes)
_DEFINED = (types.FunctionType, types.BuiltinFunctionType, type)
# Globals of JAX's modules, of the kinds that were asked for, by identity.
_globals_of_jax: dict[int, Any] = {}


def describe_rules(primitive: Any) -> str | None:
    """Returns by which functions a primitive is lowered, on any platform.

    Args:
        primitive: of JAX's kind.

    Returns:
        None where a user has a part in it, see Note [Rules of others].

    Example:
        >>> from jax import lax
        >>> "_nary_lower_hlo" in describe_rules(lax.sin_p)
        True
    """
    rules = list_lowering_rules(primitive)
    parts = [part for rule in rules for part in _list_parts(rule, set())]
    packages = {_find_package(part) for part in parts if callable(part)}
    # What JAX gives a rule for a primitive of others is theirs: the name of a foreign function.
    known = _JAX + _OURS if is_defined_by_jax(primitive) else _OURS
    versions: list[str | None] = []
    if not packages.issubset(known):
        versions = [describe_package(name) for name in sorted(packages.difference(_JAX, _OURS))]
        if not versions or None in versions or not all(map(_is_told_by_files, parts)):
            return None
    texts = [_describe_part(part) for part in parts if callable(part) or isinstance(part, _PLAIN)]
    return " ".join([*texts, *map(str, versions)])


@functools.lru_cache(maxsize=4096)
def is_defined_by_jax(value: Any) -> bool:
    """True for a primitive, or a kind of random keys, that a module of JAX's has as a global.

    Args:
        value: is hashable.
    """
    if id(value) not in _globals_of_jax:
        # The first of its kind, or of a module that was imported since, or not JAX's.
        found = sys.modules.items()
        modules = [each for name, each in list(found) if name.partition(".")[0] in _JAX]
        values = (each for module in modules for each in list(vars(module).values()))
        _globals_of_jax.update((id(each), each) for each in values if type(each) is type(value))
    return id(value) in _globals_of_jax


def _list_parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a function, and the functions and values that are bound in it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif callable(value):
        yield value
        parts = [getattr(value, "__wrapped__", None), *_list_closed_over(value)]
        parts += [*(getattr(value, "__defaults__", None) or ())]
        parts += [*(getattr(value, "__kwdefaults__", None) or {}).values()]
    else:
        yield value
        return
    for part in parts:
        yield from _list_parts(part, seen)


def _list_closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # Nothing is in it yet.
            continue


def _is_told_by_files(part: Any) -> bool:
    """True for a plain value, what a module defines, and JAX's wrappers of it; not for objects."""
    if isinstance(part, (*_PLAIN, *_DEFINED)):
        return True
    return hasattr(part, "__wrapped__") and _find_package(type(part)) in (*_JAX, "functools")


def _find_package(function: Any) -> str:
    # `functools.wraps` gives a function the module of another one, but not its globals.
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return str(module or getattr(function, "__module__", "")).partition(".")[0]


def _describe_part(part: Any) -> str:
    if isinstance(part, _PLAIN):
        return repr(part)
    return f"{part.__module__}.{getattr(part, '__qualname__', type(part).__qualname__)}"
