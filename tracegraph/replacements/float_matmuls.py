"""The rule: matmuls in float32 that are to keep all bits become kernels for tensor cores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.lowering.kernels.matmuls.float_matmul import (
    ARCHITECTURE,
    FloatMatmul,
    choose_split,
    estimate_time,
    find_problem,
    write_float_matmul,
)
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.replacements.graph_view import GraphView, count_depth
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.match import Machine, Match

# What cublasLt does in a microsecond on a GPU with these instructions. All that is found is used or
# not, so what would lose stays out of it: few rows or columns, which fill no tile, and small ones.
XLA_OPERATIONS_A_US = 45e6
# Depths of one sum of the reference.
SHORT_DEPTH = 64
# JAX's own default lets tensor cores round float32 to TF32, which is faster than any sum of parts.
_EXACT = (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32)


@dataclasses.dataclass(frozen=True)
class FloatMatmuls:
    """Finds large matmuls in float32 that are to be exact: Note [Floats in three parts]."""

    name: str = "float32 matmuls on tensor cores"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per matmul; other GPUs have no such instructions."""
        if machine is None or machine.architecture != ARCHITECTURE:
            return []
        view = GraphView(graph)
        found = [_match(view, op, machine) for op in graph.ops if op.name == "dot_general"]
        return [match for match in found if match is not None]


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """Calls the kernel, and adds up the parts of its sums.

    Attributes:
        kernel: what is called.
        machine: that it is compiled for.
        partial: shape of the kernel's result: the sums of each part of the depths.
        sides: the numbers of the inputs that are the left and the right side.
        shape: of the result.
    """

    kernel: OwnKernel
    machine: Machine
    partial: tuple[int, int, int]
    sides: tuple[int, int]
    shape: tuple[int, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the one result."""
        stored = [jax.ShapeDtypeStruct(self.partial, np.float32)]
        operands = [arrays[side] for side in self.sides]
        (parts,) = call_kernel(self.kernel, self.machine, stored, operands)
        return [(parts[0] if self.partial[0] == 1 else parts.sum(0)).reshape(self.shape)]


@dataclasses.dataclass(frozen=True)
class ShortSums:
    """The reference of a matmul: float32, but more exact than one sum.

    Sums of few products each are added up with what each addition has lost (Kahan, "Further remarks
    on reducing truncation errors", 1965).

    Attributes:
        matmul: which one.
        sides: the numbers of the inputs that are the left and the right side.
        shape: of the result.
    """

    matmul: FloatMatmul
    sides: tuple[int, int]
    shape: tuple[int, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the one result."""
        matmul = self.matmul
        x, y = (arrays[side] for side in self.sides)
        x = x.reshape((-1, matmul.depth) if matmul.left_by_depth else (matmul.depth, -1))
        y = y.reshape((-1, matmul.depth) if matmul.right_by_depth else (matmul.depth, -1))
        axes = int(matmul.left_by_depth), int(matmul.right_by_depth)
        size = min(SHORT_DEPTH, matmul.depth)
        count = matmul.depth // size

        def add(place: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            total, lost = sums
            part = _multiply_slice(x, y, axes, place * size, size) - lost
            added = total + part
            return added, (added - total) - part

        rest = _multiply_slice(x, y, axes, count * size, matmul.depth - count * size)
        total, _ = lax.fori_loop(0, count, add, (rest, jnp.zeros_like(rest)))
        return [total.reshape(self.shape)]


def _multiply_slice(x: Any, y: Any, axes: tuple[int, int], start: Any, size: int) -> Any:
    """Returns the matmul over some of the depths."""
    left = lax.dynamic_slice_in_dim(x, start, size, axes[0])
    right = lax.dynamic_slice_in_dim(y, start, size, axes[1])
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, numbers, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of a matmul.

    Attributes:
        value: what the kernel reads.
        lines: its other elements than those that are multiplied.
        by_depth: False where these come first in memory.
    """

    value: Value
    lines: int
    by_depth: bool


def _match(view: GraphView, op: Op, machine: Machine) -> Match | None:
    if not _is_exact(op) or (sides := _read_sides(view, op)) is None:
        return None
    left, right = sides
    last, result = op, op.results[0]
    if (transposition := _find_transposition(view, result)) is not None:
        last, result = transposition, transposition.results[0]
        left, right = right, left
    depth = count_depth(op)
    matmul = FloatMatmul(left.lines, right.lines, depth, left.by_depth, right.by_depth)
    if find_problem(matmul):
        return None
    split = choose_split(matmul, machine.processors)
    operations = 2 * matmul.rows * matmul.columns * depth
    if estimate_time(matmul, split, machine.processors) > operations / XLA_OPERATIONS_A_US:
        return None
    inputs = tuple(dict.fromkeys([left.value, right.value]))
    call = MatmulCall(
        write_float_matmul(matmul, split, machine.processors),
        machine,
        (split, matmul.rows, matmul.columns),
        (inputs.index(left.value), inputs.index(right.value)),
        result.shape,
    )
    reference = ShortSums(matmul, call.sides, result.shape)
    return Match(last, (result,), inputs, call, reference, terms=depth)


def _is_exact(op: Op) -> bool:
    """True for a matmul of float32 that is to be as exact as float32 is."""
    kinds = [each.aval.dtype for each in (*op.operands, *op.results)]
    if any(kind != np.float32 for kind in kinds):
        return False
    precision = op.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return all(each in _EXACT for each in precisions)


def _read_sides(view: GraphView, op: Op) -> tuple[_Side, _Side] | None:
    (left, right), batches = op.params["dimension_numbers"]
    if any(batches):
        return None
    # Both sides have the depths in one order.
    pairs = sorted(zip(left, right, strict=True))
    if [other for _, other in pairs] != sorted(right):
        return None
    found = [
        _read_side(view, operand, sorted(axes))
        for operand, axes in zip(op.operands, (left, right), strict=True)
    ]
    if found[0] is None or found[1] is None:
        return None
    return found[0], found[1]


def _read_side(view: GraphView, operand: Operand, axes: Sequence[int]) -> _Side | None:
    """Returns a side whose depths are beside each other in memory, or its lines."""
    if isinstance(operand, Literal):
        return None
    maker = view.makers.get(operand)
    rank = len(operand.shape)
    if maker is not None and _is_transposition(maker) and isinstance(maker.operands[0], Value):
        operand, axes = maker.operands[0], [1 - axis for axis in axes]
    count = len(axes)
    lines = math.prod(operand.shape) // max(1, math.prod(operand.shape[axis] for axis in axes))
    if list(axes) == list(range(rank - count, rank)):
        return _Side(operand, lines, by_depth=True)
    if list(axes) == list(range(count)):
        return _Side(operand, lines, by_depth=False)
    return None


def _find_transposition(view: GraphView, result: Value) -> Op | None:
    """Returns the transposition that alone reads a result."""
    uses = view.uses.get(result, [])
    if len(uses) == 1 and _is_transposition(uses[0]) and result not in view.graph.outputs:
        return uses[0]
    return None


def _is_transposition(op: Op) -> bool:
    return op.name == "transpose" and tuple(op.params["permutation"]) == (1, 0)
