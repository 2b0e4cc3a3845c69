"""The rules of ``numerics="equivalent"``, in the order in which they are tried."""

from __future__ import annotations

import dataclasses

from tracegraph.ir.graph import Graph, Op
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.fold_scalars import FoldScalars
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.replacements.attention.rule import CachedAttention
from tracegraph.replacements.attention.whole_rows import WholeRows
from tracegraph.replacements.bodies import compute_shared, list_bodies
from tracegraph.replacements.few_rows.cells import count_left, open_cell
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls
from tracegraph.replacements.float_matmuls import FloatMatmuls
from tracegraph.replacements.match import Machine, Match, OpBody, Rule
from tracegraph.replacements.matmul_updates import MatmulUpdates
from tracegraph.replacements.row_fusions.rule import RowFusions
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.replacements.scatter_sums import ScatterSums
from tracegraph.replacements.spelled_out import spell_out

RULES: tuple[Rule, ...] = (
    RowScatters(),
    # Before the updates: what is multiplied here is not left to cublasLt.
    FloatMatmuls(),
    # Before the sums: a scatter that is added to a matmul goes to the updated weights.
    MatmulUpdates(),
    ScatterSums(),
    WholeRows(),
    # Behind attention, whose matmuls it would take apart.
    SmallMatmuls(),
    FewRowMatmuls(),
    # Behind matmuls that take norms in.
    RowFusions(),
    # Gains most between kernels of ours: all that it waits for is the queries.
    CachedAttention(),
)


# Those whose matches may be inside of loops: they compute new values from others. What writes in
# place is found in the function itself only.
RULES_IN_BODIES = frozenset(
    [WholeRows().name, FloatMatmuls().name, SmallMatmuls().name, RowFusions().name]
)

# Those whose kernels take a cell in.
RULES_FOR_CELLS = frozenset([SmallMatmuls().name])

# Those whose kernels follow one another.
CHAINED_RULES = frozenset([WholeRows().name, SmallMatmuls().name])


def find_matches(rule: Rule, graph: Graph, machine: Machine | None) -> list[Match]:
    """Returns what a rule finds in a graph and in the bodies of its loops and checkpoints.

    Args:
        rule: whose matches.
        graph: see `open_graph`.
        machine: as for the rule.
    """
    found = rule.find(graph, machine)
    if rule.name not in RULES_IN_BODIES:
        return found
    for op, name, inner in list_bodies(graph):
        opened = open_graph(compute_shared(graph, op, inner))
        # Arrays of functions that are called in a body would have to become operands of its op.
        if opened.constants:
            continue
        opened, matches = _find_in_body(rule, op, opened, machine)
        body = OpBody(op, name, opened)
        found += [dataclasses.replace(match, path=(body, *match.path)) for match in matches]
    return found


def _find_in_body(
    rule: Rule, op: Op, body: Graph, machine: Machine | None
) -> tuple[Graph, list[Match]]:
    """Returns what a rule finds in a body, and the body: with a cell apart if kernels take it."""
    found = find_matches(rule, body, machine)
    apart = open_cell(op, body) if rule.name in RULES_FOR_CELLS else body
    if apart is body:
        return body, found
    parts = find_matches(rule, apart, machine)
    takes_parts = count_left(apart, parts) <= count_left(body, found)
    return (apart, parts) if takes_parts else (body, found)


def open_graph(graph: Graph) -> Graph:
    """Returns a graph with what hides ops from rules taken away.

    That is functions with derivatives of their own, choices that literals have made, and ops that
    stand for several.
    """
    opened = spell_out(InlineCalls(inlines_rules=True).apply(graph))
    return DeadCode().apply(FoldScalars().apply(opened))
