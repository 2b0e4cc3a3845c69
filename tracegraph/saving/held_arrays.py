"""The names of closed-over arrays: those of the variables that hold them, as ``params['w']``.

These are what the captured function closes over or reads from its module, and then what the user's
functions among them do.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from tracegraph.constraints.constants import identify
from tracegraph.runtime.source_lines import is_own_file


def name_arrays(function: Callable[..., Any], arrays: Sequence[Any]) -> list[str]:
    """Returns a name for each array: that of the variable that the function has it from.

    Args:
        function: the captured one.
        arrays: that it closes over.
    """
    places = {identify(leaf): name for name, leaf in _list_held(function)}
    names = [places.get(identify(each), f"constant {n}") for n, each in enumerate(arrays)]
    # One array may be in two variables, but two arrays are in no one place.
    assert len(set(names)) == len(names), names
    return names


def list_identities(function: Callable[..., Any]) -> set[Any]:
    """Returns what tells apart the arrays that a function's variables hold."""
    return {identify(leaf) for _, leaf in _list_held(function)}


def _list_held(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the leaves of the variables that a function closes over or reads, with names.

    Those of the user's functions among them follow; of two variables of one name the first counts.
    """
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {**function.keywords, "args": function.args}
        function = function.func
    if isinstance(function, types.MethodType):
        held["self"] = vars(function.__self__) if hasattr(function.__self__, "__dict__") else None
        function = function.__func__
    functions, seen = [function], set[int]()
    for each in functions:
        plain = inspect.unwrap(each)
        is_new = isinstance(plain, types.FunctionType) and id(plain) not in seen
        if not is_new or not (is_own_file(plain.__code__.co_filename) or each is function):
            continue
        seen.add(id(plain))
        found = _list_variables(plain)
        held = {**found, **held}
        functions += [value for value in found.values() if callable(value)]
    return list_leaves(held.items())


def _list_variables(function: types.FunctionType) -> dict[str, Any]:
    """Returns what a function and those defined in it read from around them."""
    names, codes = set[str](), [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    read = {
        name: function.__globals__[name] for name in sorted(names) if name in function.__globals__
    }
    return {**read, **inspect.getclosurevars(function).nonlocals}


def list_leaves(items: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    """Returns the leaves of trees, each with its name: that of its tree, and the path in it."""
    return [
        (f"{name}{jax.tree_util.keystr(path)}", leaf)
        for name, tree in items
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
