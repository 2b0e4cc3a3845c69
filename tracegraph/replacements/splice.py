"""Splicing: the ops of a replacement in the place of those that it replaces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from tracegraph.replacements.bodies import change_body, describe, group_by_body
from tracegraph.replacements.match import Match, OpBody
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.jax_interop import carry_settings
from tracegraph.tracing.trace import JaxTrace, build_traced

# That trace the replacements of one graph; each body of a loop has as many of its own.
MAX_TRACERS = 8


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
    own = [match for match in matches if not match.path]
    groups = group_by_body(matches)
    tasks: list[Callable[[], tuple[Match, Graph]]] = [
        *(functools.partial(_trace, match) for match in own),
        *(functools.partial(_change, body, inner) for body, inner in groups.items()),
    ]
    # NVRTC compiles a kernel where its call is traced, and lets go of Python's lock meanwhile.
    with ThreadPoolExecutor(MAX_TRACERS, "tracegraph-splice") as threads:
        traced = list(threads.map(lambda task: task(), map(carry_settings, tasks)))
    ends = {id(match.op): (match, body) for match, body in traced}
    first = graph.next_number
    numbers = itertools.count(first)
    replaced: Replacements = {}
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        if id(op) in ends:
            match, body = ends[id(op)]
            new, results = _insert(body, match, numbers)
            ops += new
            replaced.update(zip(match.results, results, strict=True))
    ops = _sort([replace_operands(op, replaced) for op in ops])
    outputs = tuple(find_replacement(each, replaced) for each in graph.outputs)
    spliced = dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)
    return renumber_graph(DeadCode().apply(spliced))


def _sort(ops: Sequence[Op]) -> list[Op]:
    """Returns ops in an order in which each comes after its operands; few change their places.

    What is replaced may be needed before the last of its ops.
    """
    makers: dict[Operand, Op] = {value: op for op in ops for value in op.results}
    placed: dict[int, Op] = {}
    begun: set[int] = set()

    def place(op: Op) -> None:
        if id(op) in placed:
            return
        if id(op) in begun:
            raise InternalError(
                f"what replaces `{op.name}` needs its own results",
                where=op.origin.source,
                why="what takes the place of ops comes after all that it reads",
            )
        begun.add(id(op))
        for operand in op.operands:
            if (maker := makers.get(operand)) is not None:
                place(maker)
        placed[id(op)] = op

    for op in ops:
        place(op)
    return list(placed.values())


def _change(body: OpBody, inner: Sequence[Match]) -> tuple[Match, Graph]:
    """Returns a match of the op of a body, and the same op with another body as a graph."""
    return _trace(change_body(body, splice_matches(body.graph, inner)))


def _trace(match: Match) -> tuple[Match, Graph]:
    """Returns a match, and the ops of its replacement as a graph of its own."""
    op = match.op

    # JAX prints what it traces unless it is a function, and a record of a match is long.
    def compute(*arrays: Any) -> Any:
        return match.compute(*arrays)

    closed = jax.make_jaxpr(compute)(*[describe(operand.aval) for operand in match.inputs])
    _check_types(match, closed.out_avals)
    trace = JaxTrace(closed, None, _bind_nothing, op.name, op.origin)
    return match, InlineCalls().apply(build_traced(trace).graph)


def _insert(body: Graph, match: Match, numbers: Iterator[int]) -> tuple[list[Op], list[Operand]]:
    """Returns the ops of a replacement, numbered on, and the operands that are its results."""
    known: Replacements = dict(zip(body.inputs, match.inputs, strict=True))
    ops: list[Op] = []
    for each in body.ops:
        operands = tuple(find_replacement(operand, known) for operand in each.operands)
        results = tuple(Value(next(numbers), value.aval) for value in each.results)
        known.update(zip(each.results, results, strict=True))
        origin = match.op.origin
        ops.append(Op(results, each.primitive, operands, each.params, each.subgraphs, origin))
    return ops, [find_replacement(operand, known) for operand in body.outputs]


def _check_types(match: Match, given: Sequence[Any]) -> None:
    wanted = [_name_type(value.aval) for value in match.results]
    found = [_name_type(aval) for aval in given]
    if found != wanted:
        raise InternalError(
            f"the replacement of `{match.op.name}` returns {found}, not {wanted}",
            where=match.op.origin.source,
            why="what takes the place of an op has its types",
        )


def _name_type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _bind_nothing(*_: Any) -> list[Any]:
    return []
