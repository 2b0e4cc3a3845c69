"""ResultBuilder: from the buffers of a replay to the tree that the user's function returns.

A subtree that holds resident leaves only, such as the state of a train step, is not made anew at
each call, see `resident_results.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.jax_internals import is_key_dtype
from tracegraph.replaying.resident_results import ResidentPart, ResidentRotation
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.jax_interop import wrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.signature import is_leaf_tree
from tracegraph.tracing.static_leaves import wrap_static_leaves


class ResultBuilder:
    """Builds the results of one captured graph.

    Args:
        replay: whose buffers hold the flat results.
        tree: structure of the results.
        avals: JAX's abstract value of each flat result.
        donations: what to say of a leaf that a later replay has taken, by the name of its buffer.

    Attributes:
        build: returns the tree of results of the last replay.
        rotation: of the resident parts of the results; None if there are none.
        is_plain_leaf: True when the tree is one plain array.
    """

    def __init__(
        self,
        replay: Replay,
        tree: Any,
        avals: Sequence[Any],
        donations: Mapping[str, Donation],
    ) -> None:
        is_resident = functools.partial(_is_resident, replay.is_resident_output)
        numbered = wrap_static_leaves(jax.tree_util.tree_unflatten(tree, range(len(avals))))
        parts, outer = jax.tree_util.tree_flatten(numbered, is_leaf=is_resident)
        self.is_plain_leaf = (
            is_leaf_tree(tree)
            and isinstance(avals[0].dtype, np.dtype)
            and (avals[0].dtype != jax.dtypes.float0)
        )
        join = _make_join(outer, len(parts))
        self.rotation: ResidentRotation | None = None
        if not any(is_resident(part) for part in parts):
            takers = [_make_taker(replay, part, avals[part]) for part in parts]
            self.build = takers[0] if join is _get_first else _build_plainly(join, takers)
            return
        names = replay.definition.outputs
        keys = {i: aval.dtype for i, aval in enumerate(avals) if is_key_dtype(aval.dtype)}
        residents = [ResidentPart(p, names, keys) if is_resident(p) else None for p in parts]
        others = [
            (place, _make_taker(replay, part, avals[part]))
            for place, part in enumerate(parts)
            if not is_resident(part)
        ]
        self.rotation = ResidentRotation(replay, residents, donations, others, join)
        self.build = self.rotation.build


def _build_plainly(
    join: Callable[[list[Any]], Any], takers: list[Callable[[], Any]]
) -> Callable[[], Any]:
    return lambda: join([take() for take in takers])


def _make_join(outer: Any, count: int) -> Callable[[list[Any]], Any]:
    """Returns a function that makes the tree of its parts."""
    if is_leaf_tree(outer):
        return _get_first
    if outer == jax.tree_util.tree_structure((0,) * count):
        return tuple
    return outer.unflatten


def _get_first(parts: list[Any]) -> Any:
    return parts[0]


def _is_resident(is_resident_output: Sequence[bool], node: Any) -> bool:
    """True for a resident leaf, and for a container whose leaves are all resident."""
    leaves = jax.tree_util.tree_leaves(node)
    return bool(leaves) and all(is_resident_output[index] for index in leaves)


def _make_taker(replay: Replay, index: int, aval: Any) -> Callable[[], Any]:
    """Returns a function that makes one flat result that is not resident."""
    if aval.dtype == jax.dtypes.float0:
        return lambda: np.zeros(aval.shape, jax.dtypes.float0)
    take = replay.make_taker(index)
    return (lambda: wrap_key(aval.dtype, take())) if is_key_dtype(aval.dtype) else take
