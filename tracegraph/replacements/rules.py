"""The rules of ``numerics="equivalent"``, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator

from tracegraph.ir.graph import Graph
from tracegraph.replacements.match import Match, Rule
from tracegraph.replacements.scatter_sums import ScatterSums

RULES: tuple[Rule, ...] = (ScatterSums(),)


def find_matches(graph: Graph) -> Iterator[tuple[Rule, list[Match]]]:
    """Yields each rule that finds something in a graph, with its matches."""
    for rule in RULES:
        if matches := rule.find(graph):
            yield rule, matches
