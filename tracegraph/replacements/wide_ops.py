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
            results = bind_op(_widen_op(op), list(map(read, op.operands)))
            known.update(zip(op.results, results, strict=True))
        return [known[value] for value in self.results]


def _widen(array: Any) -> Any:
    array = jnp.asarray(array)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(jnp.float32) if is_float else array


def _widen_op(op: Op) -> Op:
    """Returns an op that rounds nothing to fewer bits than float32 has."""
    params = dict(op.params)
    if op.name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating):
        params["new_dtype"] = jnp.dtype(jnp.float32)
    if op.name == "dot_general":
        params["preferred_element_type"] = jnp.dtype(jnp.float32)
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return dataclasses.replace(op, params=params)
