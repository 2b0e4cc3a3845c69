"""Inlining: a call of a nested ``jit`` becomes the ops of the function it calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracegraph.ir.graph import Constant, Graph, Op, Origin, Value
from tracegraph.jax_internals import has_plain_placement, nest_contexts
from tracegraph.passes.place_backward import place_backward
from tracegraph.passes.rewrite import Replacements, find_replacement, replace_operands

_CALLS = frozenset(["jit", "pjit", "closed_call", "core_closed_call", "core_call", "call"])
_WITH_RULES = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])


@dataclasses.dataclass(frozen=True)
class InlineCalls:
    """Inlines calls, nested ones too; a call with a placement of its own stays.

    Ops keep their source line; their scope is the call's, then their own; an op without a stream
    is on the call's. Then backward ops go to the stream of their forward op.

    Attributes:
        name: of the pass.
        inlines_rules: inline functions with derivatives of their own, too, which nothing is to
            differentiate any more.
    """

    name: str = "inline-calls"
    inlines_rules: bool = False

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph without calls."""
        first = graph.next_number
        inliner = _Inliner(itertools.count(first), inlines_rules=self.inlines_rules)
        ops = tuple(inliner.inline(graph.ops))
        outputs = tuple(find_replacement(each, inliner.replacements) for each in graph.outputs)
        constants = (*graph.constants, *inliner.constants)
        flat = dataclasses.replace(graph, constants=constants, ops=ops, outputs=outputs)
        return place_backward(flat)


class _Inliner:
    """Copies the ops of one function into another graph, with calls inlined."""

    def __init__(
        self, numbers: Iterator[int], call: Origin | None = None, *, inlines_rules: bool
    ) -> None:
        self._numbers, self._inlines_rules = numbers, inlines_rules
        self._call = call
        self._origins: dict[int, Origin] = {}
        self.constants: list[Constant] = []
        self.replacements: Replacements = {}

    def inline(self, ops: tuple[Op, ...]) -> Iterator[Op]:
        """Yields the ops; those from an inlined call get new values and origins."""
        for op in ops:
            if is_call(op) or (self._inlines_rules and _has_rule(op)):
                yield from self._inline_call(op)
            elif self._call is None:
                yield replace_operands(op, self.replacements)
            else:
                yield self._copy_op(op)

    def _inline_call(self, op: Op) -> Iterator[Op]:
        ((_, callee),) = op.subgraphs
        call = self._nest(op.origin)
        body = _Inliner(self._numbers, call, inlines_rules=self._inlines_rules)
        operands = (find_replacement(operand, self.replacements) for operand in op.operands)
        body.replacements.update(zip(callee.inputs, operands, strict=True))
        for constant in callee.constants:
            value = body._copy(constant.value)
            self.constants.append(dataclasses.replace(constant, value=value))
        yield from body.inline(callee.ops)
        self.constants += body.constants
        outputs = (find_replacement(each, body.replacements) for each in callee.outputs)
        self.replacements.update(zip(op.results, outputs, strict=True))

    def _copy_op(self, op: Op) -> Op:
        operands = tuple([find_replacement(each, self.replacements) for each in op.operands])
        # A function may be called often: each time its values become new ones.
        results = tuple([self._copy(value) for value in op.results])
        return Op(results, op.primitive, operands, op.params, op.subgraphs, self._nest(op.origin))

    def _nest(self, origin: Origin) -> Origin:
        if self._call is None:
            return origin
        # The ops of a line share their origin.
        if id(origin) not in self._origins:
            self._origins[id(origin)] = _nest_origins(self._call, origin)
        return self._origins[id(origin)]

    def _copy(self, value: Value) -> Value:
        self.replacements[value] = new = Value(next(self._numbers), value.aval)
        return new


def is_call(op: Op) -> bool:
    """True for an op that only calls a function, so that the function can replace it."""
    return op.name in _CALLS and len(op.subgraphs) == 1 and has_plain_placement(op)


def _has_rule(op: Op) -> bool:
    return op.name in _WITH_RULES and len(op.subgraphs) == 1


def _nest_origins(outer: Origin, inner: Origin) -> Origin:
    context = inner.equation_context
    if context is not None and outer.equation_context is not None:
        context = nest_contexts(outer.equation_context, context)
    scope = "/".join(filter(None, (outer.scope, inner.scope)))
    stream = inner.stream or outer.stream
    backward_on = inner.backward_on if outer.backward_on is None else outer.backward_on
    return Origin(inner.source, scope, stream, context, backward_on)
