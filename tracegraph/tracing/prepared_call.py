"""PreparedCall: a call that was bound, checked and flattened, on its way to a capture."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from tracegraph.constraints.arguments import ArgumentLeaf, check_arguments
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.spread import check_spread, find_spread
from tracegraph.constraints.violation import make_capture_error
from tracegraph.options import Options
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_errors import make_donated_error
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.tracing.signature import (
    BoundCall,
    Signature,
    bind_call,
    is_leaf_tree,
    make_signature,
    name_leaves,
    name_static_values,
)
from tracegraph.tracing.static_leaves import wrap_static_leaves


@dataclasses.dataclass(frozen=True)
class ArgumentSpec:
    """A dynamic argument of a call.

    Attributes:
        key: its position, or its name where it is given by keyword.
        tree: its structure.
        is_donated: True when the caller gives it up.
    """

    key: int | str
    tree: Any
    is_donated: bool


def list_donated(arguments: Iterable[ArgumentSpec]) -> frozenset[int]:
    """Returns the indices of the donated leaves of dynamic arguments, which come in flat order."""
    flags = [each.is_donated for each in arguments for _ in range(each.tree.num_leaves)]
    return frozenset(index for index, is_donated in enumerate(flags) if is_donated)


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """A call on its way to a capture.

    Attributes:
        function: the user's function.
        options: how it is captured.
        bound: the arguments of the call, static and dynamic apart.
        signature: trees and types of its dynamic arguments.
        leaves: one value per dynamic leaf; none after `drop_values`.
        names: one unique name per dynamic leaf.

    Static leaves are wrapped in ``bound`` and in the signature, see Note [Static leaves].
    """

    function: Callable[..., Any]
    options: Options
    bound: BoundCall
    signature: Signature
    leaves: tuple[Any, ...]
    names: tuple[str, ...]

    @functools.cached_property
    def donated(self) -> frozenset[int]:
        """The indices of the donated dynamic leaves."""
        return list_donated(self.list_arguments())

    def list_arguments(self) -> tuple[ArgumentSpec, ...]:
        """Returns the dynamic arguments in flat order."""
        bound = self.bound
        given = dict(zip(bound.positions, bound.args, strict=True))
        given |= {key: bound.kwargs[key] for key in sorted(bound.kwargs)}
        donated = self.options.donate_argnums | self.options.donate_argnames
        return tuple(
            ArgumentSpec(key, jax.tree_util.tree_structure(value), key in donated)
            for key, value in given.items()
        )

    def match_trees(self, out_tree: Any) -> tuple[tuple[int, int], ...]:
        """Pairs results with donated inputs where a whole donated argument is returned.

        By shape alone a scalar loss could take the buffer of a scalar in the state; the tree says
        which result is the new state.

        Args:
            out_tree: structure of the results.

        Returns:
            Pairs (output index, input index).
        """
        free = _list_subtrees(out_tree, 0)
        pairs: list[tuple[int, int]] = []
        start = 0
        for argument in self.list_arguments():
            tree = argument.tree
            if argument.is_donated and not is_leaf_tree(tree):
                place = next((p for p in free if p[0] == tree), None)
                if place is not None:
                    free.remove(place)
                    pairs += [(place[1] + i, start + i) for i in range(tree.num_leaves)]
            start += tree.num_leaves
        return tuple(pairs)

    def run(self, *leaves: Any) -> Any:
        """Calls the user's function on other dynamic leaves; returns its flat results."""
        args, kwargs = jax.tree_util.tree_unflatten(self.signature.tree, leaves)
        return jax.tree_util.tree_leaves(self.apply(args, kwargs))

    def apply(self, args: Any, kwargs: Any) -> Any:
        """Calls the user's function on other dynamic arguments; static results are wrapped."""
        positional, keywords = self.bound.restore(args, kwargs)
        result = self.function(*positional, **keywords)
        return wrap_static_leaves(result) if self.options.takes_static_leaves else result

    def list_leaves(self) -> list[ArgumentLeaf]:
        """Returns the dynamic leaves with their places; types where values were dropped."""
        return name_leaves(self.function, self.options, self.bound)[1]

    def list_static_values(self) -> list[tuple[str, Any]]:
        """Returns the static arguments and the static leaves, each with its name."""
        return name_static_values(self.function, self.options, self.bound)

    def make_abstract_arguments(self) -> tuple[Any, Any]:
        """Returns the dynamic arguments with types for values, as JAX traces them."""
        types = [leaf.make_type() for leaf in self.signature.leaves]
        args, kwargs = wrap_static_leaves(jax.tree_util.tree_unflatten(self.signature.tree, types))
        return args, kwargs

    def replace_values(self, leaves: Sequence[Any]) -> PreparedCall:
        """Returns the same call with other values of the same types.

        Args:
            leaves: one value per dynamic leaf.
        """
        tree = jax.tree_util.tree_unflatten(self.signature.tree, leaves)
        args, kwargs = wrap_static_leaves(tree)
        bound = dataclasses.replace(self.bound, args=args, kwargs=kwargs)
        return dataclasses.replace(self, bound=bound, leaves=tuple(leaves))

    def drop_values(self) -> PreparedCall:
        """Returns the same call with types for values, to be kept without keeping memory alive."""
        args, kwargs = self.make_abstract_arguments()
        bound = dataclasses.replace(self.bound, args=args, kwargs=kwargs)
        return dataclasses.replace(self, bound=bound, leaves=())


def prepare_call(
    function: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: Any,
    has_values: bool,
    takes_spread: bool = False,
) -> PreparedCall:
    """Binds, checks and flattens a call.

    Args:
        function: the user's function.
        options: how it is captured.
        args: positional arguments.
        kwargs: keyword arguments.
        device: JAX's device that the graph is for.
        has_values: False when a `jax.ShapeDtypeStruct` may replace an array.
        takes_spread: True when arrays may be spread over several devices.

    Raises:
        CaptureError: an argument cannot be an input of a graph; all such arguments are named.
        ReplayError: an argument was donated to an earlier call of a captured function.
    """
    bound = bind_call(function, options, args, kwargs)
    if options.takes_static_leaves:
        dynamic_args, dynamic_kwargs = wrap_static_leaves((bound.args, bound.kwargs))
        bound = dataclasses.replace(bound, args=dynamic_args, kwargs=dynamic_kwargs)
    names, argument_leaves = name_leaves(function, options, bound)
    _check_not_donated(argument_leaves)
    abstract = (jax.ShapeDtypeStruct, ShapedArray)
    violations = check_arguments(
        [x for x in argument_leaves if has_values or not isinstance(x.value, abstract)],
        device=device,
        takes_static=options.takes_static_leaves,
        takes_spread=takes_spread,
        is_cut=options.is_cut,
    )
    spread = find_spread(argument_leaves) if takes_spread and not violations else None
    if spread is not None:
        violations = tuple(check_spread(spread, argument_leaves, is_cut=options.is_cut))
    if violations:
        raise make_capture_error(violations, graph_name=options.name)
    leaves, tree = jax.tree_util.tree_flatten((bound.args, bound.kwargs))
    signature = make_signature(bound, leaves, tree)
    return PreparedCall(function, options, bound, signature, tuple(leaves), tuple(names))


def _check_not_donated(leaves: Sequence[ArgumentLeaf]) -> None:
    """Raises for an array that a captured function has taken: it has no value to pass."""
    donated = [
        (leaf.path, array.aval.str_short(), donation)
        for leaf in leaves
        if type(array := unwrap_key(leaf.value)) is Array
        and (donation := array.find_donation()) is not None
    ]
    if not donated:
        return
    path, described, donation = donated[0]
    others = f" and {len(donated) - 1} more" if len(donated) > 1 else ""
    raise make_donated_error(described, donation, where=f"{locate_caller()}, {path}{others}")


def _list_subtrees(tree: Any, start: int) -> list[tuple[Any, int]]:
    """Returns the result itself and its direct children, each with its first flat index."""
    found = [(tree, start)]
    for child in tree.children():
        found.append((child, start))
        start += child.num_leaves
    return found
