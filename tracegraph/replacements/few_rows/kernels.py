"""Kernels of few rows: what one is of a group of matmuls, and the same in float32 by JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.matmuls.few_rows_problem import FewRows, MatrixSegment
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.lowering.kernels.row_functions import RowFunction
from tracegraph.replacements.few_rows.choices import Choice, list_chosen, make_choice
from tracegraph.replacements.few_rows.endings import Ending
from tracegraph.replacements.few_rows.row_matmuls import RowMatmul
from tracegraph.replacements.few_rows.row_reader import RowReader, RowShape
from tracegraph.replacements.graph_view import GraphView, is_acyclic
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.kinds import BYTE_KINDS, FLOAT_KINDS
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.wide_ops import WideOps

# Of what a kernel reads.
_STORED_KINDS = {**FLOAT_KINDS, **BYTE_KINDS}


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """Calls a kernel, and gives its results the shapes that the graph has.

    Attributes:
        kernel: what is called.
        machine: that it is compiled for.
        stored: type of each of its results.
        places: for each value that is replaced which result it is: of the kernel, or behind them of
            the choices.
        shapes: of each value.
        choices: each of two results of the kernel, by the number of the first.
    """

    kernel: OwnKernel
    machine: Machine
    stored: tuple[Any, ...]
    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[Choice, int], ...] = ()

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the values that are replaced."""
        results = call_kernel(self.kernel, self.machine, self.stored, operands)
        for choice, first in self.choices:
            results += choice(self.machine, *results[first : first + 2])
        places = zip(self.places, self.shapes, strict=True)
        return [results[place].reshape(shape) for place, shape in places]


@dataclasses.dataclass(frozen=True)
class RowKernels:
    """What makes kernels of matmuls of the same rows.

    Attributes:
        find_problem: returns why there is no kernel, or an empty text.
        write: makes the kernel for so many multiprocessors.
        count_most: takes the number of rows, and XLA's names of their type and of a matrix's; by
            how many such matrices a block can multiply.
        stores_operands: kernels also store what other matmuls read, see `Ending`.
        count_candidates: takes a problem, a segment of it, and the number of multiprocessors; how
            many candidates for its largest element a row has. None: kernels do not choose.
    """

    find_problem: Callable[[FewRows], str]
    write: Callable[[FewRows, int], OwnKernel]
    count_most: Callable[[int, str, str], int]
    stores_operands: bool = False
    count_candidates: Callable[[FewRows, MatrixSegment, int], int] | None = None


def match_groups(
    view: GraphView,
    groups: Iterable[Sequence[RowMatmul]],
    machine: Machine,
    maker: RowKernels,
    stored: Collection[Value] = (),
) -> list[Match]:
    """Returns the kernels of groups of matmuls, in the order of their rows.

    Args:
        view: of the graph.
        groups: each of the same rows.
        machine: that they are written for.
        maker: of the kernels.
        stored: values that are in memory anyway. What a group's rows are made from is read in their
            place, but only as far as it is none of them.
    """
    found: list[Match] = []
    results: set[Value] = set()
    for group in groups:
        stops = results.union(stored).difference({group[0].rows_of} - results)
        for match in _match_group(view, group, stops, machine, maker):
            if is_acyclic(view, [*found, match]):
                found.append(match)
                results.update(match.results)
    return found


def _match_group(
    view: GraphView,
    matmuls: Sequence[RowMatmul],
    stops: Collection[Value],
    machine: Machine,
    maker: RowKernels,
) -> list[Match]:
    """Returns the kernels of a group: one, or one for each number of matmuls that end together."""
    kinds = _STORED_KINDS[_name_row_type(matmuls[0])], _STORED_KINDS[str(matmuls[0].matrix.dtype)]
    most = maker.count_most(matmuls[0].rows, *kinds)
    chooses = maker.count_candidates is not None
    ending = Ending(view, matmuls, most, stores_operands=maker.stores_operands, chooses=chooses)
    parts = _part(len(matmuls), ending)
    found = []
    for size in sorted({len(part) for part in parts}):
        writer = _KernelWriter(view, matmuls, ending, frozenset(stops), machine, maker)
        match = writer.write([part for part in parts if len(part) == size])
        if match is not None:
            found.append(match)
    return found


def _name_row_type(matmul: RowMatmul) -> str:
    return str(matmul.op.operands[matmul.side].aval.dtype)


def _part(count: int, ending: Ending) -> list[list[int]]:
    """Returns the matmuls that something joins, by their places."""
    parts = [{place} for place in range(count)]
    for places in ending.sources.values():
        joined = [part for part in parts if not part.isdisjoint(places)]
        parts = [part for part in parts if part.isdisjoint(places)] + [set().union(*joined)]
    return sorted(map(sorted, parts))


class _KernelWriter:
    """Makes the match of one kernel."""

    def __init__(
        self,
        view: GraphView,
        matmuls: Sequence[RowMatmul],
        ending: Ending,
        stops: frozenset[Value],
        machine: Machine,
        maker: RowKernels,
    ) -> None:
        self._view, self._matmuls, self._ending = view, matmuls, ending
        self._stops, self._machine, self._maker = stops, machine, maker
        self._arrays: dict[Value, int] = {}
        self._ops: dict[int, Op] = {}

    def write(self, parts: Sequence[Sequence[int]]) -> Match | None:
        """Returns the match of some matmuls, those of each part joined; None without a kernel."""
        first = self._matmuls[parts[0][0]]
        start = self._read_start(first)
        stored: list[Any] = []
        places: dict[Value, int] = {}
        segments = [self._read_segment(part, stored, places) for part in parts]
        kinds = tuple(_STORED_KINDS[str(value.dtype)] for value in self._arrays)
        settled = frozenset(
            number for value, number in self._arrays.items() if value not in self._view.makers
        )
        problem = FewRows(
            first.rows,
            first.depth,
            kinds,
            start,
            _STORED_KINDS[_name_row_type(first)],
            tuple(segments),
            settled,
            first.is_transposed,
        )
        if self._maker.find_problem(problem):
            return None
        choices = self._make_choices(problem, parts, stored, places)
        results = tuple(places)
        call = KernelCall(
            self._maker.write(problem, self._machine.processors),
            self._machine,
            tuple(stored),
            tuple(places.values()),
            tuple(value.shape for value in results),
            tuple(choices),
        )
        ops = sorted(self._ops.values(), key=lambda op: self._view.order[id(op)])
        inputs = tuple(self._arrays)
        wide = WideOps(tuple(ops), inputs, results)
        return Match(ops[-1], results, inputs, call, wide, first.depth)

    def _read_start(self, matmul: RowMatmul) -> RowFunction:
        shape = RowShape(matmul.rows, matmul.depth)
        reader = RowReader(shape, self._view.makers, self._stops, reads_sums_of_rows=True)
        return self._finish(reader, [reader.read(matmul.op.operands[matmul.side])])

    def _list_chosen(self, part: Sequence[int]) -> list[Value]:
        """Returns the values of some matmuls whose rows the largest element is taken of."""
        sources = self._ending.sources
        return [value for value in self._ending.choices if not sources[value].isdisjoint(part)]

    def _make_choices(
        self,
        problem: FewRows,
        parts: Sequence[Sequence[int]],
        stored: list[Any],
        places: dict[Value, int],
    ) -> list[tuple[Choice, int]]:
        """Returns the kernels that end the choices of each part; adds what they read and return."""
        count_candidates = self._maker.count_candidates
        if count_candidates is None:
            return []
        pairs = zip(problem.segments, map(self._list_chosen, parts), strict=True)
        ends = [(segment, value) for segment, chosen in pairs for value in chosen]
        found: list[tuple[Choice, int]] = []
        for segment, value in ends:
            count = count_candidates(problem, segment, self._machine.processors)
            found.append((make_choice(problem.rows, count, value.dtype), len(stored)))
            sizes = problem.rows, count
            stored += [jax.ShapeDtypeStruct(sizes, kind) for kind in (jnp.float32, jnp.int32)]
        for index, (_, value) in enumerate(ends):
            ops = self._ending.choices[value]
            self._ops |= {id(op): op for op in ops}
            first = len(stored) + 2 * index
            places |= {result: first + which for result, which in list_chosen(ops)}
        return found

    def _read_segment(
        self, part: Sequence[int], stored: list[Any], places: dict[Value, int]
    ) -> MatrixSegment:
        matmuls = [self._matmuls[place] for place in part]
        shape = RowShape(matmuls[0].rows, matmuls[0].columns)
        sums = {each.result: number for number, each in enumerate(matmuls)}
        stops = self._stops - self._ending.sources.keys()
        reader = RowReader(shape, self._view.makers, stops, sums)
        for each in matmuls:
            if each.scale is not None:
                reader.scale(each.result, each.scale)
        own = [
            v for v in self._ending.list_stored() if not self._ending.sources[v].isdisjoint(part)
        ]
        values = [reader.read(value) for value in own]
        known: dict[tuple[Any, str], int] = {}
        for value, read in zip(own, values, strict=True):
            key = read, str(value.dtype)
            if key not in known:
                known[key] = len(stored)
                sizes = shape.rows, shape.columns
                stored.append(jax.ShapeDtypeStruct(sizes, value.dtype))
            places[value] = known[key]
        for each in matmuls:
            self._ops[id(each.op)] = each.op
            self._add_way(each.result, each.op.results[0])
            self._add_way(each.op.operands[each.side], each.rows_of)
            self._ops |= {id(op): op for op in each.way}
        chosen = self._list_chosen(part)
        results = [read for read, _ in known] + [reader.read(value) for value in chosen]
        finish = self._finish(reader, results)
        numbers = tuple(self._arrays.setdefault(m.matrix, len(self._arrays)) for m in matmuls)
        kinds = tuple(FLOAT_KINDS[kind] for _, kind in known)
        others = tuple(FLOAT_KINDS[str(value.dtype)] for value in chosen)
        return MatrixSegment(shape.columns, numbers, finish, kinds, others)

    def _add_way(self, value: Operand, start: Value) -> None:
        """Adds the reshapes and transpositions that make a value of another."""
        while value is not start:
            op = self._view.makers[value]
            self._ops[id(op)] = op
            value = op.operands[0]

    def _finish(self, reader: RowReader, results: list[tuple[str, int]]) -> RowFunction:
        """Returns a reader's function, with its arrays numbered as the kernel's parameters."""
        function = reader.finish(results)
        self._ops |= reader.read_ops
        numbers = [
            self._arrays.setdefault(value, len(self._arrays))
            for value, _ in reader.arrays
            if isinstance(value, Value)
        ]
        operands = tuple(
            dataclasses.replace(operand, parameter=numbers[operand.parameter])
            for operand in function.operands
        )
        return dataclasses.replace(function, operands=operands)
