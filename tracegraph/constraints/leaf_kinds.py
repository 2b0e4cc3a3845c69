"""What a leaf of an argument is: an array, a static leaf, or neither, and then what to do.

As in `jax.jit`, arrays and numbers of Python and NumPy are data. Any other leaf that can be hashed
is static: it belongs to the key of the graph. Leaves that would go stale unseen are refused: arrays
of other libraries, and objects that hold arrays and are hashed by their identity.
"""

from __future__ import annotations

import array
import collections.abc
import dataclasses
import types
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer

from tracegraph.constraints.variable_trees import list_variable_leaves
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl

_NUMBERS = (bool, int, float, complex)
_ARRAY_METHODS = ("__jax_array__", "__array__", "__dlpack__")
# Most leaves are of these types.
_KNOWN_ARRAYS = frozenset((ArrayImpl, Array, np.ndarray, *_NUMBERS))
# A `ShapedArray` is the type of an array in host memory.
_ARRAYS = (jax.Array, jax.Ref, jax.ShapeDtypeStruct, ShapedArray)
# NumPy's scalars that hold no number: texts, bytes, dates and durations.
_STATIC_SCALARS = (np.str_, np.bytes_, np.datetime64, np.timedelta64)
# Generators and coroutines are hashed by identity, and another call would find them at their end.
_USED_UP = (
    collections.abc.Iterator,
    collections.abc.AsyncIterator,
    collections.abc.Awaitable,
)
_BIND = "bind it before the capture: tg.capture(functools.partial(f, name=x))"


def is_array(value: Any) -> bool:
    """True for an array or number that JAX takes."""
    if isinstance(value, np.ndarray | np.generic):
        return _is_known_to_jax(value)
    return isinstance(value, (jax.Array, *_NUMBERS))


def is_static(value: Any) -> bool:
    """True for a leaf that is no array, can be hashed and holds no array that could go stale.

    Example:
        >>> [is_static(leaf) for leaf in ("relu", jnp.sin, 1.5, {1, 2})]
        [True, True, False, False]
    """
    if type(value) in _KNOWN_ARRAYS or isinstance(value, _ARRAYS):
        return False
    if isinstance(value, np.ndarray | np.generic):
        return isinstance(value, _STATIC_SCALARS)
    if isinstance(value, _NUMBERS) or has_array_method(value) or not is_hashable(value):
        return False
    return not isinstance(value, _USED_UP) and not holds_arrays(value)


def is_hashable(value: Any) -> bool:
    """True for what can be part of a key."""
    try:
        hash(value)
    except (TypeError, ValueError):  # That of a memoryview that can be written.
        return False
    # Views of a dict's values are hashed by identity, although they change with it.
    return not isinstance(value, collections.abc.ValuesView)


def has_array_method(value: Any) -> bool:
    """True for what is an array to another library."""
    return any(hasattr(type(value), name) for name in _ARRAY_METHODS)


def holds_arrays(value: Any) -> bool:
    """True for an object known by its identity that holds arrays, and for a closure of a trace."""
    if isinstance(value, types.FunctionType):
        cells = [_read_cell(cell) for cell in value.__closure__ or ()]
        return any(isinstance(held, Tracer) for held in _list_leaves(cells))
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, type | types.ModuleType) or type(value).__hash__ is not object.__hash__:
        return False
    held = _list_leaves(getattr(value, "__dict__", None))
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in held)


def _list_leaves(value: Any) -> list[Any]:
    try:
        return jax.tree_util.tree_leaves(value)
    except Exception:  # noqa: BLE001  (it may come from the user's class; this way is slower)
        return [leaf for _, leaf in list_variable_leaves("", value)]


def describe_refusal(value: Any, *, takes_static: bool) -> tuple[str, str]:
    """Returns why a leaf cannot be an argument, and what to do.

    Args:
        value: neither an array nor, where static leaves are taken, a static leaf.
        takes_static: True when static leaves are taken.
    """
    if isinstance(value, jax.Ref):
        return (
            "a graph reads its arguments and returns new values; it writes to no jax.Ref",
            "pass the array and write the result back: ref[...] = f(ref[...])",
        )
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, _STATIC_SCALARS):
        return f"JAX has no arrays of {value.dtype}", _convert_numpy(value.dtype)
    if has_array_method(value) and not isinstance(value, np.generic):
        return (
            "it is an array of another library, which a key of a graph would freeze unseen",
            "pass jnp.asarray(x)",
        )
    if not is_hashable(value):
        return (
            "what is no array is part of the key of a graph, and this cannot be hashed",
            suggest_hashable(value),
        )
    if isinstance(value, _USED_UP):
        return (
            "it is used up by its first use, so that a later call would find nothing left",
            "await it before the call"
            if isinstance(value, collections.abc.Awaitable)
            else "pass next(x), or list(x), whose items are looked at one by one",
        )
    if holds_arrays(value):
        return (
            "it is known by its identity only, so a change of the arrays that it holds would not "
            "be seen",
            "pass its arrays in a dict, as vars(x), or register its class as a pytree "
            "(jax.tree_util.register_dataclass)",
        )
    assert not takes_static, value
    return (
        "static_leaves='refuse' takes arrays and numbers only",
        "leave static_leaves out, or pass the argument as static: static_argnames=...",
    )


def suggest_hashable(value: Any) -> str:
    """Returns what to pass in the place of an object that cannot be hashed."""
    if isinstance(value, bytearray):
        return "pass bytes(x)"
    if isinstance(value, collections.abc.Set):
        return "pass frozenset(x)"
    if isinstance(value, collections.abc.Mapping):
        return "pass dict(x), whose values are looked at one by one"
    if isinstance(value, list | collections.abc.ValuesView):
        return "pass list(x), whose items are looked at one by one"
    if dataclasses.is_dataclass(value):
        return (
            "register its class as a pytree (jax.tree_util.register_dataclass), or freeze it: "
            "@dataclass(frozen=True)"
        )
    if isinstance(value, array.array | memoryview):
        return "pass np.asarray(x)"
    if type(value).__module__ == "builtins":
        return _BIND
    return f"give its class `__eq__` and `__hash__`, or {_BIND}"


def suggest_static(value: Any) -> str:
    """Returns what to do with a static argument that cannot be hashed."""
    if isinstance(value, jax.Array | np.ndarray):
        return "leave it out of static_argnums and static_argnames: arrays are data"
    if isinstance(value, list) and is_hashable(tuple(value)):
        return "pass tuple(x)"
    return suggest_hashable(value) if isinstance(value, bytearray | set) else _BIND


def _convert_numpy(dtype: np.dtype[Any]) -> str:
    if dtype.names:
        return "pass its fields: {name: x[name] for name in x.dtype.names}"
    if dtype.kind in "Mm":
        return (
            "pass numbers, as (x - x.min()) / np.timedelta64(1, 's'), or x.tolist(), whose items "
            "are static"
        )
    if dtype.kind in "USO":
        return "pass x.tolist(), whose items are looked at one by one"
    if not dtype.isnative:
        return 'pass x.astype(x.dtype.newbyteorder("="))'
    return f"pass x.astype(np.{'complex128' if dtype.kind == 'c' else 'float64'})"


def _is_known_to_jax(value: Any) -> bool:
    # Texts, dates, records, long doubles and foreign byte orders are not.
    try:
        jax.typeof(value)
    except TypeError:
        return False
    return True


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # Not assigned yet.
