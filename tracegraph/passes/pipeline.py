"""The pipeline: passes in order, each verified, each reporting one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from tracegraph.ir.graph import Graph
from tracegraph.ir.verifier import KnownTypes, verify_graph
from tracegraph.passes.common_subexpressions import CommonSubexpressions
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.passes.lift_constants import LiftConstants
from tracegraph.passes.rewrite import renumber_graph


class Pass(Protocol):
    """A rewrite of a Graph: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """The pass's name in reports."""
        ...

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph rewritten; the given one stays as it is."""
        ...


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What a pass changed; prints as one line.

    Example:
        >>> print(PassReport("dead-code", 12, 9))
        dead-code: 12 -> 9 ops
        >>> print(PassReport("lift-constants", 12, 12, "0 -> 2 constants"))
        lift-constants: 12 ops, 0 -> 2 constants
    """

    name: str
    ops_before: int
    ops_after: int
    note: str = ""

    def __str__(self) -> str:
        is_same = self.ops_before == self.ops_after
        count = f"{self.ops_after}" if is_same else f"{self.ops_before} -> {self.ops_after}"
        return f"{self.name}: {count} ops" + (f", {self.note}" if self.note else "")


DEFAULT_PASSES: tuple[Pass, ...] = (
    InlineCalls(),
    LiftConstants(),
    DeadCode(),
    CommonSubexpressions(),
)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A graph after its passes.

    Attributes:
        graphs: the graph after each pass, the last one with its values numbered in order of
            definition; not verified yet.
        reports: one per pass.
    """

    graphs: tuple[Graph, ...]
    reports: tuple[PassReport, ...]

    @property
    def graph(self) -> Graph:
        """The rewritten graph."""
        return self.graphs[-1]

    def verify(self) -> None:
        """Verifies the graph after each pass.

        Raises:
            InternalError: a pass built an invalid graph.
        """
        known: KnownTypes = set()
        for graph in self.graphs:
            verify_graph(graph, known)


def rewrite_graph(graph: Graph, passes: Iterable[Pass]) -> Rewritten:
    """Runs passes in order; `Rewritten.verify` checks their results.

    Args:
        graph: what to rewrite.
        passes: for example ``DEFAULT_PASSES``.
    """
    graphs: list[Graph] = []
    reports: list[PassReport] = []
    for each in passes:
        after = each.apply(graph)
        note = _describe_change(graph, after)
        reports.append(PassReport(each.name, len(graph.ops), len(after.ops), note))
        graphs.append(after)
        graph = after
    return Rewritten((*graphs, renumber_graph(graph)), tuple(reports))


def run_passes(graph: Graph, passes: Iterable[Pass]) -> tuple[Graph, tuple[PassReport, ...]]:
    """Runs passes in order and verifies the graph after each.

    Args:
        graph: what to rewrite.
        passes: for example ``DEFAULT_PASSES``.

    Returns:
        The rewritten graph, values numbered in order of definition, and one report per pass.

    Raises:
        InternalError: a pass built an invalid graph.

    Example:
        >>> from tracegraph.tracing.trace import trace_function
        >>> graph = trace_function(lambda x: (x * 2, x * 2), (1.0,), {}, name="f").graph
        >>> print(run_passes(graph, DEFAULT_PASSES)[1][-1])
        common-subexpressions: 2 -> 1 ops
    """
    rewritten = rewrite_graph(graph, passes)
    rewritten.verify()
    return rewritten.graph, rewritten.reports


def _describe_change(before: Graph, after: Graph) -> str:
    notes = []
    if len(after.constants) != len(before.constants):
        notes.append(f"{len(before.constants)} -> {len(after.constants)} constants")
    if after.aliases != before.aliases:
        notes.append(f"{len(after.aliases)} of {len(after.outputs)} outputs in place")
    return ", ".join(notes)
