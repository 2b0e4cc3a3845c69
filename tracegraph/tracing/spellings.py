"""Spellings: the ways to write a call that bind the same arguments, as `f(x)` and `f(x=x)`.

Note [Spellings]. A call is bound in one form: what can be given by position is. An argument that is
left out keeps its default as a Python value, as under `jax.jit`, so that the function may branch on
it. A graph that was captured without the argument also takes a call that gives the default, and one
that was captured with it takes a call that leaves it out. Only the function's own parameters count,
not those of what it wraps: `jax.vmap(f)` treats keywords differently, although it looks like `f`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegraph.options import Options
from tracegraph.tracing.static_leaves import StaticLeaf

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class Spellings:
    """The parameters of a function that a call can write in more than one way.

    Attributes:
        names: of the parameters that can be given by position; None for those that cannot be given
            by keyword.
        defaults: by the key of the parameter, but for donated ones.
    """

    names: tuple[str | None, ...]
    defaults: Mapping[int | str, Any]

    def normalize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the same call with what can be given by position given so.

        Example:
            >>> Spellings(("x", "y"), {}).normalize((1,), {"y": 2, "z": 3})
            ((1, 2), {'z': 3})
        """
        if not kwargs:
            return args, kwargs
        rest = dict(kwargs)
        moved = []
        for name in self.names[len(args) :]:
            if name is None or name not in rest:
                break
            moved.append(rest.pop(name))
        return (*args, *moved), rest

    def find_key(self, key: int | str) -> int | str:
        """Returns the key of a parameter: its position if it has one, else its name."""
        is_positional = isinstance(key, str) and key in self.names
        return self.names.index(key) if is_positional else key

    def join(
        self, keys: Sequence[int | str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Returns the arguments of a call by the keys of others; None if they are not the same.

        Args:
            keys: of the parameters that a graph was captured with, see `find_key`.
            args: positional arguments of any spelling.
            kwargs: keyword arguments.

        Example:
            >>> spellings = Spellings(("x", "y"), {1: 2.0})
            >>> spellings.join([0], (5,), {"y": 2.0}), spellings.join([0], (5,), {"y": 3.0})
            ((5,), None)
        """
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update((self.find_key(name), value) for name, value in kwargs.items())
        if len(given) != len(args) + len(kwargs):
            return None
        joined = []
        for key in keys:
            value = given.pop(key, _MISSING)
            if value is _MISSING:
                value = self.defaults.get(key, _MISSING)
            if value is _MISSING:
                return None
            joined.append(value)
        is_default = all(key in self.defaults for key in given) and all(
            _is_same(value, self.defaults[key]) for key, value in given.items()
        )
        return tuple(joined) if is_default else None


def read_spellings(function: Callable[..., Any], options: Options) -> Spellings:
    """Returns the spellings of a function; none but the given one if it has no signature."""
    return make_spellings(read_own_parameters(function), options)


def read_own_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a function, not of one that it wraps; none without a signature."""
    try:
        return list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except ValueError:
        return []


def make_spellings(parameters: Sequence[inspect.Parameter], options: Options) -> Spellings:
    """Returns the spellings of a function with these parameters.

    Args:
        parameters: its own.
        options: how it is captured.
    """
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in by_position]
    named: dict[int | str, inspect.Parameter] = dict(enumerate(positional))
    named |= {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    donated = options.donate_argnums | options.donate_argnames
    defaults = {
        key: p.default
        for key, p in named.items()
        if p.default is not p.empty and key not in donated
    }
    names = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else None for p in positional]
    return Spellings(tuple(names), defaults)


def _is_same(value: Any, default: Any) -> bool:
    """True for the default itself, or for an equal value of its kind that can be hashed."""
    if value is default:
        return True
    try:
        return hash(value) == hash(default) and StaticLeaf(value) == StaticLeaf(default)
    except TypeError:
        return False
