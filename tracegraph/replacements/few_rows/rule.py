"""The rule: matmuls of few rows become kernels of ours."""

from __future__ import annotations

import dataclasses

from tracegraph.ir.graph import Graph
from tracegraph.lowering.kernels.matmuls.few_rows import count_candidates, write_few_rows
from tracegraph.lowering.kernels.matmuls.few_rows_problem import MAX_SUMS, count_sums, find_problem
from tracegraph.replacements.few_rows.kernels import RowKernels, match_groups
from tracegraph.replacements.few_rows.row_matmuls import Sizes, find_row_matmuls, group_matmuls
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.match import Machine, Match

MAX_ROWS = 16
SIZES = Sizes(range(1, MAX_ROWS + 1), matrix_bytes=1 << 16)


def _count_most(rows: int, row_kind: str, matrix_kind: str) -> int:
    return max(1, MAX_SUMS // count_sums(rows, row_kind, matrix_kind))


KERNELS = RowKernels(find_problem, write_few_rows, _count_most, count_candidates=count_candidates)


@dataclasses.dataclass(frozen=True)
class FewRowMatmuls:
    """Finds matmuls of few rows by large matrices, see Note [Matmuls of few rows]."""

    name: str = "matmuls of few rows"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per kernel, in the order of their rows."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        groups = group_matmuls(find_row_matmuls(view, SIZES))
        return match_groups(view, groups, machine, KERNELS)
