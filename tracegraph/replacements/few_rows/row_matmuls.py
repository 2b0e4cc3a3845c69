"""Row matmuls: which ops multiply few rows by a large matrix, and which share their rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.replacements.few_rows.row_reader import expand_shape, keeps_elements
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.kinds import BYTE_KINDS, FLOAT_KINDS

_DEFAULT_NAMES = frozenset(["DEFAULT", "HIGH", "HIGHEST"])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Which matmuls are looked for.

    Attributes:
        rows: how many they may have.
        matrix_bytes: how many a matrix has at least: smaller ones take no time of their own.
        prefers_stored_matrix: where either side may be the rows, the matrix is the one that the
            function is given, not the one with more lines.
    """

    rows: range
    matrix_bytes: int
    prefers_stored_matrix: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RowMatmul:
    """A matmul of few rows.

    More than six fields because it is a matmul, with its sizes.

    Attributes:
        op: its ``dot_general``.
        result: its rows of columns: of the op, or of a transposition of that.
        side: which operand the rows are.
        rows_of: the rows, before reshapes.
        matrix: before reshapes and transpositions, and in 8 bits where it is stored so.
        scale: a factor of each column of one in 8 bits.
        way: ops between the matrix and the matmul.
        rows: how many.
        depth: elements of a row.
        columns: of the result.
        is_transposed: True where the matrix has its rows as columns.
    """

    op: Op
    result: Value
    side: int
    rows_of: Value
    matrix: Value
    scale: Value | None
    way: tuple[Op, ...]
    rows: int
    depth: int
    columns: int
    is_transposed: bool


def _is_taken(matmul: RowMatmul, sizes: Sizes) -> bool:
    """True for a matmul of the sizes that are looked for."""
    operand = matmul.op.operands[1 - matmul.side]
    nbytes = math.prod(operand.aval.shape) * jnp.dtype(operand.aval.dtype).itemsize
    return matmul.rows in sizes.rows and nbytes >= sizes.matrix_bytes


def find_row_matmuls(view: GraphView, sizes: Sizes) -> list[RowMatmul]:
    """Returns the matmuls of so many rows by matrices, in order."""
    found = (_read_matmul(op, view, sizes) for op in view.graph.ops if op.name == "dot_general")
    return [matmul for matmul in found if matmul is not None]


def group_matmuls(matmuls: Sequence[RowMatmul]) -> list[list[RowMatmul]]:
    """Returns matmuls of the same rows together, where one kernel could do them."""
    groups: dict[tuple[object, ...], list[RowMatmul]] = {}
    for each in matmuls:
        kind = str(each.matrix.dtype)
        key = (each.rows_of, each.rows, each.depth, each.is_transposed, kind)
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _read_matmul(op: Op, view: GraphView, sizes: Sizes) -> RowMatmul | None:
    contracted, batch = op.params["dimension_numbers"]
    kinds = [str(each.aval.dtype) for each in (*op.operands, *op.results)]
    if any(batch) or any(kind not in FLOAT_KINDS for kind in kinds):
        return None
    if any(isinstance(each, Literal) for each in op.operands) or not _is_plain(op):
        return None
    sides = list(zip(op.operands, contracted, strict=True))
    readings = [_read_sides(op, side, sides, view) for side in (0, 1)]
    found = [each for each in readings if each is not None and _is_taken(each, sizes)]
    if sizes.prefers_stored_matrix:
        return min(found, key=lambda each: each.matrix in view.makers, default=None)
    return min(found, key=lambda each: each.rows, default=None)


def _is_plain(op: Op) -> bool:
    """True for a matmul whose sums may be float32: none that asks for an algorithm by its name."""
    precision = op.params.get("precision")
    names = precision if isinstance(precision, tuple) else (precision,)
    return all(each is None or getattr(each, "name", "") in _DEFAULT_NAMES for each in names)


def _read_sides(
    op: Op,
    side: int,
    sides: Sequence[tuple[Operand, Sequence[int]]],
    view: GraphView,
) -> RowMatmul | None:
    """Returns the matmul if the operand of one side is its rows."""
    (x, x_axes), (matrix, axes) = sides[side], sides[1 - side]
    rank, count = len(x.aval.shape), len(axes)
    if tuple(x_axes) != tuple(range(rank - count, rank)):
        return None
    is_transposed = tuple(axes) != tuple(range(count))
    wide = len(matrix.aval.shape)
    if is_transposed and tuple(axes) != tuple(range(wide - count, wide)):
        return None
    depth = math.prod(x.aval.shape[rank - count :])
    rows, size = math.prod(x.aval.shape) // max(depth, 1), math.prod(matrix.aval.shape)
    if not rows or not depth:
        return None
    # The result of swapped sides has its rows last.
    result = op.results[0]
    if side and rows > 1:
        result = _find_transposed(result, wide - count, view)
    found = _Matrix(view.makers, size // depth, depth, is_transposed=is_transposed)
    found.look(matrix)
    rows_of = find_elements(x, view.makers)
    if result is None or not isinstance(found.value, Value) or not isinstance(rows_of, Value):
        return None
    sizes = rows, depth, size // depth, found.is_transposed
    way = tuple(found.way)
    return RowMatmul(op, result, side, rows_of, found.value, found.scale, way, *sizes)


def _find_transposed(result: Value, columns: int, view: GraphView) -> Value | None:
    """Returns a result with its rows first, if it is needed in no other way.

    Args:
        result: of a matmul.
        columns: how many of its first axes are columns.
        view: of the graph.
    """
    uses = view.uses.get(result, [])
    if result in view.graph.outputs or [op.name for op in uses] != ["transpose"]:
        return None
    axes = range(len(result.shape))
    wanted = (*axes[columns:], *axes[:columns])
    return uses[0].results[0] if tuple(uses[0].params["permutation"]) == wanted else None


def find_elements(value: Operand, makers: Mapping[Operand, Op]) -> Operand:
    """Returns what has the elements of a value in the same order, before reshapes."""
    while (maker := makers.get(value)) is not None and keeps_elements(maker):
        value = maker.operands[0]
    return value


class _Matrix:
    """Looks for what a matrix is made from without arithmetic, or in 8 bits with a scale.

    Attributes:
        value: what the matrix is.
        is_transposed: as it is.
        scale: a factor of each column, or None.
        way: ops that make the matmul's operand of it.
    """

    def __init__(
        self, makers: Mapping[Operand, Op], columns: int, depth: int, *, is_transposed: bool
    ) -> None:
        self._makers, self._columns, self._depth = makers, columns, depth
        self.is_transposed = is_transposed
        self.value: Operand | None = None
        self.scale: Value | None = None
        self.way: list[Op] = []

    def look(self, value: Operand) -> None:
        """Sets what the operand of a matmul is made from."""
        self.value = value
        while (maker := self._makers.get(self.value)) is not None and self._passes(maker):
            self.way.append(maker)

    def _passes(self, op: Op) -> bool:
        """Goes on to an operand of an op; False where the matrix is its result."""
        (result,), first = op.results[:1], op.operands[0] if op.operands else None
        if keeps_elements(op):
            self.value = first
        elif op.name == "transpose" and tuple(result.shape) == self._get_sizes():
            self.value, self.is_transposed = first, not self.is_transposed
        elif _is_from_bytes(op):
            self.value = first
        else:
            return op.name == "mul" and self.scale is None and self._takes_scale(op)
        return True

    def _get_sizes(self) -> tuple[int, int]:
        depth, columns = self._depth, self._columns
        return (columns, depth) if self.is_transposed else (depth, columns)

    def _takes_scale(self, op: Op) -> bool:
        """Goes on to the 8 bits of a product of them and a factor for each column."""
        for matrix, factor in (op.operands, op.operands[::-1]):
            maker, spread = self._makers.get(matrix), self._makers.get(factor)
            if maker is None or not _is_from_bytes(maker):
                continue
            source, shape = factor, tuple(factor.aval.shape)
            if spread is not None and spread.name == "broadcast_in_dim":
                source, shape = spread.operands[0], expand_shape(spread)
            sizes = (self._columns, 1) if self.is_transposed else (1, self._columns)
            if shape != sizes or tuple(matrix.aval.shape) != self._get_sizes():
                continue
            if not isinstance(source, Value) or str(source.dtype) not in FLOAT_KINDS:
                continue
            self.value, self.scale = matrix, source
            self.way += [spread] if spread is not None and source is not factor else []
            return True
        return False


def _is_from_bytes(op: Op) -> bool:
    """True for an op that widens 8 bits: from one type of 8 bits to another they are rounded."""
    kinds = [str(each.aval.dtype) for each in (*op.operands[:1], *op.results[:1])]
    is_conversion = op.name == "convert_element_type"
    return is_conversion and kinds[0] in BYTE_KINDS and kinds[1] in FLOAT_KINDS
