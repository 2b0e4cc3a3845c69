"""Signatures: which calls one captured graph serves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from tracegraph.constraints.arguments import ArgumentLeaf, find_spread_sharding
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.leaf_kinds import suggest_static
from tracegraph.jax_internals import is_host_aval, make_array_aval, read_settings
from tracegraph.options import Options
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.spellings import read_spellings
from tracegraph.tracing.static_leaves import find_static_kind, list_static_leaves


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A call split into what is baked in and what is data.

    Attributes:
        args: the positional arguments that are not static, in order.
        kwargs: the keyword arguments that are not static.
        positions: the place of each of ``args`` among the user's positional arguments.
        statics: the static arguments, as sorted (position or name, value) pairs.
        moved: the names of those positional arguments that the user gave by keyword, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...]
    statics: tuple[tuple[int | str, Any], ...]
    moved: tuple[str, ...]

    def restore(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the user's call with other dynamic arguments."""
        count = len(self.positions) + sum(isinstance(key, int) for key, _ in self.statics)
        merged: list[Any] = [None] * count
        for position, value in zip(self.positions, args, strict=True):
            merged[position] = value
        merged_kwargs = dict(kwargs)
        for key, value in self.statics:
            if isinstance(key, int):
                merged[key] = value
            else:
                merged_kwargs[key] = value
        return merged, merged_kwargs


def bind_call(
    function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundCall:
    """Splits a call into static and dynamic arguments, in one form: see Note [Spellings].

    Raises:
        CaptureError: an argument is missing or unexpected, or a static one cannot be hashed.
    """
    _check_arity(function, options.name, args, kwargs)
    spellings = read_spellings(function, options)
    count = len(args)
    args, kwargs = spellings.normalize(args, kwargs)
    moved = tuple(filter(None, spellings.names[count : len(args)]))
    statics: list[tuple[int | str, Any]] = []
    dynamic, positions = [], []
    for position, value in enumerate(args):
        if position in options.static_argnums:
            statics.append((position, value))
        else:
            dynamic.append(value)
            positions.append(position)
    statics += sorted((k, v) for k, v in kwargs.items() if k in options.static_argnames)
    for key, value in statics:
        _check_static(options.name, key, value)
    rest = {key: value for key, value in kwargs.items() if key not in options.static_argnames}
    return BoundCall(tuple(dynamic), rest, tuple(positions), tuple(statics), moved)


def _check_arity(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"`{name}` is called with the wrong arguments: {error}",
            where=f"{locate_caller()}, `{name}{signature}`",
            why="a capture is made from the arguments of its first call",
            fix=f"call it as `{name}{signature}` says",
            anchor="no-arguments",
        ) from None


def _check_static(name: str, key: int | str, value: Any) -> None:
    label = f"argument {key}" if isinstance(key, int) else f"argument `{key}`"
    try:
        hash(value)
    except TypeError:
        raise CaptureError(
            f"static {label} of `{name}` cannot be hashed: {type(value).__name__}",
            where=f"{locate_caller()}, {label}",
            why="static values are part of the key under which a capture is found again",
            fix=suggest_static(value),
            anchor="static-argument",
        ) from None


@dataclasses.dataclass(frozen=True)
class LeafType:
    """What a static input accepts.

    Attributes:
        shape: of the whole array.
        dtype: JAX's.
        weak_type: True for values that adopt the dtype of what they meet.
        sharding: of an array over several devices, with its mesh and memory kind; None for others.
        is_on_host: True for an array of one device that is in host memory, as ``pinned_host``.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any = None
    is_on_host: bool = False

    def make_type(self) -> Any:
        """Returns the type that JAX traces."""
        if self.is_on_host:
            # A `jax.ShapeDtypeStruct` stands for device memory, whatever its sharding says.
            return make_array_aval(
                self.shape, self.dtype, weak_type=self.weak_type, is_on_host=True
            )
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=self.sharding
        )


def describe_leaf(value: Any) -> LeafType:
    """Returns the type of an array, a type or a Python scalar, as JAX sees it."""
    aval = value if isinstance(value, ShapedArray) else jax.typeof(value)
    weak_type, is_on_host = bool(getattr(aval, "weak_type", False)), is_host_aval(aval)
    return LeafType(tuple(aval.shape), aval.dtype, weak_type, is_on_host=is_on_host)


def describe_placed_leaf(value: Any) -> LeafType:
    """Returns the type of a leaf with its sharding, where it is spread over several devices."""
    leaf, sharding = describe_leaf(value), find_spread_sharding(value)
    if sharding is None:
        return leaf
    return dataclasses.replace(leaf, sharding=sharding, is_on_host=False)


def is_leaf_tree(tree: Any) -> bool:
    """True for the structure of one leaf; JAX's own test takes None, which has none, for one."""
    return tree.num_nodes == 1 and tree.num_leaves == 1


@dataclasses.dataclass(frozen=True)
class Signature:
    """The key of a captured graph: trees, leaf types and static values.

    Attributes:
        tree: structure of the dynamic arguments.
        leaves: one type per dynamic leaf.
        statics: static arguments by position or name.
        static_kinds: what distinguishes static values that are equal in Python.
        positions: the place of each dynamic argument among the user's positional ones.
        settings: JAX's settings that programs depend on, as 64-bit types and matmul precision.
    """

    tree: Any
    leaves: tuple[LeafType, ...]
    statics: tuple[tuple[int | str, Any], ...]
    static_kinds: tuple[Any, ...]
    positions: tuple[int, ...]
    settings: tuple[Any, ...]

    def __hash__(self) -> int:
        return self._hash

    # Each call looks its graph up by its key, which may have hundreds of leaves.
    @functools.cached_property
    def _hash(self) -> int:
        statics = self.statics, self.static_kinds
        return hash((self.tree, self.leaves, statics, self.positions, self.settings))


def make_signature(call: BoundCall, leaves: Sequence[Any], tree: Any) -> Signature:
    """Returns the signature of a call whose dynamic arguments are flattened already."""
    types = tuple(describe_placed_leaf(leaf) for leaf in leaves)
    kinds = tuple(find_static_kind(value) for _, value in call.statics)
    return Signature(tree, types, call.statics, kinds, call.positions, read_settings())


def name_leaves(
    function: Callable[..., Any], options: Options, call: BoundCall
) -> tuple[list[str], list[ArgumentLeaf]]:
    """Returns for each dynamic leaf a short unique name, and its place with its value.

    Example: ``state['w']`` and ``argument 0 `state['w']```.
    """
    names: list[str] = []
    leaves: list[ArgumentLeaf] = []
    for label, name, tree, is_donated in _name_arguments(function, options, call):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names.append(name + jax.tree_util.keystr(path))
            leaves.append(ArgumentLeaf(f"{label}`{names[-1]}`", leaf, is_donated))
    return _make_unique(names), leaves


def name_static_values(
    function: Callable[..., Any], options: Options, call: BoundCall
) -> list[tuple[str, Any]]:
    """Returns the static arguments and the static leaves of a call, each with its name.

    Example: ``static argument n`` and ``static leaf model.activation``.
    """
    last = max((key for key, _ in call.statics if isinstance(key, int)), default=-1)
    parameters = name_positions(function, last + 1)
    named = [
        (f"static argument {parameters[key] if isinstance(key, int) else key}", value)
        for key, value in call.statics
    ]
    for _, name, tree, _ in _name_arguments(function, options, call):
        leaves = list_static_leaves(jax.tree_util.tree_structure(tree))
        named += [(f"static leaf {name}{path}", leaf) for path, leaf in leaves]
    return named


def _name_arguments(
    function: Callable[..., Any], options: Options, call: BoundCall
) -> list[tuple[str, str, Any, bool]]:
    """Returns of each dynamic argument its place, its name, its value, and if it is donated."""
    parameters = name_positions(function, max(call.positions, default=-1) + 1)
    named = [
        (f"argument {position} ", parameters[position], value, position in options.donate_argnums)
        for position, value in zip(call.positions, call.args, strict=True)
    ]
    for key in sorted(call.kwargs):
        # Any text can be a keyword, as in f(**{"%0": x}), and names with % are our own.
        name = key if key.isidentifier() else f"kwargs[{key!r}]"
        named.append(("argument ", name, call.kwargs[key], key in options.donate_argnames))
    return named


def _make_unique(names: list[str]) -> list[str]:
    """Numbers names that recur: the keys of a user's own tree type need not differ."""
    seen: set[str] = set()
    unique = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        chosen = next(candidate for candidate in candidates if candidate not in seen)
        seen.add(chosen)
        unique.append(chosen)
    return unique


def name_positions(function: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of a function's first arguments, as `x` and `args[0]`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    names += [f"{rest}[{index}]" for index in range(max(count - len(names), 0))]
    return names[:count] if count else []
