"""The two primitives by which JAX differentiates a graphed callable.

Note [Differentiation]. An eager `jax.vjp` (and `jax.grad`, `jax.value_and_grad`, `jax.jacrev`,
which call it) linearizes a function while it computes its primal values at once. A graphed callable
binds `graphed_call` there, and nowhere else; wherever JAX does anything else, its function is
called as if it had never been graphed. The rule of `graphed_call` replays the forward graph on the
values, and binds `graphed_tangent` on its residuals and the tangents. That op is never computed:
a pullback transposes it, which replays the backward graph. Where the cotangents are traced, as in
`jax.jacrev`, which maps over them, or under `jax.jit` of a pullback, the backward function is
traced into what is around it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import ad

from tracegraph.graphed_callables.callable_graphs import CallableGraphs
from tracegraph.graphed_callables.graph_pair import GraphPair, PulledBack
from tracegraph.graphed_callables.residuals import is_inexact
from tracegraph.jax_internals import (
    define_linearization,
    eval_trace,
    make_primitive,
    run_in,
    trace_state,
)
from tracegraph.tracing.static_leaves import wrap_static_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class DifferentiatedCall:
    """One call of a callable whose arguments are being differentiated.

    Attributes:
        graphs: of the callable.
        leaves: its flat arguments.
        tree: of the arguments.
        traced: the indices of those that JAX differentiates; they are the operands.
    """

    graphs: CallableGraphs
    leaves: list[Any]
    tree: Any
    traced: tuple[int, ...]

    def fill(self, values: Any) -> list[Any]:
        """Returns the flat arguments with values for the operands."""
        leaves = list(self.leaves)
        for index, value in zip(self.traced, values, strict=True):
            leaves[index] = value
        return leaves


graphed_call = make_primitive("graphed_call")
graphed_tangent = make_primitive("graphed_tangent")


def call_differentiated(graphs: CallableGraphs, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Calls a callable while an eager `jax.vjp` linearizes what is around it."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer))
    call = DifferentiatedCall(graphs, leaves, tree, traced)
    if not traced:
        return _call_plainly(call, ())
    # The tree is known when the rule has run.
    trees: list[Any] = []
    results = graphed_call.bind(*[leaves[index] for index in traced], call=call, trees=trees)
    return jax.tree.unflatten(trees[0], results)


def _call_plainly(call: DifferentiatedCall, values: Any) -> Any:
    args, kwargs = jax.tree.unflatten(call.tree, call.fill(values))
    with run_in(eval_trace):
        return call.graphs.call(args, kwargs)


# Where no operand has a tangent.
@graphed_call.def_impl
def _compute(*values: Any, call: DifferentiatedCall, trees: list[Any]) -> list[Any]:
    results, tree = jax.tree.flatten(wrap_static_leaves(_call_plainly(call, values)))
    trees.append(tree)
    return results


def _run_forward(
    call: DifferentiatedCall, trees: list[Any], values: Any, has_tangent: Sequence[bool]
) -> tuple[list[Any], list[Any], GraphPair]:
    """Replays the forward graph; returns results, residuals and the pair."""
    wanted = tuple(itertools.compress(call.traced, has_tangent))
    with run_in(eval_trace):
        results, residuals, pair = call.graphs.call_forward(call.tree, call.fill(values), wanted)
    trees.append(pair.pullback.out_tree)
    return results, residuals, pair


def _move_tangents(
    results: Sequence[Any], residuals: Sequence[Any], pair: GraphPair, operands: Iterable[Any]
) -> list[Any]:
    """Returns the tangents of all results from those of the wanted arguments."""
    types = pair.find_tangent_types(results)
    known = pair.pullback.differentiable
    moved = graphed_tangent.bind(
        *residuals, *operands, pulled_back=pair.pulled_back, types=tuple(types[i] for i in known)
    )
    found = dict(zip(known, moved, strict=True))
    return [found[i] if i in found else ad.Zero(each) for i, each in enumerate(types)]


def _linearize(
    has_tangent: Sequence[bool], *values: Any, call: DifferentiatedCall, trees: list[Any]
) -> tuple[list[Any], list[bool], Callable[[Sequence[Any]], list[Any]]]:
    # JAX gives a tangent to an integer, too.
    has_tangent = [
        has and is_inexact(value.dtype) for has, value in zip(has_tangent, values, strict=True)
    ]
    results, residuals, pair = _run_forward(call, trees, values, has_tangent)

    def move(tangents: Sequence[Any]) -> list[Any]:
        return _move_tangents(results, residuals, pair, itertools.compress(tangents, has_tangent))

    known = pair.pullback.differentiable
    return results, [index in known for index in range(len(results))], move


# Where JAX has another form of rules for `jax.vjp` than we know.
def _differentiate(
    values: Any, tangents: Any, *, call: DifferentiatedCall, trees: list[Any]
) -> tuple[list[Any], list[Any]]:
    has_tangent = [type(tangent) is not ad.Zero for tangent in tangents]
    results, residuals, pair = _run_forward(call, trees, values, has_tangent)
    operands = itertools.compress(tangents, has_tangent)
    return results, _move_tangents(results, residuals, pair, operands)


@graphed_tangent.def_abstract_eval
def _find_types(*_operands: Any, types: tuple[Any, ...], **_params: Any) -> list[Any]:
    return list(types)


def _pull_back(
    cotangents: Any, *operands: Any, pulled_back: PulledBack, **_params: Any
) -> list[Any]:
    is_residual = [not ad.is_undefined_primal(operand) for operand in operands]
    residuals = [each for each, is_one in zip(operands, is_residual, strict=True) if is_one]
    given = [ad.instantiate_zeros(each) for each in cotangents]
    is_eager = trace_state.value is eval_trace and not any(
        isinstance(each, Tracer) for each in (*residuals, *given)
    )
    run = pulled_back.replay if is_eager else pulled_back.trace
    return [*[None] * len(residuals), *run(residuals, given)]


ad.primitive_jvps[graphed_call] = _differentiate
define_linearization(graphed_call, _linearize)
ad.primitive_transposes[graphed_tangent] = _pull_back
