"""Who says what an op computes: JAX or tracegraph, whose versions are in a key, or other code.

Note [Rules of others]
What XLA is given for an op is not in a program. Where functions of JAX's write it, their names say
enough, for JAX's version is in the key. A package or a user may define a primitive, or register a
rule for one of JAX's, and change it later under the same name; and keys of random numbers may be
drawn from by functions of the user's. Such programs have no key.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from tracegraph.jax_internals import list_lowering_rules

_JAX, _OURS = ("jax", "jaxlib"), ("tracegraph",)
_PLAIN = (bool, int, float, str, bytes)
# Globals of JAX's modules, of the kinds that were asked for, by identity.
_globals_of_jax: dict[int, Any] = {}


def describe_rules(primitive: Any) -> str | None:
    """Returns by which functions of JAX or tracegraph a primitive is lowered, on any platform.

    Args:
        primitive: of JAX's kind.

    Returns:
        None where others have a part in it.

    Example:
        >>> from jax import lax
        >>> "_nary_lower_hlo" in describe_rules(lax.sin_p)
        True
    """
    rules = list_lowering_rules(primitive)
    parts = [part for rule in rules for part in _list_parts(rule, set())]
    # What JAX gives a rule for a primitive of others is theirs: the name of a foreign function.
    packages = _JAX + _OURS if is_defined_by_jax(primitive) else _OURS
    if all(_find_package(part) in packages for part in parts if callable(part)):
        return " ".join(map(_describe_part, parts))
    return None


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
    """Yields a function, and the functions and plain values that are bound in it."""
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
    else:
        yield from [value] if isinstance(value, _PLAIN) else []
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


def _find_package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _describe_part(part: Any) -> str:
    if isinstance(part, _PLAIN):
        return repr(part)
    return f"{part.__module__}.{getattr(part, '__qualname__', type(part).__qualname__)}"
