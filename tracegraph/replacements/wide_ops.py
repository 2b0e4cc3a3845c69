"""Ops of a graph in float32: the reference that a replacement is measured against."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.jax_internals import bind_op


@dataclasses.dataclass(frozen=True)
class WideOps:
    """Ops of a graph on float32 values, none of them rounded.

    The result of an ``argmax`` is what it chooses from: the distance of two places says nothing,
    that of what is there does.

    Attributes:
        ops: in their order.
        inputs: what they read.
        results: what is returned.
    """

    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the results in float32."""
        known: dict[Operand, Any] = dict(zip(self.inputs, map(_widen, arrays), strict=True))

        def read(operand: Operand) -> Any:
            return _widen(operand.value) if isinstance(operand, Literal) else known[operand]

        for op in self.ops:
            operands = list(map(read, op.operands))
            results = operands if op.name == "argmax" else _bind_widely(op, operands)
            known.update(zip(op.results, results, strict=True))
        return [known[value] for value in self.results]


def add_scattered(op: Op, operand: Any, indices: Any, updates: Any) -> Any:
    """Returns what a scatter that adds makes of operands of another type than its own.

    Args:
        op: the scatter, whose parameters name its type.
        operand: what is added to.
        indices: where.
        updates: of the type of the operand.
    """
    params = op.params
    return lax.scatter_add(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _bind_widely(op: Op, operands: list[Any]) -> list[Any]:
    if op.name == "scatter-add":
        return [add_scattered(op, *operands)]
    return bind_op(widen_op(op), operands)


def _widen(array: Any) -> Any:
    array = jnp.asarray(array)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(jnp.float32) if is_float else array


def widen_op(op: Op, *, precise: bool = True) -> Op:
    """Returns an op that rounds nothing to fewer bits than float32 has.

    Args:
        op: of the graph.
        precise: multiply all bits of a float32.
    """
    params = dict(op.params)
    if op.name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating):
        params["new_dtype"] = jnp.dtype(jnp.float32)
    if op.name == "dot_general":
        params["preferred_element_type"] = jnp.dtype(jnp.float32)
        if precise:
            params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return dataclasses.replace(op, params=params)
