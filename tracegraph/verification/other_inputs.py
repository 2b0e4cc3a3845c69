"""Which arguments may have other values in a verification: a loop must end on them, and soon.

Note [Loops that may not end]. Other arguments take other branches and rounds, and show a graph that
froze those of its capture. But a loop that ends on the user's arguments need not end on others: a
search for a value that is not there goes on for ever, and neither XLA nor a graph can be stopped.
So arguments that such a loop depends on keep their values. A loop may depend on them if a counter
ends it: ``(i < 100) & (error > 1e-6)``, from a literal, by a literal. Then `lax.cond`, `lax.switch`
and the loops inside of JAX's own primitives end on whatever they get.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tracegraph.constraints.dependence import Dependence, list_subgraphs
from tracegraph.ir.graph import Graph, Literal, Op, Operand
from tracegraph.ir.origins import locate_origin

# Of all loops around one body, in a verification. As many as a solver does at most by default.
MOST_ROUNDS = 10_000
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@dataclasses.dataclass(frozen=True)
class OtherInputs:
    """Which inputs may have other values.

    Attributes:
        may_differ: one flag per input of the graph.
        note: why the others may not, or an empty text.
    """

    may_differ: tuple[bool, ...]
    note: str = ""


def choose_other_inputs(graph: Graph) -> OtherInputs:
    """Chooses all inputs, or those of floats, or none: the first that lets every loop end.

    Args:
        graph: checked and optimised.

    Example:
        >>> from jax import lax
        >>> from tracegraph.tracing.trace import trace_function
        >>> def halve(x, n):
        ...     return lax.fori_loop(0, n, lambda i, y: y / 2, x)
        >>> choose_other_inputs(trace_function(halve, (1.0, 3), {}, name="halve").graph).may_differ
        (True, False)
    """
    everything = tuple(True for _ in graph.inputs)
    floats = tuple(jnp.issubdtype(value.dtype, jnp.inexact) for value in graph.inputs)
    nothing = tuple(False for _ in graph.inputs)
    first: Op | None = None
    for may_differ in (everything, floats):
        endless = _find_endless(graph, Dependence(graph, may_differ), 1)
        if endless is None:
            break
        first = first or endless
    else:
        may_differ = nothing
    if first is None:
        return OtherInputs(everything)
    kept = "arguments of integers keep" if any(may_differ) else "all arguments keep"
    place = locate_origin(first.origin)
    return OtherInputs(
        may_differ,
        f"{kept} their values in both replays: on others the loop at {place} may not end",
    )


def _find_endless(graph: Graph, dependence: Dependence, rounds: int) -> Op | None:
    """Returns the first loop that may run for ever, or too long, on other values."""
    for op in graph.ops:
        inner = rounds * op.params["length"] if op.name == "scan" else rounds
        if op.name == "while" and dependence.has_dependent_predicate(op):
            most = _count_rounds(op)
            if most is None or most * rounds > MOST_ROUNDS:
                return op
            inner = rounds * max(most, 1)
        for body in list_subgraphs(op):
            found = _find_endless(body, dependence, inner)
            if found is not None:
                return found
    return None


def _count_rounds(loop: Op) -> int | None:
    """Returns how often a ``while`` runs at most, whatever else is carried; None if nothing says.

    Some comparison of a counter with a literal has to hold for each further round.
    """
    subgraphs = dict(loop.subgraphs)
    condition = subgraphs["cond_jaxpr"]
    made_by = {value: op for op in condition.ops for value in op.results}
    waiting = list(condition.outputs)
    found = []
    while waiting:
        op = made_by.get(waiting.pop())  # pyright: ignore[reportArgumentType]
        if op is None:
            continue
        if op.name in ("and", "convert_element_type"):
            waiting += op.operands
        elif op.name in _COMPARISONS and not op.results[0].shape:
            found.append(_count_to(loop, op))
    return min((count for count in found if count is not None), default=None)


def _count_to(loop: Op, comparison: Op) -> int | None:
    """Returns how many rounds a comparison of a counter with a literal allows."""
    counter, end = comparison.operands
    holds: Callable[[Any, Any], Any] = _COMPARISONS[comparison.name]
    subgraphs = dict(loop.subgraphs)
    condition, body = subgraphs["cond_jaxpr"], subgraphs["body_jaxpr"]
    first, second = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    if not isinstance(end, Literal) or counter not in condition.inputs[first:]:
        return None
    index = _find(counter, condition.inputs[first:])
    start = loop.operands[first + second + index]
    made_by = {value: op for op in body.ops for value in op.results}
    turn = made_by.get(body.outputs[index])  # pyright: ignore[reportArgumentType]
    if turn is None or turn.name not in ("add", "sub") or not isinstance(start, Literal):
        return None
    before, change = turn.operands
    if before is not body.inputs[second + index] or not isinstance(change, Literal):
        return None
    stride = int(change.value) * (1 if turn.name == "add" else -1)
    value, rounds = int(start.value), 0
    while holds(value, int(end.value)) and rounds <= MOST_ROUNDS:
        value, rounds = value + stride, rounds + 1
    return rounds


def _find(wanted: Operand, operands: Sequence[Operand]) -> int:
    return next(index for index, operand in enumerate(operands) if operand is wanted)
