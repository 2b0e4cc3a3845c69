"""The names of closed-over arrays: those of the variables that hold them, as ``params['w']``.

These are what the captured function closes over or reads from its module, with its defaults, and
then what the user's functions among them do. Attributes of the user's objects are parts of these
variables, as ``model.layers[0].w``; those of other libraries' objects are not looked at.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tracegraph.constraints.constants import identify
from tracegraph.constraints.variable_trees import list_variable_leaves
from tracegraph.runtime.source_lines import is_own_file

# What a class has for its objects, and no data.
_DESCRIPTORS = (types.FunctionType, classmethod, staticmethod, property, types.MemberDescriptorType)


def name_arrays(function: Callable[..., Any], arrays: Sequence[Any]) -> list[str]:
    """Returns a name for each array: that of the variable that the function has it from.

    Args:
        function: the captured one.
        arrays: that it closes over.
    """
    places: dict[Any, str] = {}
    owners: dict[str, Any] = {}
    for name, leaf in _list_held(function):
        # Keys of a dict may print alike.
        if name and owners.setdefault(name, identify(leaf)) == identify(leaf):
            places.setdefault(identify(leaf), name)
    names = [places.get(identify(each), f"constant {n}") for n, each in enumerate(arrays)]
    # One array may be in two variables, but two arrays are in no one place.
    assert len(set(names)) == len(names), names
    return names


def list_host_arrays(function: Callable[..., Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the arrays of NumPy that a function's variables hold."""
    return [leaf for _, leaf in _list_held(function) if isinstance(leaf, np.ndarray)]


def list_leaves(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the leaves of variables, each with its name: that of the variable, and the place."""
    return [
        (place, leaf)
        for name, value in items
        for place, leaf in list_variable_leaves(name, value, find_more=_find_parts)
        if leaf is not None
    ]


def _list_held(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the leaves of the variables that a function closes over or reads, with names.

    Those of the user's functions among them follow; of two variables of one name the second has no
    name.
    """
    held, owners, function = _open_function(function)
    leaves, functions, seen = list_leaves(held.items()), [function], set[int]()
    functions += _list_functions([*owners, *(leaf for _, leaf in leaves)])
    for each in functions:
        plain = inspect.unwrap(each)
        is_new = isinstance(plain, types.FunctionType) and id(plain) not in seen
        if not is_new or not (is_own_file(plain.__code__.co_filename) or each is function):
            continue
        seen.add(id(plain))
        for variable, value in _list_variables(plain).items():
            is_first = variable not in held
            held.setdefault(variable, value)
            found = list_leaves([(variable, value)])
            leaves += [(place if is_first else "", leaf) for place, leaf in found]
            functions += _list_functions(leaf for _, leaf in found)
    return leaves


def _list_functions(leaves: Iterable[Any]) -> list[Any]:
    """Returns the functions among leaves, and those of the user's classes, that objects have."""
    found: list[Any] = []
    for leaf in leaves:
        kinds = (leaf if isinstance(leaf, type) else type(leaf)).__mro__
        members = [
            each for kind in kinds if _is_own(kind.__module__) for each in vars(kind).values()
        ]
        for each in (leaf, *members):
            inner = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
            if callable(inner):
                found.append(inner)
    return found


def _open_function(function: Any) -> tuple[dict[str, Any], list[Any], Any]:
    """Returns what partials, methods and callable objects hold by name, and the function inside.

    Between the two are the objects that methods are of.
    """
    held: dict[str, Any] = {}
    owners: list[Any] = []
    while not isinstance(function, types.FunctionType):
        call = getattr(type(function), "__call__", None)  # noqa: B004
        if isinstance(function, functools.partial):
            held |= {**function.keywords, "args": function.args}
            function = function.func
        elif isinstance(function, types.MethodType):
            held["self"] = _list_attributes(function.__self__)
            owners.append(function.__self__)
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(call, types.FunctionType):
            held["self"] = _list_attributes(function)
            owners.append(function)
            function = call
        else:
            break
    return held, owners, function


def _list_variables(function: types.FunctionType) -> dict[str, Any]:
    """Returns what a function and those defined in it read from around them, and its defaults."""
    names, codes = set[str](), [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    read = {
        name: function.__globals__[name] for name in sorted(names) if name in function.__globals__
    }
    # Of a module only what is read; it has much else.
    of_modules = {
        f"{name}.{attribute}": vars(module)[attribute]
        for name, module in read.items()
        if isinstance(module, types.ModuleType) and _is_own(module.__name__)
        for attribute in sorted(names & vars(module).keys())
    }
    return {
        **read,
        **of_modules,
        **inspect.getclosurevars(function).nonlocals,
        **_list_defaults(function),
    }


def _list_defaults(function: types.FunctionType) -> dict[str, Any]:
    given = function.__defaults__ or ()
    count = function.__code__.co_argcount
    names = function.__code__.co_varnames[count - len(given) : count]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def _find_parts(leaf: Any) -> list[tuple[str, Any]]:
    """Returns what else a leaf holds, where it is a function, an object or a class of the user."""
    if isinstance(leaf, functools.partial):
        return [(".func", leaf.func), (".args", leaf.args), (".keywords", leaf.keywords)]
    if isinstance(leaf, types.MethodType):
        return [(".__self__", leaf.__self__)]
    kind = leaf if isinstance(leaf, type | types.FunctionType) else type(leaf)
    if not _is_own(kind.__module__) and not isinstance(leaf, types.SimpleNamespace):
        return []
    return [(f".{name}", value) for name, value in _list_attributes(leaf).items()]


def _list_attributes(value: Any) -> dict[str, Any]:
    """Returns the data of an object, with that of its classes, without computing any."""
    found: dict[str, Any] = {}
    for kind in reversed((value if isinstance(value, type) else type(value)).__mro__):
        if not _is_own(kind.__module__):
            continue
        found |= {
            name: each
            for name, each in vars(kind).items()
            if not name.startswith("__") and not isinstance(each, _DESCRIPTORS)
        }
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            found[slot] = getattr(value, slot, None)
    if not isinstance(value, type):
        found |= getattr(value, "__dict__", {})
    found.pop("__wrapped__", None)
    return found


def _is_own(module: str | None) -> bool:
    """True for a module that the user wrote."""
    if module is None or module in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return is_own_file(file or "<unknown>")
