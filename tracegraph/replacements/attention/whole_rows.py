"""The rule: attention over whole rows, forward and backward, becomes kernels of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.lowering.kernels.attention.tiled import (
    Lines,
    ResultLines,
    TiledAttention,
    find_lines_problem,
    find_output_problem,
    find_tiled_problem,
)
from tracegraph.lowering.kernels.attention.tiled_columns import write_columns
from tracegraph.lowering.kernels.attention.tiled_rows import write_rows
from tracegraph.replacements.attention.gradients import (
    Factor,
    Gradients,
    list_factors,
    list_gradients,
    make_mix,
)
from tracegraph.replacements.attention.joins import find_join
from tracegraph.replacements.attention.line_matmuls import (
    COLUMN,
    ROW,
    LineMatmul,
    count_lines,
    find_depth,
    find_lines,
    list_group_sizes,
)
from tracegraph.replacements.attention.results import (
    BackwardCall,
    ForwardCall,
    arrange_result,
    place_part,
)
from tracegraph.replacements.attention.score_reader import ScoreReader
from tracegraph.replacements.element_reader import UnreadableError
from tracegraph.replacements.graph_view import GraphView, is_acyclic, list_between
from tracegraph.replacements.indices import Index
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.wide_ops import WideOps

# Of what a kernel loads.
_KINDS = {**FLOAT_KINDS, "int32": "S32", "bool": "PRED"}


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Finds attention of many rows and its gradients, see Note [Row programs]."""

    name: str = "attention over whole rows"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per forward pass, and one per backward pass."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        found: list[_Found] = []
        owned: set[int] = set()
        for op in graph.ops:
            for each in _match_gradients(view, op, machine), _match_result(view, op, machine):
                if each is None or not owned.isdisjoint(map(id, each.factors)):
                    continue
                if is_acyclic(view, [*(other.match for other in found), each.match]):
                    found.append(each)
                    owned.update(map(id, each.factors))
        return _drop_useless(view, found)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A match.

    Attributes:
        match: itself.
        matmuls: the matmuls that it computes again.
        factors: those whose results it returns, or joins.
    """

    match: Match
    matmuls: tuple[Op, ...]
    factors: tuple[Op, ...]


def _match_result(view: GraphView, op: Op, machine: Machine) -> _Found | None:
    """Returns a forward pass that ends with a matmul, if it is one."""
    for side in (0, 1):
        mix = make_mix(op, side)
        if mix is None:
            continue
        try:
            found = _write_forward(view, mix, machine)
        except UnreadableError:
            continue
        if found is not None:
            return found
    return None


def _write_forward(view: GraphView, mix: Factor, machine: Machine) -> _Found | None:
    arrays: dict[Value, int] = {}
    reader = ScoreReader(view.makers, arrays, find_depth(mix.op), limit=1)
    weight = reader.read(mix.matrix, mix.weights)
    if len(reader.matmuls) != 1 or not reader.depends_on_matmuls(weight):
        return None
    values = _find_lines(view, arrays, mix)
    problem = _make_problem(view, arrays, reader, list_group_sizes(mix.op))
    if values is None or problem is None or not problem.row_values:
        return None
    if count_lines(mix.op, mix.side) != problem.width:
        return None
    result = arrange_result(problem, mix)
    function = reader.finish(weight)
    problem = dataclasses.replace(problem, kinds=_list_kinds(arrays))
    if _has_problem(problem, [values], [result.output]):
        return None
    kernel = write_rows(
        problem, function, values, result.output, keeps_rows=False, processors=machine.processors
    )
    call = ForwardCall(kernel, machine, len(arrays), result)
    match = _make_match(view, [mix.op], arrays, call, problem.columns)
    return _Found(match, (reader.matmuls[0].op,), (mix.op,))


def _match_gradients(view: GraphView, op: Op, machine: Machine) -> _Found | None:
    """Returns the backward pass that begins with a matmul, if it is one."""
    for gradients in list_gradients(view, op):
        try:
            found = _write_backward(view, gradients, machine)
        except UnreadableError:
            continue
        if found is not None:
            return found
    return None


def _write_backward(view: GraphView, gradients: Gradients, machine: Machine) -> _Found | None:
    scores, arrays = gradients.scores, dict[Value, int]()
    reader = ScoreReader(view.makers, arrays, scores.counts[1], limit=2)
    element = reader.read(gradients.of_rows.matrix, gradients.of_rows.weights)
    others = [each for each in reader.matmuls if each.op is not scores.op]
    if len(reader.matmuls) != 2 or len(others) != 1:
        return None
    shares = _find_shares(view, reader, others[0])
    problem = _make_problem(view, arrays, reader, list_group_sizes(scores.op))
    pairs = [(gradients.of_rows, element), (gradients.of_columns, element), *shares]
    factors = [factor for factor, _ in pairs]
    lines = [_find_lines(view, arrays, factor) for factor in factors]
    if problem is None or not problem.row_values or None in lines:
        return None
    problem = dataclasses.replace(problem, kinds=_list_kinds(arrays))
    results = [arrange_result(problem, each) for each in factors]
    join = find_join(view, factors)
    places = () if join is None else join.places
    parts = [place_part(problem, *each) for each in zip(factors, places, strict=False)]
    outputs = [each for each in parts if each is not None]
    if len(outputs) < len(factors):
        join, outputs = None, [each.output for each in results]
    found = [each for each in lines if each is not None]
    if _has_problem(problem, found, outputs):
        return None
    first, *rest = [
        (reader.finish(weight), each, output)
        for (_, weight), each, output in zip(pairs, found, outputs, strict=True)
    ]
    count = machine.processors
    by_rows = write_rows(problem, *first, processors=count, keeps_rows=True)
    by_columns = write_columns(problem, rest, processors=count, is_joined=join is not None)
    shape = (*problem.groups, len(problem.row_values), problem.rows)
    call = BackwardCall(
        (by_rows, by_columns),
        machine,
        len(arrays),
        jax.ShapeDtypeStruct(shape, np.float32),
        tuple(results),
        None if join is None else _describe(join.op.results[0]),
    )
    ops = [join.op] if join is not None else [each.op for each in factors]
    match = _make_match(view, ops, arrays, call, max(problem.rows, problem.columns))
    matmuls = tuple(each.op for each in reader.matmuls)
    return _Found(match, matmuls, tuple(each.op for each in factors))


def _describe(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _find_shares(
    view: GraphView, reader: ScoreReader, matmul: LineMatmul
) -> list[tuple[Factor, int]]:
    """Returns the gradient of the values: it adds up the lines that they are multiplied by."""
    for factor in list_factors(view, matmul, matmul.left):
        weight = reader.read(factor.matrix, factor.weights)
        if not isinstance(weight, Index) and reader.depends_on_matmuls(weight):
            return [(factor, weight)]
    return []


def _find_lines(view: GraphView, arrays: dict[Value, int], factor: Factor) -> Lines | None:
    lines = factor.op.operands[factor.side]
    return find_lines(view.makers, arrays, lines, factor.lines, factor.along)


def _make_problem(
    view: GraphView, arrays: dict[Value, int], reader: ScoreReader, groups: tuple[int, ...]
) -> TiledAttention | None:
    """Returns what kernels compute from the matmuls that were read.

    Its kinds are those of the arrays so far.
    """
    pairs = []
    for matmul in reader.matmuls:
        sides = [
            find_lines(
                view.makers, arrays, matmul.op.operands[side], matmul.place_lines(side), along
            )
            for side, along in ((matmul.left, ROW), (1 - matmul.left, COLUMN))
        ]
        if sides[0] is None or sides[1] is None:
            return None
        pairs.append((sides[0], sides[1]))
    first = reader.matmuls[0]
    if len({each.width for each in reader.matmuls}) > 1:
        return None
    kinds = _list_kinds(arrays)
    used = {kinds[lines.parameter] for pair in pairs for lines in pair}
    if len(used) > 1:
        return None
    return TiledAttention(
        groups,
        *first.counts,
        first.width,
        kinds,
        tuple(pairs),
        reader.list_row_values(),
        used.pop(),
    )


def _has_problem(
    problem: TiledAttention, lines: Sequence[Lines], outputs: Sequence[ResultLines]
) -> bool:
    """True where there is no kernel."""
    return bool(
        find_tiled_problem(problem)
        or any(find_lines_problem(problem, each) for each in lines)
        or any(find_output_problem(problem, each) for each in outputs)
    )


def _list_kinds(arrays: dict[Value, int]) -> tuple[str, ...]:
    return tuple(_KINDS[str(value.dtype)] for value in arrays)


def _make_match(
    view: GraphView, ends: Sequence[Op], arrays: dict[Value, int], call: Any, terms: int
) -> Match:
    results = tuple(op.results[0] for op in ends)
    ops, rest = list_between(view, results, arrays)
    inputs = (*arrays, *rest)
    last = max(ends, key=lambda op: view.order[id(op)])
    return Match(last, results, inputs, call, WideOps(ops, inputs, results), terms)


def _drop_useless(view: GraphView, found: Sequence[_Found]) -> list[Match]:
    """Returns the matches without those whose matmuls something else needs."""
    kept = list(found)
    while True:
        needed = _list_needed(view, [each.match for each in kept])
        useful = [each for each in kept if needed.isdisjoint(map(id, each.matmuls))]
        if len(useful) == len(kept):
            return [each.match for each in kept]
        kept = useful


def _list_needed(view: GraphView, matches: Sequence[Match]) -> set[int]:
    """Returns the ops that are computed where matches are replaced, by their identities."""
    owners: dict[Operand, Match] = {value: match for match in matches for value in match.results}
    needed: set[int] = set()
    stack: list[Operand] = list(view.graph.outputs)
    done: set[Operand] = set()
    while stack:
        value = stack.pop()
        if value in done:
            continue
        done.add(value)
        if (match := owners.get(value)) is not None:
            stack += match.inputs
        elif (op := view.makers.get(value)) is not None:
            needed.add(id(op))
            stack += op.operands
    return needed
