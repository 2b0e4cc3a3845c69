"""Dead code: ops and constants that no result needs."""

from __future__ import annotations

import dataclasses

from tracegraph.ir.graph import STREAM_MARKS, Graph, Op
from tracegraph.jax_internals import has_data_effects


@dataclasses.dataclass(frozen=True)
class DeadCode:
    """Removes what no output needs; ops with effects and stream marks stay."""

    name: str = "dead-code"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph without unneeded ops and constants."""
        needed = set(graph.outputs)
        ops: list[Op] = []
        for op in reversed(graph.ops):
            if needed.isdisjoint(op.results) and not must_stay(op):
                continue
            needed.update(op.operands)
            ops.append(op)
        constants = tuple(each for each in graph.constants if each.value in needed)
        return dataclasses.replace(graph, constants=constants, ops=tuple(reversed(ops)))


def must_stay(op: Op) -> bool:
    """True for an op that does something besides computing its results."""
    return op.name in STREAM_MARKS or has_data_effects(op)
