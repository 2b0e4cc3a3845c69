"""GraphView: what rules ask of a graph again and again."""

from __future__ import annotations

import math

from tracegraph.ir.graph import Graph, Op, Operand
from tracegraph.replacements.match import Match


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


def count_depth(op: Op) -> int:
    """Returns how many products each sum of a matmul has."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return math.prod(op.operands[0].aval.shape[axis] for axis in contracted)


def is_acyclic(view: GraphView, matches: list[Match]) -> bool:
    """True if no match needs what is computed from its own results, through others or not."""
    owners: dict[Operand, Match] = {value: match for match in matches for value in match.results}
    begun: set[object] = set()
    done: set[object] = set()
    stack: list[tuple[Op | Match, bool]] = [(match, False) for match in matches]
    while stack:
        item, is_left = stack.pop()
        if is_left:
            done.add(item)
            continue
        if item in done:
            continue
        if item in begun:
            return False
        begun.add(item)
        stack.append((item, True))
        operands = item.inputs if isinstance(item, Match) else item.operands
        stack += [(each, False) for each in _list_makers(view, owners, operands)]
    return True


def _list_makers(
    view: GraphView, owners: dict[Operand, Match], operands: tuple[Operand, ...]
) -> list[Op | Match]:
    makers = [owners.get(each) or view.makers.get(each) for each in operands]
    return [each for each in makers if each is not None]
