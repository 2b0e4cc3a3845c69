"""Folding: scalars that are computed of literals become literals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracegraph.ir.graph import Graph, Literal, Op, Operand
from tracegraph.jax_internals import bind_op, has_data_effects
from tracegraph.passes.rewrite import Replacements, find_replacement, replace_operands


@dataclasses.dataclass(frozen=True)
class FoldScalars:
    """Computes scalars of literals, and drops choices by a literal: XLA does so, too."""

    name: str = "fold-scalars"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph with literals in the place of what they come to."""
        replaced: Replacements = {}
        ops: list[Op] = []
        for op in graph.ops:
            op = replace_operands(op, replaced)
            found = _fold(op)
            if found is None:
                ops.append(op)
            else:
                replaced[op.results[0]] = found
        outputs = tuple(find_replacement(each, replaced) for each in graph.outputs)
        return dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)


def _fold(op: Op) -> Operand | None:
    """Returns what the only result of an op is, or None where the op has to compute it."""
    if op.name == "select_n" and isinstance(op.operands[0], Literal):
        return op.operands[1 + int(op.operands[0].value)]
    if len(op.results) != 1 or op.results[0].shape or op.subgraphs or has_data_effects(op):
        return None
    if not op.operands or not all(isinstance(each, Literal) for each in op.operands):
        return None
    if not isinstance(op.results[0].dtype, np.dtype):
        # A typed key: no literal holds one.
        return None
    (found,) = bind_op(op, [each.value for each in op.operands if isinstance(each, Literal)])
    aval = op.results[0].aval
    value: Any = np.asarray(found)[()]
    # A scalar of Python has a weak type.
    return Literal(value.item() if getattr(aval, "weak_type", False) else value, aval)
