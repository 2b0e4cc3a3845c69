"""The rule `leaked-tracer`: a trace uses its own arguments, and nothing of another trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tracegraph.constraints.frames import locate_error
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Graph, Op, Value


def check_leaks(graph: Graph, argument_count: int) -> list[Violation]:
    """Finds arrays of other traces, which JAX puts before the arguments.

    Args:
        graph: as it was traced.
        argument_count: how many leaves the arguments have.

    Returns:
        One violation per array, at its first use.
    """
    leaked = graph.inputs[: len(graph.inputs) - argument_count]
    return [_make_value_violation(graph, value) for value in leaked]


def find_leak_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    """Returns the violation behind JAX's error of a leaked tracer, None for other errors."""
    if not isinstance(error, jax.errors.UnexpectedTracerError):
        return None
    return _make_leak_violation(name, locate_error(error, function), None)


def _make_value_violation(graph: Graph, value: Value) -> Violation:
    op = next((op for op in graph.ops if value in op.operands), None)
    where = f"the results of `{graph.name}`" if op is None else locate_op(op)
    return _make_leak_violation(graph.name, where, op)


def _make_leak_violation(graph_name: str, where: str, op: Op | None) -> Violation:
    return Violation(
        "leaked-tracer",
        f"`{graph_name}` uses an array that was left over from another trace",
        where,
        "what is computed while tracing has no value once the trace has ended",
        "return it from the function that computes it, instead of keeping it in a global, a list "
        "or an attribute",
        op,
    )
