"""Donation to aliasing: which output is computed in place of which donated input."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any

from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import is_host_aval


@dataclasses.dataclass(frozen=True)
class ResolveDonation:
    """Aliases each donated input with one output of its type, as ``jax.jit`` does.

    The weak type has to be the same, too: a leaf that is updated in place keeps its type. And so
    has the memory.

    Attributes:
        donated: indices of the donated inputs.
        preferred: pairs (output index, input index) to try first.
        result_count: how many outputs are results; the others are probes, which keep their value.
    """

    donated: frozenset[int]
    preferred: tuple[tuple[int, int], ...] = ()
    result_count: int | None = None

    @property
    def name(self) -> str:
        """The pass's name in reports."""
        return "resolve-donation"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph with its aliases, in order of outputs."""
        chosen: dict[int, int] = {}
        free = {index for index in self.donated if 0 <= index < len(graph.inputs)}
        for output, index in self.preferred:
            if output not in chosen and index in free and _can_alias(graph, output, index):
                chosen[output] = index
                free.remove(index)
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for index in sorted(free):
            waiting[_identify(graph.inputs[index].aval)].append(index)
        for output, operand in enumerate(graph.outputs[: self.result_count]):
            candidates = waiting.get(_identify(operand.aval))
            if output not in chosen and candidates:
                chosen[output] = candidates.popleft()
        return dataclasses.replace(graph, aliases=tuple(sorted(chosen.items())))


def _can_alias(graph: Graph, output: int, index: int) -> bool:
    if not 0 <= output < len(graph.outputs):
        return False
    return _identify(graph.outputs[output].aval) == _identify(graph.inputs[index].aval)


def _identify(aval: Any) -> Hashable:
    if not hasattr(aval, "dtype"):
        return aval
    is_weak = bool(getattr(aval, "weak_type", False))
    return tuple(aval.shape), aval.dtype, is_weak, is_host_aval(aval)
