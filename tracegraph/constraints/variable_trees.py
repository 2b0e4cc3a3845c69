"""Variable trees: the leaves of what a variable of the user holds, whatever that is.

Unlike an argument it need not be a tree of JAX, which refuses dicts whose keys have no order, and
fails for good on a list that holds itself.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_LEAVES = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, jax.Array)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
# Of a variable, by the place in it and the value there.
NamedParts = list[tuple[str, Any]]


def list_variable_leaves(
    name: str, value: Any, *, find_more: Callable[[Any], NamedParts] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a variable, each with its name; None is one.

    Those that are deeper come later, so that what is held twice has its shorter name.

    Args:
        name: of the variable.
        value: that it has.
        find_more: returns what else is to be looked at inside of a leaf.

    Example:
        >>> list(list_variable_leaves("w", {1: [2.0], "a": None}))
        [("w['a']", None), ('w[1][0]', 2.0)]
    """
    waiting = collections.deque([(name, value)])
    # It holds them, since a class may make its parts anew.
    seen: dict[int, Any] = {}
    while waiting:
        place, found = waiting.popleft()
        if isinstance(found, _LEAVES):
            yield place, found
            continue
        if id(found) in seen:
            continue
        seen[id(found)] = found
        parts = _open(found)
        if parts is None:
            yield place, found
            parts = find_more(found) if find_more is not None else []
        waiting.extend((place + step, part) for step, part in parts)


def _open(value: Any) -> NamedParts | None:
    """Returns what a node of a tree holds, or None for a leaf."""
    if type(value) in _DICTS:
        return [(f"[{key!r}]", value[key]) for key in _sort(value)]
    if type(value) in (list, tuple):
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    # JAX warns of iterators, which it takes for leaves.
    if isinstance(value, Iterator):
        return None
    try:
        pairs, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    except Exception:  # noqa: BLE001  (it comes from the user's class)
        return None
    is_leaf = len(pairs) == 1 and pairs[0][1] is value
    return None if is_leaf else [(jax.tree_util.keystr(path), each) for path, each in pairs]


def _sort(keys: Any) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:
        return list(keys)
