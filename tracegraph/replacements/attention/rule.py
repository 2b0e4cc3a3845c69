"""The rule: attention of few rows over a cache becomes one kernel of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tracegraph.ir.graph import Graph, Op, Value
from tracegraph.lowering.kernels.attention.over_cache import write_attention
from tracegraph.lowering.kernels.attention.over_cache_problem import (
    Attention,
    Cached,
    find_attention_problem,
)
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.replacements.attention.caches import Cache, find_cache
from tracegraph.replacements.attention.softmax_chain import (
    ELEMENT,
    TIME,
    Axes,
    Mix,
    find_mix,
    find_scores,
    list_free,
    make_axes,
    place_operand,
)
from tracegraph.replacements.element_reader import ElementReader, UnreadableError
from tracegraph.replacements.graph_view import GraphView, is_acyclic, list_between
from tracegraph.replacements.indices import list_variables, make_variable
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.places import Indices
from tracegraph.replacements.wide_ops import WideOps

# Of what a kernel loads.
_KINDS = {**FLOAT_KINDS, "int32": "S32", "bool": "PRED"}
# Fewer positions than this are no cache.
MIN_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """Finds attention of few rows, see Note [Attention over a cache]."""

    name: str = "attention over a cache"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per matmul of shares and values."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        found: list[Match] = []
        for op in graph.ops:
            match = _match(view, op, machine)
            if match is not None and is_acyclic(view, [*found, match]):
                found.append(match)
        return found


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Calls a kernel, and gives its results the shapes that the graph has.

    Attributes:
        kernel: what is called.
        machine: that it is compiled for.
        stored: type of each of its results: the mixed values, then the caches that it updates.
        aliases: for an operand that is updated which result it is.
        order: of the axes of the mixed values, and their sizes: as the matmul has them.
        count: how many operands it has; the reference may need more.
    """

    kernel: OwnKernel
    machine: Machine
    stored: tuple[Any, ...]
    aliases: Mapping[int, int]
    order: tuple[tuple[int, ...], tuple[int, ...]]
    count: int

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the values that are replaced."""
        mixed, *caches = call_kernel(
            self.kernel, self.machine, self.stored, operands[: self.count], self.aliases
        )
        axes, shape = self.order
        return [mixed.transpose(axes).reshape(shape), *caches]


@dataclasses.dataclass(frozen=True)
class _Found:
    """Attention on the Graph.

    Attributes:
        mix: the matmul of shares and values.
        axes: what stands for its axes.
        score: function of a matmul.
        query: function of an element of a query.
        caches: keys and values.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
    """

    mix: Mix
    axes: Axes
    score: ElementFunction
    query: ElementFunction
    caches: tuple[Cache, Cache]
    arrays: dict[Value, int]


def _match(view: GraphView, op: Op, machine: Machine) -> Match | None:
    for side in (0, 1):
        mix = find_mix(op, side)
        if mix is None or mix.length < MIN_LENGTH or not _is_alone(view, op, side):
            continue
        try:
            found = _find(view, mix, {})
            if found is not None:
                shared = _find_shared(found)
                found = _find(view, mix, shared) if shared else found
            if found is not None and (match := _write(view, found, machine)) is not None:
                return match
        except UnreadableError:
            continue
    return None


def _is_alone(view: GraphView, op: Op, side: int) -> bool:
    """True if nothing else needs the shares, as the backward pass of a training step does."""
    value, maker = op.operands[side], None
    while maker is None or maker.name != "div":
        if len(view.uses[value]) > 1 or value in view.graph.outputs:
            return False
        maker = view.makers.get(value)
        if maker is None or not maker.operands:
            return False
        value = maker.operands[0]
    return True


def _find(view: GraphView, mix: Mix, shared: Mapping[int, int]) -> _Found | None:
    """Returns attention that ends with a matmul, or None where it is none."""
    axes = make_axes(mix, shared)
    shares = mix.op.operands[mix.side]
    scores = find_scores(view.makers, shares, mix.place_shares(axes))
    if scores is None:
        return None
    arrays: dict[Value, int] = {}
    reader = ElementReader(view.makers, arrays)
    score = reader.read_score(*scores)
    if reader.sum is None:
        return None
    dot, place = reader.sum
    if _find_width(dot) != mix.width:
        return None
    keys = [side for side in (0, 1) if _holds_time(_place_factor(dot, side, place, mix.width))]
    if len(keys) != 1:
        return None
    (side,) = keys
    found = [
        find_cache(view.makers, dot.operands[side], _place_factor(dot, side, place, mix.width)),
        find_cache(view.makers, mix.op.operands[1 - mix.side], mix.place_values(axes)),
    ]
    caches = tuple(each for each in found if each is not None)
    if len(caches) != 2:
        return None
    queries = ElementReader(view.makers, arrays)
    query = queries.read(dot.operands[1 - side], _place_factor(dot, 1 - side, place, mix.width))
    return _Found(mix, axes, reader.finish(score), queries.finish(query), caches, arrays)


def _find_width(dot: Op) -> int | None:
    """Returns how many products a score sums up, if they lie along one axis."""
    (axes, _), _ = dot.params["dimension_numbers"]
    return dot.operands[0].aval.shape[axes[0]] if len(axes) == 1 else None


def _place_factor(dot: Op, side: int, place: Indices, width: int) -> Indices:
    """Returns where a factor of a matmul is that is added up at a place of a matmul's result."""
    batch = len(dot.params["dimension_numbers"][1][0])
    own = len(list_free(dot, 0))
    free = place[batch : batch + own] if side == 0 else place[batch + own :]
    return place_operand(dot, side, place[:batch], free, make_variable(ELEMENT, width))


def _holds_time(place: Indices) -> bool:
    return any(TIME in list_variables(index) for index in place)


def _find_shared(found: _Found) -> dict[int, int]:
    """Returns how many elements along an axis of the batch have the same keys and values."""
    first, second = (cache.quotients for cache in found.caches)
    common = sorted(first & second)
    return {int(name[1:]): divisor for name, divisor in common if name.startswith("g")}


def _write(view: GraphView, found: _Found, machine: Machine) -> Match | None:
    """Returns the match, or None where there is no kernel for it."""
    mix, arrays = found.mix, found.arrays
    cached = [
        cache.describe(view.makers, arrays, is_settled=cache.array not in view.makers)
        for cache in found.caches
    ]
    (keys, values), result = cached, mix.op.results[0]
    if keys is None or values is None or str(result.dtype) not in FLOAT_KINDS:
        return None
    if not _are_read_alone(found, keys, values):
        return None
    width = mix.width
    problem = Attention(
        found.axes.groups,
        found.axes.row_sizes,
        mix.length,
        width,
        tuple(_KINDS[str(value.dtype)] for value in arrays),
        found.query,
        found.score,
        keys,
        values,
        FLOAT_KINDS[str(result.dtype)],
    )
    if find_attention_problem(problem):
        return None
    updated = [each for each in found.caches if each.updated is not None]
    results = (result, *(each.updated for each in updated if each.updated is not None))
    shape = (*problem.groups, *problem.rows, width)
    call = AttentionCall(
        write_attention(problem, machine.processors),
        machine,
        tuple(
            jax.ShapeDtypeStruct(sizes, value.dtype)
            for sizes, value in zip(
                (shape, *(each.array.shape for each in updated)), results, strict=True
            )
        ),
        {arrays[each.array]: number for number, each in enumerate(updated, start=1)},
        (_order_axes(found), tuple(result.shape)),
        len(arrays),
    )
    ops, rest = list_between(view, results, arrays)
    inputs = (*arrays, *rest)
    return Match(mix.op, results, inputs, call, WideOps(ops, inputs, results), mix.length)


def _are_read_alone(found: _Found, keys: Cached, values: Cached) -> bool:
    """True if what is written in place is read as keys or as values, and as nothing else."""
    loads = found.query.list_loads() | found.score.list_loads()
    for each in (keys, values):
        if each.update is not None:
            loads |= each.update.position.list_loads() | each.update.element.list_loads()
    written = {each.parameter for each in (keys, values) if each.update is not None}
    return written.isdisjoint(loads) and not (written and keys.parameter == values.parameter)


def _order_axes(found: _Found) -> tuple[int, ...]:
    """Returns in which order a matmul's result has the axes of groups, rows and elements."""
    axes, mix = found.axes, found.mix
    groups = len(axes.groups)
    batch: list[int] = []
    row = groups
    for axis, size in enumerate(mix.batch_sizes):
        batch.append(axis)
        if axes.groups[axis] != size:
            batch.append(row)
            row += 1
    element = groups + len(axes.row_sizes)
    rows = list(range(row, element))
    return tuple([*batch, *rows, element] if mix.side == 0 else [*batch, element, *rows])
