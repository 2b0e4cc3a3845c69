"""Results of attention: where kernels write them, and what calls the kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from tracegraph.lowering.kernels.attention.tiled import ResultLines, TiledAttention
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.replacements.attention.gradients import Factor
from tracegraph.replacements.attention.line_matmuls import ROW
from tracegraph.replacements.attention.softmax_chain import ELEMENT
from tracegraph.replacements.indices import Index, list_variables
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.match import Machine


@dataclasses.dataclass(frozen=True)
class ResultLayout:
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
    output: ResultLines

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
    result: ResultLayout

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
        joined: the array that all of them are parts of; None where each has its own.
    """

    kernels: tuple[OwnKernel, OwnKernel]
    machine: Machine
    count: int
    row_values: jax.ShapeDtypeStruct
    results: tuple[ResultLayout, ...]
    joined: jax.ShapeDtypeStruct | None

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the gradients."""
        by_rows, by_columns = self.kernels
        given = operands[: self.count]
        if self.joined is not None:
            stored = [self.joined]
            part, values = call_kernel(by_rows, self.machine, [*stored, self.row_values], given)
            arrays = [*given, values, part]
            return call_kernel(by_columns, self.machine, stored, arrays, {self.count + 1: 0})
        first, *rest = self.results
        row, values = call_kernel(by_rows, self.machine, [first.stored, self.row_values], given)
        stored = [each.stored for each in rest]
        columns = call_kernel(by_columns, self.machine, stored, [*given, values])
        arrays = zip(self.results, [row, *columns], strict=True)
        return [each.apply(array) for each, array in arrays]


def arrange_result(problem: TiledAttention, factor: Factor) -> ResultLayout:
    """Returns how a result is written: the last axis of groups, as heads, behind the lines.

    So do models join heads, which then moves nothing.
    """
    along = factor.along_result
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
    output = ResultLines(given, FLOAT_KINDS[str(result.dtype)])
    return ResultLayout(
        jax.ShapeDtypeStruct(shape, result.dtype), axes, tuple(result.shape), output
    )


def place_part(problem: TiledAttention, factor: Factor, place: Index) -> ResultLines | None:
    """Returns where a result's lines are in an array, or None where they do not lie in one.

    Args:
        problem: of the kernels.
        factor: whose result it is.
        place: of an element of it in the array's memory.
    """
    groups = [f"g{n}" for n in range(len(problem.groups))]
    strides = [place.find_factor(name) for name in (*groups, factor.along_result)]
    known = {*groups, factor.along_result, ELEMENT}
    if None in strides or not list_variables(place) <= known or place.find_factor(ELEMENT) != 1:
        return None
    kind = FLOAT_KINDS[str(factor.op.results[0].dtype)]
    return ResultLines(tuple(each or 0 for each in strides), kind, place.constant)
