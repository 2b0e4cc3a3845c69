"""GraphView: what is asked of a graph again and again."""

from __future__ import annotations

from tracegraph.ir.graph import Graph, Op, Operand


class GraphView:
    """A graph, and what is asked of it again and again.

    Attributes:
        graph: itself.
        makers: the op of each value.
        uses: the ops that read each value.
        order: the place of each op, by its identity.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers: dict[Operand, Op] = {value: op for op in graph.ops for value in op.results}
        self.uses: dict[Operand, list[Op]] = {}
        for op in graph.ops:
            for operand in op.operands:
                self.uses.setdefault(operand, []).append(op)
        self.order = {id(op): place for place, op in enumerate(graph.ops)}
