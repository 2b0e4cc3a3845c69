"""Common subexpressions: an op that repeats an earlier one is replaced by its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.jax_internals import is_array_aval
from tracegraph.passes.dead_code import must_stay
from tracegraph.passes.rewrite import Replacements, find_replacement, replace_operands

# Never merged: they draw from a state, run the user's Python, or are barriers for XLA.
_NEVER_MERGED = frozenset(
    [
        "debug_callback",
        "debug_print",
        "ffi_call",
        "io_callback",
        "optimization_barrier",
        "pure_callback",
        "rng_bit_generator",
        "rng_uniform",
    ]
)
# Equal values of one of these types are the same.
_EXACT = frozenset([bool, int, str, type(None)])
_SCALARS = (bool, int, float, complex, np.generic)


@dataclasses.dataclass(frozen=True)
class CommonSubexpressions:
    """Merges ops with the same primitive, operands, parameters, settings and stream."""

    name: str = "common-subexpressions"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph with each repeated op merged into its first."""
        replacements: Replacements = {}
        known = _KnownOps()
        ops: list[Op] = []
        for op in graph.ops:
            op = replace_operands(op, replacements)
            first = known.find_first(op)
            if first is not op:
                replacements.update(zip(op.results, first.results, strict=True))
                continue
            ops.append(op)
        outputs = tuple(find_replacement(operand, replacements) for operand in graph.outputs)
        return dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)


class _KnownOps:
    """The ops so far: parameters and literals are compared only where all else is equal."""

    def __init__(self) -> None:
        self._alone: dict[Hashable, Op | None] = {}
        self._by_key: dict[Hashable, Op] = {}

    def find_first(self, op: Op) -> Op:
        """Returns the first op that computes the same, or the op itself if there is none."""
        values = [operand for operand in op.operands if isinstance(operand, Value)]
        group = (op.primitive, *values)
        alone = self._alone.setdefault(group, op)
        if alone is op:
            return op
        if alone is not None:
            self._find_by_key(alone)
            self._alone[group] = None
        return self._find_by_key(op)

    def _find_by_key(self, op: Op) -> Op:
        key = _identify(op) if _can_merge(op) else None
        return op if key is None else self._by_key.setdefault(key, op)


def _can_merge(op: Op) -> bool:
    if op.subgraphs or op.name in _NEVER_MERGED or must_stay(op):
        return False
    return all(is_array_aval(each.aval) for each in (*op.operands, *op.results))


def _identify(op: Op) -> Hashable | None:
    operands = tuple(_freeze_operand(operand) for operand in op.operands)
    params = tuple((name, _freeze(value)) for name, value in sorted(op.params.items()))
    context = op.origin.equation_context
    settings = () if context is None else tuple(map(id, context.settings))
    key = (op.primitive, operands, params, op.origin.stream, settings)
    return key if _is_hashable(key) else None


def _freeze_operand(operand: Operand) -> Hashable:
    if isinstance(operand, Value):
        return operand
    return ("literal", operand.aval, _freeze(operand.value))


def _freeze(value: Any) -> Hashable:
    # In Python 1 == 1.0 == True and 0.0 == -0.0; in a program they differ.
    if type(value) in _EXACT:
        return (type(value), value)
    if isinstance(value, np.ndarray):
        return (type(value), str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, _SCALARS):
        return (type(value), np.asarray(value).tobytes())
    if isinstance(value, tuple | list):
        return (type(value), tuple(_freeze(item) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((key, _freeze(item)) for key, item in sorted(value.items())))
    return value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
