"""The rule: matmuls whose results have few tiles become kernels of ours."""

from __future__ import annotations

import dataclasses

from jax import lax

from tracegraph.ir.graph import Graph, Value
from tracegraph.lowering.kernels.matmuls.small_matmul import (
    MAX_MATRICES,
    find_problem,
    write_small_matmul,
)
from tracegraph.replacements.few_rows.kernels import RowKernels, match_groups
from tracegraph.replacements.few_rows.row_matmuls import (
    RowMatmul,
    Sizes,
    find_elements,
    find_row_matmuls,
    group_matmuls,
)
from tracegraph.replacements.few_rows.rule import MAX_ROWS
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.match import Machine, Match

SIZES = Sizes(range(MAX_ROWS + 1, 2049), matrix_bytes=1 << 14, prefers_stored_matrix=True)
# Results of more elements have enough tiles of the usual size for each multiprocessor.
MAX_ELEMENTS_EACH = 2048
KERNELS = RowKernels(
    find_problem, write_small_matmul, lambda *_: MAX_MATRICES, stores_operands=True
)


@dataclasses.dataclass(frozen=True)
class SmallMatmuls:
    """Finds matmuls whose results have few tiles, see Note [Small matmuls]."""

    name: str = "small matmuls"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per kernel, in the order of their rows."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        matmuls = [each for each in find_row_matmuls(view, SIZES) if _is_small(each, machine)]
        groups = group_matmuls(matmuls)
        return match_groups(view, groups, machine, KERNELS, stored=_list_operands(view))


def _is_small(matmul: RowMatmul, machine: Machine) -> bool:
    """True for a matmul of few tiles, whose values may lose bits: see Note [Small matmuls]."""
    precision = matmul.op.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(each not in (None, lax.Precision.DEFAULT) for each in precisions):
        return False
    return matmul.rows * matmul.columns <= MAX_ELEMENTS_EACH * machine.processors


def _list_operands(view: GraphView) -> set[Value]:
    """Returns what matmuls read, before reshapes."""
    matmuls = [op for op in view.graph.ops if op.name == "dot_general"]
    found = {find_elements(each, view.makers) for op in matmuls for each in op.operands}
    return {each for each in found if isinstance(each, Value)}
