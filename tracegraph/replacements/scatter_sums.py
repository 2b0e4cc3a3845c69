"""Sums of a scatter in float32, where its arrays have 16 bits: the gradient of an embedding.

Note [Scattered sums]
A GPU adds float32 values to memory with one instruction. For 16-bit values XLA emits a loop that
reads, adds and tries to exchange, again and again while other threads write to the same place, and
each of the partial sums is rounded to 16 bits. So the sums are made in float32 and rounded once.

An array of all rows in float32 is twice as large, has to be filled before and read afterwards.
Where few rows are touched, as in the gradient of an embedding, the sums are made in an array with
one row per update instead: the updates of one index are added up in the row of the first of them,
which is then written. Which is the first is a minimum, so that it does not depend on the order of
threads.

    owner[index] = min(position)         one integer per row
    sums[owner[index]] += update         float32, one row per update
    result[index] = operand[index] + sums[position]      where position == owner[index]
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.replacements.match import Machine, Match

_NARROW = ("bfloat16", "float16")
# So many times the rows that are touched, and one array per update is smaller than one of all rows:
# what is saved, the fill and the reading of the large array, is worth the four further kernels.
SPARSE = 8
_LARGEST = np.iinfo(np.int32).max
_DROP = _FILL = lax.GatherScatterMode.FILL_OR_DROP


@dataclasses.dataclass(frozen=True)
class ScatterSums:
    """Finds 16-bit scatters that add at indices that may coincide, see Note [Scattered sums]."""

    name: str = "scattered sums in float32"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:  # noqa: ARG002
        """Returns one match per scatter; one of zeros that are added to an array begins there."""
        makers: dict[Operand, Op] = {value: op for op in graph.ops for value in op.results}
        uses = Counter(operand for op in graph.ops for operand in op.operands)
        uses.update(graph.outputs)
        scatters = [op for op in graph.ops if _is_narrow_sum(op)]
        sums: dict[Value, tuple[Op, Operand]] = {}
        for op in graph.ops:
            if op.name in ("add", "add_any"):
                sums |= _find_addend(op, makers, uses)
        return [_match(op, *sums.get(op.results[0], (op, op.operands[0]))) for op in scatters]


@dataclasses.dataclass(frozen=True)
class ScatterSum:
    """Adds updates to an array in float32 and rounds the results once.

    Attributes:
        params: of the scatter that it replaces.
        dtype: of the result.
        is_sparse: make the sums in an array of one row per update.
    """

    params: Mapping[str, Any] = dataclasses.field(repr=False)
    dtype: Any
    is_sparse: bool

    def __call__(self, operand: Any, indices: Any, updates: Any) -> tuple[Any]:
        """Returns the one result."""
        add = self._add_sparse if self.is_sparse else self._add_all
        return (add(operand, indices, updates),)

    def _add_all(self, operand: Any, indices: Any, updates: Any) -> Any:
        wide = operand.astype(jnp.float32)
        sums = lax.scatter_add(
            wide,
            indices,
            updates.astype(jnp.float32),
            self.params["dimension_numbers"],
            indices_are_sorted=self.params["indices_are_sorted"],
            mode=self.params["mode"],
        )
        return sums.astype(self.dtype)

    def _add_sparse(self, operand: Any, indices: Any, updates: Any) -> Any:
        rows, row = operand.shape[0], operand.shape[1:]
        count = math.prod(indices.shape[:-1])
        indices = indices.reshape(count, 1).astype(jnp.int32)
        if self.params["mode"] == lax.GatherScatterMode.CLIP:
            indices = lax.clamp(np.int32(0), indices, np.int32(rows - 1))
        updates = updates.reshape(count, *row).astype(jnp.float32)
        position = lax.iota(jnp.int32, count)
        owner = lax.scatter_min(
            jnp.full(rows, count, jnp.int32), indices, position, _choose_scatter(0), mode=_DROP
        )
        # An index out of bounds has no row and no owner.
        owner = _gather(owner, indices, fill_value=count)
        zeros = jnp.zeros((count, *row), jnp.float32)
        numbers = _choose_scatter(len(row))
        sums = lax.scatter_add(zeros, owner[:, None], updates, numbers, mode=_DROP)
        before = _gather(operand, indices, fill_value=0).astype(jnp.float32)
        # Each row is written once; the other positions get indices out of bounds, all different.
        nowhere = np.int32(rows) + position
        places = lax.select(owner == position, indices[:, 0], nowhere)
        values = (before + sums).astype(self.dtype)
        return lax.scatter(
            operand, places[:, None], values, numbers, unique_indices=True, mode=_DROP
        )


def _match(scatter: Op, last: Op, start: Operand) -> Match:
    """Returns the match of a scatter.

    Args:
        scatter: that adds updates.
        last: itself, or the op that adds its result to an array.
        start: what the updates are added to.
    """
    _, indices, updates = scatter.operands
    is_sparse = _takes_rows(scatter) and SPARSE * _count_rows(indices) <= start.aval.shape[0]
    return Match(
        last,
        last.results,
        (start, indices, updates),
        ScatterSum(scatter.params, start.aval.dtype, is_sparse),
        ScatterSum(scatter.params, np.dtype(np.float32), is_sparse=False),
    )


def _is_narrow_sum(op: Op) -> bool:
    if op.name != "scatter-add" or op.params["unique_indices"]:
        return False
    return jnp.dtype(op.operands[0].aval.dtype).name in _NARROW


def _find_addend(
    op: Op, makers: Mapping[Operand, Op], uses: Mapping[Operand, int]
) -> dict[Value, tuple[Op, Operand]]:
    """Returns the scatter of zeros that an op adds to another array, with the op and that array.

    Both are needed nowhere else: the array can be updated in its place.
    """
    for one, other in (op.operands, op.operands[::-1]):
        scatter = makers.get(one)
        if scatter is None or other not in makers or (uses[one], uses[other]) != (1, 1):
            continue
        if _is_narrow_sum(scatter) and _is_zeros(makers.get(scatter.operands[0])):
            return {scatter.results[0]: (op, other)}
    return {}


def _is_zeros(op: Op | None) -> bool:
    if op is None or op.name != "broadcast_in_dim":
        return False
    value = op.operands[0]
    return isinstance(value, Literal) and value.value == 0


def _takes_rows(scatter: Op) -> bool:
    """True where each update is a whole row of the operand, at an index of its first axis."""
    operand, indices, updates = (each.aval.shape for each in scatter.operands)
    numbers = scatter.params["dimension_numbers"]
    windows = tuple(range(len(indices) - 1, len(updates)))
    return (
        numbers.update_window_dims == windows
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and updates[len(indices) - 1 :] == operand[1:]
        and operand[0] + math.prod(indices) <= _LARGEST
        and scatter.params["mode"] != lax.GatherScatterMode.ONE_HOT
    )


def _count_rows(indices: Operand) -> int:
    return math.prod(indices.aval.shape[:-1])


def _choose_scatter(row_rank: int) -> lax.ScatterDimensionNumbers:
    """Returns the dimension numbers of updates that are rows, or single values."""
    return lax.ScatterDimensionNumbers(tuple(range(1, 1 + row_rank)), (0,), (0,))


def _gather(operand: Any, indices: Any, *, fill_value: int) -> Any:
    """Returns the rows at indices; those out of bounds are filled."""
    numbers = lax.GatherDimensionNumbers(tuple(range(1, operand.ndim)), (0,), (0,))
    sizes = (1, *operand.shape[1:])
    return lax.gather(operand, indices, numbers, sizes, mode=_FILL, fill_value=fill_value)
