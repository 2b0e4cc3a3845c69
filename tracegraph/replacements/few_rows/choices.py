"""Choices: ops that take the largest element of each row of a matmul's results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.matmuls.largest import write_largest
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.replacements.few_rows.row_reader import RowShape
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.kernel_call import call_kernel
from tracegraph.replacements.kinds import FLOAT_KINDS
from tracegraph.replacements.match import Machine


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel that chooses among the candidates of all blocks, see Note [Largest of a row].

    Attributes:
        kernel: what is called.
        rows: how many.
        dtype: of the values.
    """

    kernel: OwnKernel
    rows: int
    dtype: Any

    def __call__(self, machine: Machine, values: Any, columns: Any) -> list[Any]:
        """Returns the column and the value of the largest element of each row.

        Args:
            machine: that the kernel is compiled for.
            values: of the candidates, rows by candidates.
            columns: of the candidates.
        """
        kinds = jnp.dtype(jnp.int32), self.dtype
        results = [jax.ShapeDtypeStruct((self.rows,), kind) for kind in kinds]
        return call_kernel(self.kernel, machine, results, (values, columns))


def make_choice(rows: int, candidates: int, dtype: Any) -> Choice:
    """Returns the kernel for so many candidates of each row, of values of a type."""
    return Choice(write_largest(rows, candidates, FLOAT_KINDS[str(dtype)]), rows, dtype)


def find_choices(view: GraphView, value: Value, shape: RowShape) -> list[Op]:
    """Returns the ops that read each row of a value for its largest element: its place, its size.

    Nothing where only the size is asked for: as a rule, something needs the elements then.

    Args:
        view: of the graph.
        value: with one element for each row and column.
        shape: of the matmul.
    """
    found = [op for op in view.uses.get(value, ()) if _is_of_rows(op, value, shape)]
    return found if any(op.name == "argmax" for op in found) else []


def _is_of_rows(op: Op, value: Operand, shape: RowShape) -> bool:
    sizes = tuple(value.aval.shape)
    if op.name not in ("argmax", "reduce_max") or not sizes:
        return False
    is_of_last = tuple(op.params["axes"]) == (len(sizes) - 1,) and sizes[-1] == shape.columns
    is_counted_in_32_bits = op.params.get("index_dtype", jnp.int32) == jnp.int32
    return is_of_last and is_counted_in_32_bits and math.prod(sizes[:-1]) == shape.rows


def list_chosen(choices: Sequence[Op]) -> list[tuple[Value, int]]:
    """Returns the results of ops that share a choice, each with which of `Choice`'s it is."""
    return [(op.results[0], 0 if op.name == "argmax" else 1) for op in choices]
