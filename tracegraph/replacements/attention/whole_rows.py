"""The rule: attention over whole rows, forward and backward, becomes kernels of ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.lowering.kernels.tiled_attention import (
    Lines,
    Output,
    TiledAttention,
    find_lines_problem,
    find_tiled_problem,
)
from tracegraph.lowering.kernels.tiled_attention_columns import write_columns
from tracegraph.lowering.kernels.tiled_attention_rows import write_rows
from tracegraph.replacements.attention.gradients import (
    Factor,
    Gradients,
    list_factors,
    list_gradients,
    make_mix,
)
from tracegraph.replacements.attention.products import (
    COLUMN,
    ROW,
    Product,
    count_lines,
    find_depth,
    find_lines,
    list_group_sizes,
)
from tracegraph.replacements.attention.score_reader import ScoreReader
from tracegraph.replacements.attention.softmax_chain import ELEMENT
from tracegraph.replacements.element_reader import UnreadableError
from tracegraph.replacements.graph_view import GraphView, is_acyclic, list_between
from tracegraph.replacements.indices import Index
from tracegraph.replacements.kernel_call import call_kernel
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
        owned: set[Value] = set()
        for op in graph.ops:
            for each in _match_gradients(view, op, machine), _match_result(view, op, machine):
                if each is None or not owned.isdisjoint(each.match.results):
                    continue
                if is_acyclic(view, [*(other.match for other in found), each.match]):
                    found.append(each)
                    owned.update(each.match.results)
        return _drop_useless(view, found)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a kernel's result is in memory, and what shape the graph has for it.

    Attributes:
        stored: what the kernel writes.
        axes: the order in which the graph has its axes.
        shape: that the graph has.
        output: where the kernel writes its lines.
    """

    stored: jax.ShapeDtypeStruct
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    output: Output

    def apply(self, array: Any) -> Any:
        """Returns a result as the graph has it."""
        return array.transpose(self.axes).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """Calls the kernel of a forward pass.

    Attributes:
        kernel: what is called.
        machine: that it is compiled for.
        count: how many operands it has; the reference may need more.
        result: the mixed values.
    """

    kernel: OwnKernel
    machine: Machine
    count: int
    result: Arrangement

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the one result."""
        stored = [self.result.stored]
        (mixed,) = call_kernel(self.kernel, self.machine, stored, operands[: self.count])
        return [self.result.apply(mixed)]


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """Calls the kernels of a backward pass: one by rows, then one by columns.

    Attributes:
        kernels: both of them.
        machine: that they are compiled for.
        count: how many operands they have; the reference may need more.
        row_values: what the first one tells the second of each row.
        results: the gradient of the lines of rows, then those of the lines of columns.
    """

    kernels: tuple[OwnKernel, OwnKernel]
    machine: Machine
    count: int
    row_values: jax.ShapeDtypeStruct
    results: tuple[Arrangement, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the gradients."""
        by_rows, by_columns = self.kernels
        given = operands[: self.count]
        first, *rest = self.results
        row, values = call_kernel(by_rows, self.machine, [first.stored, self.row_values], given)
        stored = [each.stored for each in rest]
        columns = call_kernel(by_columns, self.machine, stored, [*given, values])
        arrays = zip(self.results, [row, *columns], strict=True)
        return [each.apply(array) for each, array in arrays]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A match, and the products that it makes again."""

    match: Match
    products: tuple[Op, ...]


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
    if len(reader.products) != 1 or not reader.depends_on_products(weight):
        return None
    values = _find_lines(view, arrays, mix)
    problem = _make_problem(view, arrays, reader, list_group_sizes(mix.op))
    if values is None or problem is None or not problem.stages:
        return None
    if count_lines(mix.op, mix.side) != problem.width:
        return None
    result = _arrange(problem, mix, ROW)
    function = reader.finish(weight)
    problem = dataclasses.replace(problem, kinds=_list_kinds(arrays))
    if _has_problem(problem, [values], [result]):
        return None
    kernel = write_rows(
        problem, function, values, result.output, keeps_rows=False, processors=machine.processors
    )
    call = ForwardCall(kernel, machine, len(arrays), result)
    match = _make_match(view, [mix], arrays, call, problem.columns)
    return _Found(match, (reader.products[0].op,))


def _match_gradients(view: GraphView, op: Op, machine: Machine) -> _Found | None:
    """Returns the backward pass that begins with a product, if it is one."""
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
    others = [each for each in reader.products if each.op is not scores.op]
    if len(reader.products) != 2 or len(others) != 1:
        return None
    shares = _find_shares(view, reader, others[0])
    problem = _make_problem(view, arrays, reader, list_group_sizes(scores.op))
    keys = _find_lines(view, arrays, gradients.of_rows)
    factors = [(gradients.of_columns, element), *shares]
    lines = [_find_lines(view, arrays, factor) for factor, _ in factors]
    if problem is None or keys is None or not problem.stages or None in lines:
        return None
    problem = dataclasses.replace(problem, kinds=_list_kinds(arrays))
    first = _arrange(problem, gradients.of_rows, ROW)
    rest = [_arrange(problem, factor, COLUMN) for factor, _ in factors]
    if _has_problem(problem, [keys, *(each for each in lines if each)], [first, *rest]):
        return None
    outputs = [
        (reader.finish(weight), each, result.output)
        for (_, weight), each, result in zip(factors, lines, rest, strict=True)
        if each is not None
    ]
    by_rows = write_rows(
        problem,
        reader.finish(element),
        keys,
        first.output,
        keeps_rows=True,
        processors=machine.processors,
    )
    by_columns = write_columns(problem, outputs, processors=machine.processors)
    row_values = jax.ShapeDtypeStruct(
        (*problem.groups, len(problem.stages), problem.rows), np.float32
    )
    call = BackwardCall((by_rows, by_columns), machine, len(arrays), row_values, (first, *rest))
    all_factors = [gradients.of_rows, *(factor for factor, _ in factors)]
    match = _make_match(view, all_factors, arrays, call, max(problem.rows, problem.columns))
    return _Found(match, tuple(each.op for each in reader.products))


def _find_shares(
    view: GraphView, reader: ScoreReader, product: Product
) -> list[tuple[Factor, int]]:
    """Returns the gradient of the values: it adds up the lines that they are multiplied by."""
    for factor in list_factors(view, product, product.left):
        weight = reader.read(factor.matrix, factor.weights)
        if not isinstance(weight, Index) and reader.depends_on_products(weight):
            return [(factor, weight)]
    return []


def _find_lines(view: GraphView, arrays: dict[Value, int], factor: Factor) -> Lines | None:
    lines = factor.op.operands[factor.side]
    return find_lines(view.makers, arrays, lines, factor.lines, factor.along)


def _make_problem(
    view: GraphView, arrays: dict[Value, int], reader: ScoreReader, groups: tuple[int, ...]
) -> TiledAttention | None:
    """Returns what kernels compute from the products that were read.

    Its kinds are those of the arrays so far.
    """
    pairs = []
    for product in reader.products:
        sides = [
            find_lines(
                view.makers, arrays, product.op.operands[side], product.place_lines(side), along
            )
            for side, along in ((product.left, ROW), (1 - product.left, COLUMN))
        ]
        if sides[0] is None or sides[1] is None:
            return None
        pairs.append((sides[0], sides[1]))
    first = reader.products[0]
    if len({each.width for each in reader.products}) > 1:
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
        reader.list_stages(),
        used.pop(),
    )


def _has_problem(
    problem: TiledAttention, lines: Sequence[Lines], results: Sequence[Arrangement]
) -> bool:
    """True where there is no kernel."""
    return bool(
        find_tiled_problem(problem)
        or any(find_lines_problem(problem, each) for each in lines)
        or any(each.output.kind not in (problem.kind, "F32") for each in results)
    )


def _list_kinds(arrays: dict[Value, int]) -> tuple[str, ...]:
    return tuple(_KINDS[str(value.dtype)] for value in arrays)


def _arrange(problem: TiledAttention, factor: Factor, along: str) -> Arrangement:
    """Returns how a result is written: the last axis of groups, as heads, behind the lines.

    So do models join heads, which then moves nothing.
    """
    count = problem.rows if along == ROW else problem.columns
    sizes = {f"g{n}": size for n, size in enumerate(problem.groups)}
    *outer, inner = sizes or {"": 1}
    sizes |= {along: count, ELEMENT: problem.width}
    names = [name for name in (*outer, along, inner, ELEMENT) if sizes.get(name, 1) > 1]
    shape = tuple(sizes[name] for name in names)
    strides = {name: math.prod(shape[n + 1 :]) for n, name in enumerate(names)}
    result = factor.op.results[0]
    axes = tuple(names.index(name) for name in factor.list_result_names())
    groups = [f"g{n}" for n in range(len(problem.groups))]
    given = tuple(strides.get(name, 0) for name in (*groups, along))
    output = Output(given, FLOAT_KINDS[str(result.dtype)])
    return Arrangement(jax.ShapeDtypeStruct(shape, result.dtype), axes, tuple(result.shape), output)


def _make_match(
    view: GraphView,
    factors: Sequence[Factor],
    arrays: dict[Value, int],
    call: Any,
    terms: int,
) -> Match:
    results = tuple(factor.op.results[0] for factor in factors)
    ops, rest = list_between(view, results, arrays)
    inputs = (*arrays, *rest)
    last = max((factor.op for factor in factors), key=lambda op: view.order[id(op)])
    return Match(last, results, inputs, call, WideOps(ops, inputs, results), terms)


def _drop_useless(view: GraphView, found: Sequence[_Found]) -> list[Match]:
    """Returns the matches without those whose products something else needs."""
    kept = list(found)
    while True:
        needed = _list_needed(view, [each.match for each in kept])
        useful = [each for each in kept if needed.isdisjoint(map(id, each.products))]
        if len(useful) == len(kept):
            return [each.match for each in kept]
        kept = useful


def _list_needed(view: GraphView, matches: Sequence[Match]) -> set[int]:
    """Returns the ops that are computed where matches are replaced, by their identities."""
    owners = {value: match for match in matches for value in match.results}
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
