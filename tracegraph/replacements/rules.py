"""The rules of ``numerics="equivalent"``, in the order in which they are tried."""

from __future__ import annotations

from tracegraph.ir.graph import Graph
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.fold_scalars import FoldScalars
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.replacements.attention.rule import CachedAttention
from tracegraph.replacements.attention.whole_rows import WholeRows
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.float_matmuls import FloatMatmuls
from tracegraph.replacements.match import Rule
from tracegraph.replacements.matmul_updates import MatmulUpdates
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.replacements.scatter_sums import ScatterSums

RULES: tuple[Rule, ...] = (
    RowScatters(),
    ScatterSums(),
    WholeRows(),
    # Before the updates: what is multiplied here is not left to cublasLt.
    FloatMatmuls(),
    MatmulUpdates(),
    FewRowMatmuls(),
    # Gains most between kernels of ours: all that it waits for is the queries.
    CachedAttention(),
)


def open_graph(graph: Graph) -> Graph:
    """Returns a graph with what hides ops from rules taken away.

    That is functions with derivatives of their own, and choices that literals have made.
    """
    opened = InlineCalls(inlines_rules=True).apply(graph)
    return DeadCode().apply(FoldScalars().apply(opened))
