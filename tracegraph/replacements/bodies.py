"""Bodies of loops and checkpoints: what is inside of them, and ops with other bodies.

Note [Replacements in loops]
A model whose layers are a `scan` has all of them in the body of one op, and under `jax.checkpoint`
each pass in the body of another. Rules look at one graph at a time: a body is one as any other.
What they find is measured on the values of the first iteration, and the whole loop is bound again
with the new body. A loop that XLA unrolls has the replacement in each iteration.

JAX computes outside of a loop what all iterations share, as the mask of causal attention, and hands
it in as an array. Where it depends on nothing but indices, the body computes it for itself: then a
kernel sees the condition, and reads no array.

The other way round, what a kernel of ours would read of a piece of such an array is cut out ahead
of the loop, and handed in: XLA moves no slice out of a loop, and copies it in each iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.jax_internals import bind_op, fit_jaxpr, measure_scan
from tracegraph.passes.rewrite import (
    Replacements,
    find_replacement,
    renumber_graph,
    replace_operands,
)
from tracegraph.replacements.match import Match, OpBody
from tracegraph.runtime.errors import InternalError

_T = TypeVar("_T")
KERNEL_CALLS = frozenset(["ffi_call"])
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "remat2": "jaxpr"}
# Of indices and literals, not more of them than a mask takes.
_INDEX_OPS = frozenset(
    ["iota", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"]
    + ["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "add", "sub", "mul", "select_n"]
)
_MOST_OPS = 32


@dataclasses.dataclass(frozen=True)
class BodyCall:
    """Binds a loop or a checkpoint.

    Attributes:
        op: with its body.
    """

    op: Op

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns its results."""
        return bind_op(self.op, operands)


@dataclasses.dataclass(frozen=True)
class ScanCall:
    """Runs a scan with another body, and hands it what it would cut out in each iteration.

    Attributes:
        op: the scan.
        ahead: cuts it out of what all iterations are given alike.
        body: takes it behind that.
    """

    op: Op
    ahead: Graph
    body: Graph

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns its results."""
        fixed, start, given = split_scan(self.op, operands)
        shared = evaluate_graph(self.ahead, *fixed)

        def step(carry: Sequence[Any], each: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            found = evaluate_graph(self.body, *fixed, *shared, *carry, *each)
            pairs = zip(found, self.body.outputs, strict=True)
            typed = [jnp.asarray(array, operand.aval.dtype) for array, operand in pairs]
            return typed[: len(start)], typed[len(start) :]

        settings = {name: self.op.params[name] for name in ("length", "reverse", "unroll")}
        carry, results = lax.scan(step, list(start), list(given), **settings)
        return [*carry, *results]


def split_scan(op: Op, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
    """Returns what a scan is given alike, what it carries, and what it reads one by one.

    Args:
        op: the scan.
        values: one for each of its operands.
    """
    constants, carried = measure_scan(op.params)
    end = constants + carried
    return values[:constants], values[constants:end], values[end:]


def list_bodies(graph: Graph) -> Iterator[tuple[Op, str, Graph]]:
    """Yields the ops of a graph that have a body, its name and what it computes."""
    for op in graph.ops:
        name = _BODIES.get(op.name)
        # A scan of no iterations has no values.
        if name is not None and op.params.get("length") != 0:
            yield op, name, dict(op.subgraphs)[name]


def compute_shared(graph: Graph, op: Op, inner: Graph) -> Graph:
    """Returns a body that computes for itself what it is given of indices and literals.

    Args:
        graph: has the op.
        op: with the body.
        inner: the body; its inputs stay.
    """
    makers: dict[Operand, Op] = {value: each for each in graph.ops for value in each.results}
    replaced: Replacements = {}
    known: Replacements = {}
    copied: list[Op] = []
    for operand, value in _list_shared(op, inner):
        needed = _list_index_ops(makers, operand)
        for each in needed or ():
            (result,) = each.results
            if result not in known:
                known[result] = copy = Value(result.number, result.aval)
                copied.append(dataclasses.replace(replace_operands(each, known), results=(copy,)))
        if needed is not None:
            replaced[value] = find_replacement(operand, known)
    if not replaced:
        return inner
    ops = (*copied, *(replace_operands(each, replaced) for each in inner.ops))
    outputs = tuple(find_replacement(each, replaced) for each in inner.outputs)
    return renumber_graph(dataclasses.replace(inner, ops=ops, outputs=outputs))


def _list_shared(op: Op, inner: Graph) -> list[tuple[Operand, Value]]:
    """Returns what all iterations of an op are given alike, each with the body's input."""
    params = op.params
    first, count = 0, len(inner.inputs)
    if op.name == "scan":
        count, _ = measure_scan(params)
    if op.name == "while":
        first, count = params["cond_nconsts"], params["body_nconsts"]
    return list(zip(op.operands[first:], inner.inputs[:count], strict=False))


def _list_index_ops(makers: Mapping[Operand, Op], operand: Operand) -> list[Op] | None:
    """Returns the ops that compute an operand of indices and literals, or None if others do."""
    found: dict[int, Op] = {}

    def visit(each: Operand) -> bool:
        if isinstance(each, Literal):
            return True
        maker = makers.get(each)
        if maker is None or maker.name not in _INDEX_OPS or len(found) >= _MOST_OPS:
            return False
        if id(maker) not in found and not all(map(visit, maker.operands)):
            return False
        found[id(maker)] = maker
        return True

    return list(found.values()) if visit(operand) else None


def group_by_body(matches: Iterable[Match]) -> dict[OpBody, list[Match]]:
    """Returns the matches inside of bodies by the outermost one, as they are seen from there."""
    groups: dict[OpBody, list[Match]] = {}
    for match in matches:
        if match.path:
            outer, *rest = match.path
            inner = dataclasses.replace(match, path=tuple(rest))
            groups.setdefault(outer, []).append(inner)
    return groups


def enter_body(body: OpBody, operands: Sequence[Any]) -> list[Any]:
    """Returns what the first iteration reads, one array per input of the body.

    Args:
        body: whose op runs at least once.
        operands: arrays, of its op.
    """
    params = body.op.params
    if body.op.name == "scan":
        count = sum(measure_scan(params))
        index = -1 if params["reverse"] else 0
        return [*operands[:count], *(each[index] for each in operands[count:])]
    if body.op.name == "while":
        return list(operands[params["cond_nconsts"] :])
    return list(operands)


def change_body(body: OpBody, graph: Graph) -> Match:
    """Returns a match of the op of a body as a whole, which has another body.

    Args:
        body: as it is.
        graph: computes the same, of the same types.

    Raises:
        InternalError: the new body holds arrays.
    """
    op = body.op
    ahead, graph = _cut_ahead(op, graph)
    if ahead.outputs:
        return Match(op, op.results, op.operands, ScanCall(op, ahead, graph), BodyCall(op))
    types = [describe(value.aval) for value in graph.inputs]
    closed = jax.make_jaxpr(functools.partial(evaluate_graph, graph))(*types)
    if closed.consts:
        raise InternalError(
            f"the new body of `{op.name}` holds {len(closed.consts)} arrays",
            where=op.origin.source,
            why="what a body reads is an operand of its op",
        )
    params = {**op.params, body.name: fit_jaxpr(closed, op.params[body.name])}
    changed = dataclasses.replace(op, params=params)
    return Match(op, op.results, op.operands, BodyCall(changed), BodyCall(op))


def _cut_ahead(op: Op, body: Graph) -> tuple[Graph, Graph]:
    """Returns what cuts out of a scan's constants the pieces that kernels read, and the rest."""
    fixed = split_scan(op, body.inputs)[0] if op.name == "scan" else ()
    others = {
        value for each in body.ops if each.name not in KERNEL_CALLS for value in each.operands
    }
    others.update(body.outputs)
    cuts = [
        each
        for each in body.ops
        if each.name == "slice" and each.operands[0] in fixed and each.results[0] not in others
    ]
    values = tuple(each.results[0] for each in cuts)
    ahead = Graph(f"{body.name}.ahead", tuple(fixed), (), tuple(cuts), values)
    rest = tuple(each for each in body.ops if each not in cuts)
    inputs = (*fixed, *values, *body.inputs[len(fixed) :])
    return ahead, dataclasses.replace(body, inputs=inputs, ops=rest)


def describe(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns a type as JAX's functions take it."""
    is_weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak)
