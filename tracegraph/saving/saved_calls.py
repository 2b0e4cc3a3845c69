"""What a graph takes and returns: to records that a file holds, and back."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tracegraph.jax_internals import make_array_aval
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.probing.collect_probes import ProbeSpec
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.saving.plain_values import (
    Names,
    pack_dtype,
    pack_static,
    unpack_dtype,
    unpack_value,
)
from tracegraph.saving.saved_settings import Setting, pack_settings, unpack_settings
from tracegraph.saving.saved_trees import SavedTree, join_trees, pack_tree, unpack_tree
from tracegraph.tracing.call_spec import CallSpec, ResultSpec
from tracegraph.tracing.prepared_call import ArgumentSpec
from tracegraph.tracing.signature import LeafType, Signature
from tracegraph.tracing.spellings import Spellings
from tracegraph.tracing.static_leaves import find_static_kind


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """The type of an array.

    Attributes:
        shape: of it.
        dtype: see `pack_dtype`.
        weak_type: JAX's.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool


@dataclasses.dataclass(frozen=True)
class SavedArgument:
    """A dynamic argument; the attributes are those of an `ArgumentSpec`."""

    key: int | str
    tree: SavedTree
    is_donated: bool


@dataclasses.dataclass(frozen=True)
class SavedCall:
    """The calls that a graph takes, as of a `CallSpec`.

    More than six fields because it is all that is known of the arguments.

    Attributes:
        arguments: the dynamic ones.
        leaves: one per dynamic leaf.
        names: one per dynamic leaf.
        statics: static arguments by position or name, packed.
        static_values: static arguments and static leaves, each with what messages call it.
        positions: the place of each dynamic argument among the user's positional ones.
        settings: JAX's.
        moved: names of the positional arguments that were given by keyword.
    """

    arguments: tuple[SavedArgument, ...]
    leaves: tuple[SavedLeaf, ...]
    names: tuple[str, ...]
    statics: tuple[tuple[int | str, Any], ...]
    static_values: tuple[tuple[str, Any], ...]
    positions: tuple[int, ...]
    settings: tuple[Setting, ...]
    moved: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SavedProbe:
    """A probe; the attributes are those of a `ProbeSpec`."""

    name: str
    tree: SavedTree
    source: str


@dataclasses.dataclass(frozen=True)
class SavedResults:
    """The results of a graph; the attributes are those of a `ResultSpec`."""

    tree: SavedTree
    avals: tuple[SavedLeaf, ...]
    aliases: tuple[tuple[int, int], ...]
    probes: tuple[SavedProbe, ...]
    outputs: Literal["fresh", "static"]


CALL_TYPES: tuple[type, ...] = (
    Setting,
    SavedLeaf,
    SavedArgument,
    SavedCall,
    SavedProbe,
    SavedResults,
)


def pack_call(call: CallSpec) -> SavedCall:
    """Returns the record of the calls that a graph takes.

    Raises:
        SaveProblem: an argument has a static value or a tree that only this process has.
    """
    signature = call.signature
    if any(leaf.sharding is not None for leaf in signature.leaves):
        raise SaveProblem("its arguments are spread over several devices")
    if any(leaf.is_on_host for leaf in signature.leaves):
        raise SaveProblem("an argument is in host memory")
    values = tuple((name, _pack_named(name, value)) for name, value in call.statics)
    return SavedCall(
        tuple(map(_pack_argument, call.arguments)),
        tuple(map(_pack_leaf, signature.leaves)),
        call.names,
        tuple((key, pack_static(value)) for key, value in signature.statics),
        values,
        signature.positions,
        pack_settings(signature.settings),
        call.moved,
    )


def unpack_call(saved: SavedCall, name: str, spellings: Spellings, names: Names) -> CallSpec:
    """Returns the calls that a graph takes.

    Args:
        saved: as it came from a file.
        name: the captured function's name.
        spellings: of the function.
        names: of classes and functions.

    Raises:
        ContentProblem: no call is like that.
        UnknownNameError: it names what this process does not have.
    """
    arguments = tuple(
        ArgumentSpec(each.key, unpack_tree(each.tree, names), each.is_donated)
        for each in saved.arguments
    )
    count = sum(each.tree.num_leaves for each in arguments)
    if {count, len(saved.leaves)} != {len(set(saved.names))} or count != len(saved.names):
        raise ContentProblem("a call", f"its arguments have {count} leaves")
    statics = tuple((key, unpack_value(value, names)) for key, value in saved.statics)
    _check_keys([each.key for each in arguments], [key for key, _ in statics], saved.positions)
    positional = [each.tree for each in arguments if isinstance(each.key, int)]
    named = {str(each.key): each.tree for each in arguments if isinstance(each.key, str)}
    signature = Signature(
        join_trees(positional, named),
        tuple(map(_unpack_leaf, saved.leaves)),
        statics,
        tuple(find_static_kind(value) for _, value in statics),
        saved.positions,
        unpack_settings(saved.settings, names),
    )
    values = tuple((label, unpack_value(value, names)) for label, value in saved.static_values)
    return CallSpec(name, signature, arguments, saved.names, values, spellings, saved.moved)


def pack_results(results: ResultSpec) -> SavedResults:
    """Returns the record of the results of a graph.

    Raises:
        SaveProblem: they are of a tree that only this process has.
    """
    probes = tuple(SavedProbe(p.name, pack_tree(p.tree), p.source) for p in results.probes)
    if results.outputs not in ("fresh", "static"):
        raise SaveProblem(f"its results are {results.outputs}")
    return SavedResults(
        pack_tree(results.tree),
        tuple(map(_pack_leaf, results.avals)),
        results.aliases,
        probes,
        results.outputs,  # pyright: ignore[reportArgumentType]
    )


def unpack_results(saved: SavedResults, names: Names) -> ResultSpec:
    """Returns the results of a graph.

    Raises:
        ContentProblem: no results are like that.
        UnknownNameError: they are of a class that this process does not have.
    """
    tree = unpack_tree(saved.tree, names)
    probes = tuple(ProbeSpec(p.name, unpack_tree(p.tree, names), p.source) for p in saved.probes)
    count = tree.num_leaves + sum(each.tree.num_leaves for each in probes)
    if count != len(saved.avals):
        raise ContentProblem("the results", f"they have {count} leaves")
    types = map(_unpack_leaf, saved.avals)
    avals = tuple(make_array_aval(t.shape, t.dtype, weak_type=t.weak_type) for t in types)
    return ResultSpec(tree, avals, saved.aliases, probes, saved.outputs)


def _pack_argument(argument: ArgumentSpec) -> SavedArgument:
    label = f"argument {argument.key}"
    try:
        return SavedArgument(argument.key, pack_tree(argument.tree), argument.is_donated)
    except SaveProblem as problem:
        raise SaveProblem(f"in {label}, {problem}") from None


def _pack_named(name: str, value: Any) -> Any:
    try:
        return pack_static(value)
    except SaveProblem as problem:
        raise SaveProblem(f"{name}: {problem}") from None


def _pack_leaf(leaf: Any) -> SavedLeaf:
    return SavedLeaf(tuple(leaf.shape), pack_dtype(leaf.dtype), bool(leaf.weak_type))


def _unpack_leaf(saved: SavedLeaf) -> LeafType:
    if any(extent < 0 for extent in saved.shape):
        raise ContentProblem("a leaf", f"its shape is {saved.shape}")
    return LeafType(saved.shape, unpack_dtype(saved.dtype), saved.weak_type)


def _check_keys(
    keys: list[int | str], statics: list[int | str], positions: tuple[int, ...]
) -> None:
    """Refuses arguments that are no arguments of one call."""
    places = [key for key in keys if isinstance(key, int)]
    named = [key for key in keys if isinstance(key, str)]
    taken = sorted([*places, *(key for key in statics if isinstance(key, int))])
    is_ordered = keys == [*places, *sorted(named)] and places == list(positions)
    if (
        not is_ordered
        or taken != list(range(len(taken)))
        or len({*keys, *statics}) < (len(keys) + len(statics))
    ):
        raise ContentProblem("a call", "its arguments are not in the order of a call")
