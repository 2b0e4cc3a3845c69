"""Slots of a call that is spread over several devices: which values its program takes as they are.

Nothing is copied in: XLA's program reads each device's part where it is. So a slot only tells if a
value has the type that the program was compiled for.

Note [Types by identity]
JAX shares the objects that say an array's type and sharding between arrays, so a call is usually
accepted by comparing identities, all of a tree at once. XLA's own call would take a weak type for a
strong one, and takes its time to refuse another sharding, so neither is left to it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.jax_interop import ArrayImpl, to_plain, unwrap_key
from tracegraph.tracing.signature import LeafType, describe_placed_leaf
from tracegraph.tracing.static_leaves import wrap_static_leaves

_get_type = operator.attrgetter("aval", "sharding")
_is_deleted = ArrayImpl.is_deleted
_PLAIN = {ArrayImpl}


class SpreadSlot:
    """The slot of one dynamic argument: a tree of arrays.

    Args:
        structure: of the tree, static leaves wrapped.
        leaves: their types.
        wraps: True when the arguments have static leaves.
    """

    __slots__ = ("_known", "_leaves", "_structure", "_wraps")

    def __init__(self, structure: Any, leaves: Sequence[LeafType], *, wraps: bool) -> None:
        self._structure, self._wraps, self._leaves = structure, wraps, leaves
        # Identities of the types of the last call, and what keeps them from being used again.
        self._known: tuple[list[int], list[Any]] = ([], [])

    def collect(self, value: Any, found: list[Any]) -> bool:
        """Adds the leaves to what was found; False for a value of another signature."""
        if self._wraps:
            value = wrap_static_leaves(value)
        leaves, structure = jax.tree_util.tree_flatten(value)
        if structure != self._structure:
            return False
        # See Note [Types by identity].
        is_plain = set(map(type, leaves)) <= _PLAIN
        types = list(itertools.chain.from_iterable(map(_get_type, leaves))) if is_plain else []
        if is_plain and [*map(id, types)] == self._known[0]:
            found += leaves
            return not any(map(_is_deleted, leaves))
        if not all(map(_takes, self._leaves, leaves)):
            return False
        if is_plain:
            self._known = ([*map(id, types)], types)
        found += leaves
        return True

    def forget(self) -> None:
        """Has nothing to forget: every value is looked at."""


def _takes(leaf: LeafType, value: Any) -> bool:
    """True for a value of this type, and in this place, that is not deleted."""
    array = unwrap_key(value)
    if isinstance(array, Tracer):
        return False
    is_array = isinstance(array, jax.Array)
    if is_array and (array.is_deleted() or (array.committed and leaf.sharding is None)):
        return False
    try:
        return describe_placed_leaf(value) == leaf
    except (TypeError, OverflowError):
        return False


def consume_leaves(leaves: Sequence[Any], donations: Sequence[Donation]) -> None:
    """Deletes what was donated and XLA has not taken: after the call, as it may fail.

    Args:
        leaves: that were donated.
        donations: what says so, one per leaf.
    """
    if set(map(type, leaves)) <= _PLAIN and all(map(_is_deleted, leaves)):
        return
    for leaf, donation in zip(leaves, donations, strict=True):
        array = unwrap_key(leaf)
        if type(array) is Array:
            array.consume(donation)
        elif isinstance(array, ArrayImpl) and not array.is_deleted():
            array.delete()


def read_leaves(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns the leaves as XLA's program takes them: a graph's arrays as plain ones."""
    return leaves if set(map(type, leaves)) <= _PLAIN else [*map(_read_leaf, leaves)]


def _read_leaf(value: Any) -> Any:
    return to_plain(value) if type(unwrap_key(value)) is Array else value
