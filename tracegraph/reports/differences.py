"""What differs between two signatures of one function, with the names of its arguments."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.constraints.spread import print_sharding
from tracegraph.jax_internals import list_setting_names
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import LeafType, Signature, name_static_values
from tracegraph.tracing.static_leaves import StaticLeaf, wrap_static_leaves

NOTHING = "nothing"

_printer = reprlib.Repr()
_printer.maxstring = _printer.maxother = _printer.maxlong = 60


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between a call and a captured graph.

    Attributes:
        kind: ``shape``, ``dtype``, ``weak type``, ``memory``, ``sharding``, ``static value``,
            ``tree`` or ``setting``; ``signature`` for everything else.
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

    @property
    def side_by_side(self) -> str:
        """The difference for a graph that is not captured anew, as ``x: wanted 1, got 2``."""
        return f"{self.name}: wanted {_print(self.old)}, got {_print(self.new)}"


def find_differences(
    prepared: PreparedCall, old_names: Sequence[str], old: Signature
) -> list[Difference]:
    """Returns all differences; at least one, if the signatures are not equal.

    Args:
        prepared: the call.
        old_names: one per dynamic leaf of the captured graph.
        old: the graph's signature.
    """
    new = prepared.signature
    found = [
        *_compare_settings(new, old),
        *_compare_statics(prepared, old),
        *_compare_leaves(dict(zip(prepared.names, new.leaves, strict=True)), old_names, old),
    ]
    if not found and new.tree != old.tree:
        found.append(_compare_trees(prepared.names, new.tree, old.tree, 0))
    if not found:
        fields = [field.name for field in dataclasses.fields(Signature)]
        found += [
            Difference("signature", name, getattr(new, name), getattr(old, name))
            for name in fields
            if getattr(new, name) != getattr(old, name)
        ]
    return found


def _compare_settings(new: Signature, old: Signature) -> Iterator[Difference]:
    for name, one, other in zip(list_setting_names(), new.settings, old.settings, strict=False):
        if one != other:
            yield Difference("setting", name, one, other)


def _compare_statics(prepared: PreparedCall, old: Signature) -> Iterator[Difference]:
    """Compares static arguments and static leaves."""
    one, other = _wrap(prepared.list_static_values()), _wrap(_list_static_values(prepared, old))
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            value, before = (each[name].value if name in each else NOTHING for each in (one, other))
            yield Difference("static value", name, value, before)


def _wrap(values: Sequence[tuple[str, Any]]) -> dict[str, StaticLeaf]:
    """Returns values that are equal only if a graph may serve both: 1 and True are not."""
    return {name: StaticLeaf(value) for name, value in values}


def _list_static_values(prepared: PreparedCall, old: Signature) -> list[tuple[str, Any]]:
    """Returns the static values of another signature, named as those of the call."""
    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in old.leaves]
    args, kwargs = wrap_static_leaves(jax.tree_util.tree_unflatten(old.tree, types))
    places = {"positions": old.positions, "statics": old.statics}
    bound = dataclasses.replace(prepared.bound, args=args, kwargs=kwargs, **places)
    return name_static_values(prepared.function, prepared.options, bound)


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
    if one.dtype != other.dtype:
        return "dtype"
    if one.weak_type != other.weak_type:
        return "weak type"
    return "memory" if one.is_on_host != other.is_on_host else "sharding"


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
        text = print_leaf_type(value.shape, value.dtype, value.weak_type)
        text += " in host memory" if value.is_on_host else ""
        return text if value.sharding is None else f"{text} as {print_sharding(value.sharding)}"
    return print_value(value)


def print_value(value: Any) -> str:
    """Returns a value as Python writes it, a long one shortened; never fails.

    Example:
        >>> print_value("kind")
        "'kind'"
    """
    return _printer.repr(value)
