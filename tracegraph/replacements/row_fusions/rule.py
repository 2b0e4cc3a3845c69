"""The rule: norms, their derivatives and losses become one kernel each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.lowering.kernels.row_fusions.kernel import write_row_fusion
from tracegraph.lowering.kernels.row_fusions.problem import (
    EIGHT,
    MAX_COLUMNS,
    MAX_ELEMENTS,
    Output,
    RowFusion,
    count_blocks,
    find_row_problem,
)
from tracegraph.replacements.element_reader import UnreadableError
from tracegraph.replacements.graph_view import GraphView, list_between
from tracegraph.replacements.indices import Index, make_variable, unflatten_index
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.row_fusions.forms import REDUCTIONS, RowForm, RowSpace
from tracegraph.replacements.row_fusions.line_reader import LineReader
from tracegraph.replacements.row_fusions.regions import RegionFinder, RowRegion
from tracegraph.replacements.row_value_reader import COLUMN, ROW
from tracegraph.replacements.wide_ops import WideOps

# Of what a kernel loads.
_KINDS = {**FLOAT_KINDS, "int32": "S32", "bool": "PRED"}
# Fewer elements take no longer than a kernel does, or leave multiprocessors without rows.
MIN_ELEMENTS, MIN_ROWS, MIN_COLUMNS = 1 << 12, 128, 64


@dataclasses.dataclass(frozen=True)
class RowFusions:
    """Finds what is computed along rows, see Note [Fusions along rows]."""

    name: str = "fusions along rows"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per kernel."""
        if machine is None or not machine.has_clusters:
            return []
        view = GraphView(graph)
        found: list[Match] = []
        taken: set[Value] = set()
        for space in _list_spaces(graph):
            regions = RegionFinder(view, space).find()
            for region in regions.found:
                match = _match(view, region, regions.makers, machine)
                # Rows of one array may be cut in two ways.
                if match is not None and taken.isdisjoint(match.results):
                    found.append(match)
                    taken.update(match.results)
        return found


@dataclasses.dataclass(frozen=True)
class FusionCall:
    """Calls the kernel, and adds up the parts of sums along the columns.

    Attributes:
        kernel: what is called.
        machine: that it is compiled for.
        arrays: how many the kernel reads.
        stored: shapes and types of what the kernel stores itself.
        blocks: how many parts each sum has.
        sums: shapes and types of the sums.
    """

    kernel: OwnKernel
    machine: Machine
    arrays: int
    stored: tuple[jax.ShapeDtypeStruct, ...]
    blocks: int
    sums: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns what is stored, then the sums; arrays behind the kernel's make no difference."""
        shapes = [(self.blocks, math.prod(each.shape)) for each in self.sums]
        parts = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        given = arrays[: self.arrays]
        found = call_kernel(self.kernel, self.machine, [*self.stored, *parts], given)
        if not self.sums:
            return found
        # By one kernel, which writes each to memory of its own, where a loop may stack it.
        totals = jax.lax.reduce(found[-len(parts) :], [np.float32(0)] * len(parts), _add_each, [0])
        del found[-len(parts) :]
        added = [
            total.reshape(each.shape).astype(each.dtype)
            for total, each in zip(totals, self.sums, strict=True)
        ]
        return [*found, *added]


def _add_each(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [one + other for one, other in zip(some, others, strict=True)]


def _list_spaces(graph: Graph) -> list[RowSpace]:
    """Returns the rows that something is added up along, or over; the longest ones first."""
    found: set[RowSpace] = set()
    for op in graph.ops:
        if op.name not in REDUCTIONS or str(op.operands[0].aval.dtype) not in FLOAT_KINDS:
            continue
        shape, axes = op.operands[0].aval.shape, op.params["axes"]
        for axis in (min(axes, default=0), max(axes, default=-1) + 1):
            found.add(RowSpace(math.prod(shape[:axis]), math.prod(shape[axis:])))
    return sorted(filter(_is_worthwhile, found), key=lambda each: (-each.columns, -each.rows))


def _is_worthwhile(space: RowSpace) -> bool:
    fits = MIN_COLUMNS <= space.columns <= MAX_COLUMNS and space.columns % EIGHT == 0
    has_size = MIN_ELEMENTS <= space.rows * space.columns <= MAX_ELEMENTS
    return fits and has_size and space.rows >= MIN_ROWS


def _match(
    view: GraphView, region: RowRegion, makers: Mapping[Operand, Op], machine: Machine
) -> Match | None:
    """Returns the kernel for a region, or None where there is none.

    Args:
        view: of the graph.
        region: what is computed.
        makers: the op of each value that may be computed again.
        machine: that the kernel is written for.
    """
    stored = _list_stored(region)
    # What others compute again needs no kernel.
    if not stored and not region.sums:
        return None
    space = region.space
    makers = {**makers, **{op.results[0]: op for op in region.ops}}
    arrays: dict[Value, int] = {}
    reader = LineReader(makers, arrays, space)
    try:
        fusion = _read(reader, region)
    except UnreadableError:
        return None
    fusion = dataclasses.replace(
        fusion,
        inputs=reader.list_inputs(),
        row_values=reader.list_row_values(),
        kinds=tuple(_KINDS[str(value.dtype)] for value in arrays),
    )
    if find_row_problem(fusion) or any(value in makers for value in arrays):
        return None
    results = (*stored, *(op.results[0] for op in region.sums))
    ops, rest = list_between(view, results, arrays)
    inputs: tuple[Operand, ...] = (*arrays, *rest)
    call = FusionCall(
        write_row_fusion(fusion, machine.processors),
        machine,
        len(arrays),
        tuple(map(_describe, stored)),
        count_blocks(fusion, machine.processors),
        tuple(_describe(op.results[0]) for op in region.sums),
    )
    last = max((*region.ops, *region.sums), key=lambda op: view.order[id(op)])
    terms = max(space.rows if region.sums else 1, space.columns)
    return Match(last, results, inputs, call, WideOps(ops, inputs, results), terms)


def _list_stored(region: RowRegion) -> list[Value]:
    """Returns the values of elements, then those of rows."""
    forms = {value: region.space.find_form(value) for value in region.stored}
    return [
        value for form in (RowForm.FULL, RowForm.ROW) for value in forms if forms[value] is form
    ]


def _read(reader: LineReader, region: RowRegion) -> RowFusion:
    """Returns what is stored and added up; its kinds, inputs and row values are known afterwards.

    Raises:
        UnreadableError: something that is stored is no number that kernels compute.
    """
    space = region.space
    row = make_variable(ROW, space.rows)
    element = row.times(space.columns).add(make_variable(COLUMN, space.columns))

    def read(operand: Operand, flat: Index) -> ElementFunction:
        found = reader.read(operand, unflatten_index(flat, operand.aval.shape))
        if isinstance(found, Index):
            raise UnreadableError
        return reader.finish(found)

    outputs: dict[RowForm, list[Output]] = {RowForm.FULL: [], RowForm.ROW: []}
    for value in _list_stored(region):
        form, kind = space.find_form(value), FLOAT_KINDS.get(str(value.dtype))
        if kind is None:
            raise UnreadableError
        function = read(value, element if form is RowForm.FULL else row)
        outputs[form].append(Output(function, kind))
    sums = tuple(read(op.operands[0], element) for op in region.sums)
    elements, values = map(tuple, outputs.values())
    return RowFusion(space.rows, space.columns, (), (), (), elements, values, sums)


def _describe(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
