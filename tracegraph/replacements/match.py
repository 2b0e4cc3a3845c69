"""Match: ops of a graph and what can compute their results instead; Rule: what finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tracegraph.ir.graph import Graph, Op, Operand


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """Ops of a graph, and a function that computes what they do.

    Attributes:
        op: the last of them. Its results are what is replaced; the others stay where something
            else needs them.
        inputs: what the replacement reads.
        compute: takes one array per input and returns one per result of ``op``, of its type.
        reference: the same, added up and returned in a wider type: both sides are measured against
            it.
    """

    op: Op
    inputs: tuple[Operand, ...]
    compute: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]


class Rule(Protocol):
    """Finds ops that have a replacement: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What takes the place of the ops, as reports say it."""
        ...

    def find(self, graph: Graph) -> list[Match]:
        """Returns the matches among a graph's own ops; no op ends two of them."""
        ...
