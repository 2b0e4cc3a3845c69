"""Whole functions: a region that is all of a function is bound as one call of its trace.

Note [One trace]
JAX keeps what it traced: calling the same `jax.jit` function on the same types, inside of another
trace, binds one call of the jaxpr that is there already. Binding thousands of ops one by one costs
as much as tracing the function anew; and XLA gets the very program that `jax.jit` would give it.
The function's Python must not run for that: it has been compared with the second trace, not with a
third. Where JAX has dropped the trace, or traces anew because a setting changed, the ops are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tracegraph.ir.graph import Graph, Operand, Value
from tracegraph.jax_internals import describe_physical, to_logical, to_physical
from tracegraph.tracing.trace import LostTraceError


def make_whole_function(
    bind: Callable[..., list[Any]],
    graph: Graph,
    inputs: Sequence[Value],
    outputs: Sequence[Operand],
    bind_ops: Callable[..., tuple[Any, ...]],
) -> Callable[..., tuple[Any, ...]]:
    """Returns a traceable function of physical arrays that binds a function as one call.

    Args:
        bind: of the trace that the graph was made from; see `JaxTrace`.
        graph: without constants that are inputs.
        inputs: the graph's inputs that the arguments are the values of.
        outputs: those of its outputs that are returned.
        bind_ops: does the same op by op, for a trace that is lost.
    """
    place = {value: index for index, value in enumerate(graph.inputs)}
    places = [place[value] for value in inputs]
    found_at = {operand: index for index, operand in enumerate(graph.outputs)}
    indices = [found_at[operand] for operand in outputs]

    def run(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(places, arrays, strict=True))
        leaves = [
            to_logical(given[index] if index in given else _make_unused(value.aval), value.aval)
            for index, value in enumerate(graph.inputs)
        ]
        try:
            results = bind(*leaves)
        except LostTraceError:
            return bind_ops(*arrays)
        return tuple(to_physical(results[i], graph.outputs[i].aval) for i in indices)

    run.__name__ = bind_ops.__name__
    return run


def _make_unused(aval: Any) -> Any:
    """Returns a placeholder for an input that no op reads; XLA drops it."""
    return jnp.zeros(*describe_physical(aval))
