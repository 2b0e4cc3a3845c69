"""What differs between two signatures of one function, with the names of its arguments."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.jax_internals import SETTING_NAMES
from tracegraph.tracing.signature import LeafType, Signature

NOTHING = "nothing"

_printer = reprlib.Repr()
_printer.maxstring = _printer.maxother = _printer.maxlong = 60


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between a call and a captured graph.

    Attributes:
        kind: ``shape``, ``dtype``, ``weak type``, ``static value``, ``tree`` or ``setting``;
            ``signature`` for everything else.
        name: of the leaf, argument or setting.
        new: what the call has.
        old: what the graph was captured with.
    """

    kind: str
    name: str
    new: Any
    old: Any

    def __str__(self) -> str:
        new, old = _print(self.new), _print(self.old)
        if new == old:
            return f"{self.name}: another value that prints the same, {new}"
        return f"{self.name}: {new} after {old}"


def find_differences(
    names: Sequence[str], new: Signature, old_names: Sequence[str], old: Signature
) -> list[Difference]:
    """Returns all differences; at least one, if the signatures are not equal.

    Args:
        names: one per dynamic leaf of the call.
        new: the call's signature.
        old_names: one per dynamic leaf of the captured graph.
        old: the graph's signature.

    Example:
        >>> leaves = [LeafType((size,), np.dtype("f4"), False) for size in (3, 4)]
        >>> new, old = (Signature(None, (leaf,), (), (), (), ()) for leaf in leaves)
        >>> print(*find_differences(["x"], new, ["x"], old))
        x: f32[3] after f32[4]
    """
    found = [
        *_compare_settings(new, old),
        *_compare_statics(new, old),
        *_compare_leaves(dict(zip(names, new.leaves, strict=True)), old_names, old),
    ]
    if not found and new.tree != old.tree:
        found.append(_compare_trees(names, new.tree, old.tree, 0))
    if not found:
        fields = [field.name for field in dataclasses.fields(Signature)]
        found += [
            Difference("signature", name, getattr(new, name), getattr(old, name))
            for name in fields
            if getattr(new, name) != getattr(old, name)
        ]
    return found


def _compare_settings(new: Signature, old: Signature) -> Iterator[Difference]:
    for name, one, other in zip(SETTING_NAMES, new.settings, old.settings, strict=False):
        if one != other:
            yield Difference("setting", name, one, other)


def _compare_statics(new: Signature, old: Signature) -> Iterator[Difference]:
    one, other = _list_statics(new), _list_statics(old)
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            value, before = (each[key][0] if key in each else NOTHING for each in (one, other))
            yield Difference("static value", f"static argument {key}", value, before)


def _list_statics(signature: Signature) -> dict[Any, tuple[Any, Any]]:
    """Returns the value of each static argument, and what distinguishes it from equal ones."""
    kinds = signature.static_kinds
    return {key: (value, kind) for (key, value), kind in zip(signature.statics, kinds, strict=True)}


def _compare_leaves(
    leaves: dict[str, LeafType], old_names: Sequence[str], old: Signature
) -> Iterator[Difference]:
    before = dict(zip(old_names, old.leaves, strict=True))
    for name in dict.fromkeys([*leaves, *before]):
        one, other = leaves.get(name), before.get(name)
        if one != other:
            yield Difference(_find_kind(one, other), name, one or NOTHING, other or NOTHING)


def _find_kind(one: LeafType | None, other: LeafType | None) -> str:
    if one is None or other is None:
        return "tree"
    if one.shape != other.shape:
        return "shape"
    return "dtype" if one.dtype != other.dtype else "weak type"


def _compare_trees(names: Sequence[str], new: Any, old: Any, start: int) -> Difference:
    """Returns the first node that differs; the leaves of both trees have the same names."""
    pairs = list(zip(new.children(), old.children(), strict=False))
    if new.node_data() == old.node_data() and new.num_nodes == old.num_nodes:
        for one, other in pairs:
            if one != other:
                return _compare_trees(names, one, other, start)
            start += one.num_leaves
    place = f"the tree at {names[start]}" if new.num_leaves else "a tree without leaves"
    return Difference("tree", place, new, old)


def _print(value: Any) -> str:
    if value is NOTHING:
        return NOTHING
    if isinstance(value, LeafType):
        return print_leaf_type(value.shape, value.dtype, value.weak_type)
    return print_value(value)


def print_value(value: Any) -> str:
    """Returns a value as Python writes it, a long one shortened; never fails.

    Example:
        >>> print_value("kind")
        "'kind'"
    """
    return _printer.repr(value)
