"""The rule: matmuls of few rows become kernels of ours."""

from __future__ import annotations

import dataclasses

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.replacements.few_rows.graph_view import GraphView
from tracegraph.replacements.few_rows.kernels import match_group
from tracegraph.replacements.few_rows.row_matmuls import find_row_matmuls, group_matmuls
from tracegraph.replacements.match import Machine, Match


@dataclasses.dataclass(frozen=True)
class FewRowMatmuls:
    """Finds matmuls of few rows by large matrices, see Note [Matmuls of few rows]."""

    name: str = "matmuls of few rows"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per kernel, in the order of their rows."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        found: list[Match] = []
        stops: set[Value] = set()
        for group in group_matmuls(find_row_matmuls(view)):
            for match in match_group(view, group, stops, machine):
                if is_acyclic(view, [*found, match]):
                    found.append(match)
                    stops.update(match.results)
        return found


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
