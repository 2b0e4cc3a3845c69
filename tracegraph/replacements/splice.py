"""Splicing: the ops of a replacement in the place of those that it replaces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.passes.rewrite import (
    Replacements,
    find_replacement,
    renumber_graph,
    replace_operands,
)
from tracegraph.replacements.match import Match
from tracegraph.runtime.errors import InternalError
from tracegraph.tracing.trace import JaxTrace, build_traced


def splice_matches(graph: Graph, matches: Sequence[Match]) -> Graph:
    """Returns a graph with replacements in the place of what they replace.

    A replacement is traced on the types of its inputs. Its ops get the source line, the scope and
    the settings of the op that they replace.

    Args:
        graph: that the matches were found in.
        matches: of different ops.

    Raises:
        InternalError: a replacement has other types than what it replaces.
    """
    ends = {id(match.op): match for match in matches}
    first = 1 + max((value.number for value in _list_values(graph)), default=-1)
    numbers = itertools.count(first)
    replaced: Replacements = {}
    ops: list[Op] = []
    for op in graph.ops:
        match = ends.get(id(op))
        if match is None:
            ops.append(replace_operands(op, replaced))
            continue
        inputs = [find_replacement(operand, replaced) for operand in match.inputs]
        new, results = _trace(match.compute, inputs, op, numbers)
        ops += new
        replaced.update(zip(op.results, results, strict=True))
    outputs = tuple(find_replacement(each, replaced) for each in graph.outputs)
    spliced = dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)
    return renumber_graph(DeadCode().apply(spliced))


def _trace(
    compute: Callable[..., Any], inputs: Sequence[Operand], op: Op, numbers: Iterator[int]
) -> tuple[list[Op], list[Operand]]:
    """Returns the ops of a replacement, and the operands that are its results."""
    types = [_describe(operand.aval) for operand in inputs]
    closed = jax.make_jaxpr(compute)(*types)
    _check_types(op, closed.out_avals)
    trace = JaxTrace(closed, None, _bind_nothing, op.name, op.origin)
    body = InlineCalls().apply(build_traced(trace).graph)
    known: Replacements = dict(zip(body.inputs, inputs, strict=True))
    ops: list[Op] = []
    for each in body.ops:
        operands = tuple(find_replacement(operand, known) for operand in each.operands)
        results = tuple(Value(next(numbers), value.aval) for value in each.results)
        known.update(zip(each.results, results, strict=True))
        ops.append(Op(results, each.primitive, operands, each.params, each.subgraphs, op.origin))
    return ops, [find_replacement(operand, known) for operand in body.outputs]


def _check_types(op: Op, given: Sequence[Any]) -> None:
    wanted = [_name_type(value.aval) for value in op.results]
    found = [_name_type(aval) for aval in given]
    if found != wanted:
        raise InternalError(
            f"the replacement of `{op.name}` returns {found}, not {wanted}",
            where=op.origin.source,
            why="what takes the place of an op has its types",
        )


def _name_type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _describe(aval: Any) -> jax.ShapeDtypeStruct:
    is_weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak)


def _bind_nothing(*_: Any) -> list[Any]:
    return []


def _list_values(graph: Graph) -> Iterator[Value]:
    yield from graph.inputs
    yield from (constant.value for constant in graph.constants)
    for op in graph.ops:
        yield from op.results
