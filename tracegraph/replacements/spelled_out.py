"""Ops that take an array apart, put arrays together or repeat one, spelled out for the rules.

JAX writes one op for each, since 0.12 also where an array is unpacked (``q, k, v = x``). Rules know
the slices, concatenations and broadcasts that it stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from tracegraph.ir.graph import Graph, Op
from tracegraph.replacements.match import Match
from tracegraph.replacements.splice import splice_matches


def spell_out(graph: Graph) -> Graph:
    """Returns a graph without such ops; their values are the same, bit for bit."""
    found = [_match(op) for op in graph.ops if op.name in _SPELLED]
    return splice_matches(graph, found) if found else graph


def _match(op: Op) -> Match:
    compute = functools.partial(_SPELLED[op.name], op.params)
    return Match(op, op.results, op.operands, compute, compute)


def _take_apart(params: Mapping[str, Any], array: Any) -> Sequence[Any]:
    axis = params["axis"]
    return [
        lax.index_in_dim(array, place, axis, keepdims=False) for place in range(array.shape[axis])
    ]


def _put_together(params: Mapping[str, Any], *arrays: Any) -> Sequence[Any]:
    axis = params["axis"]
    return [lax.concatenate([lax.expand_dims(each, [axis]) for each in arrays], axis)]


def _repeat(params: Mapping[str, Any], array: Any) -> Sequence[Any]:
    pairs = list(zip(params["reps"], array.shape, strict=True))
    shape = [extent for pair in pairs for extent in pair]
    wide = lax.broadcast_in_dim(array, shape, range(1, len(shape), 2))
    return [lax.reshape(wide, [count * extent for count, extent in pairs])]


_SPELLED: Mapping[str, Callable[..., Sequence[Any]]] = {
    "unstack": _take_apart,
    "stack": _put_together,
    "tile": _repeat,
}
