"""The rule: matmuls of few rows become kernels of ours."""

from __future__ import annotations

import dataclasses

from tracegraph.ir.graph import Graph, Value
from tracegraph.replacements.few_rows.kernels import match_group
from tracegraph.replacements.few_rows.row_matmuls import find_row_matmuls, group_matmuls
from tracegraph.replacements.graph_view import GraphView, is_acyclic
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
