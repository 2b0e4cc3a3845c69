"""GraphView: what rules ask of a graph again and again."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.replacements.match import Match

_HEAVY = frozenset(["dot_general", "ffi_call"])


class GraphView:
    """A graph, and what is asked of it again and again.

    Attributes:
        graph: itself.
        makers: the op of each value.
        uses: the ops that read each value.
        order: the place of each op, by its identity.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers: dict[Operand, Op] = {value: op for op in graph.ops for value in op.results}
        self.uses: dict[Operand, list[Op]] = {}
        for op in graph.ops:
            for operand in op.operands:
                self.uses.setdefault(operand, []).append(op)
        self.order = {id(op): place for place, op in enumerate(graph.ops)}

    @functools.cached_property
    def latest(self) -> dict[Operand, int]:
        """For each value the place of the last matmul, or kernel of ours, that it depends on."""
        found: dict[Operand, int] = {}
        for place, op in enumerate(self.graph.ops):
            known = [found.get(each, -1) for each in op.operands]
            last = place if op.name in _HEAVY else max(known, default=-1)
            found.update(dict.fromkeys(op.results, last))
        return found


def count_depth(op: Op) -> int:
    """Returns how many products each sum of a matmul has."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return math.prod(op.operands[0].aval.shape[axis] for axis in contracted)


def list_between(
    view: GraphView, results: Sequence[Operand], inputs: Collection[Operand]
) -> tuple[tuple[Op, ...], list[Value]]:
    """Returns the ops that make results of inputs, in their order, and what else they read.

    That is what makes no difference to the results, as where a window of full size begins.
    """
    found: dict[int, Op] = {}
    rest: dict[Value, None] = {}
    stack = list(results)
    while stack:
        value = stack.pop()
        op = view.makers.get(value)
        if value in inputs or isinstance(value, Literal):
            continue
        if op is None:
            rest[value] = None
        elif id(op) not in found:
            found[id(op)] = op
            stack += op.operands
    ops = sorted(found.values(), key=lambda op: view.order[id(op)])
    return tuple(ops), list(rest)


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
