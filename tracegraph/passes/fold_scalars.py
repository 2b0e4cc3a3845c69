"""Folding: scalars that are computed of literals become literals.

Note [Folding by NumPy]
Binding an op on literals lets XLA compile a program for it, 0.05 s on a GPU, once for each kind of
op. Where IEEE 754 or the integers leave no choice, NumPy computes the same bits. So does XLA itself
when it folds constants: on the host, whatever the program is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegraph.ir.graph import Graph, Literal, Op, Operand
from tracegraph.jax_internals import bind_op, has_data_effects
from tracegraph.passes.rewrite import Replacements, find_replacement, replace_operands


@dataclasses.dataclass(frozen=True)
class FoldScalars:
    """Computes scalars of literals, and drops choices by a literal: XLA does so, too."""

    name: str = "fold-scalars"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph with literals in the place of what they come to."""
        replaced: Replacements = {}
        ops: list[Op] = []
        for op in graph.ops:
            op = replace_operands(op, replaced)
            found = _fold(op)
            if found is None:
                ops.append(op)
            else:
                replaced[op.results[0]] = found
        outputs = tuple(find_replacement(each, replaced) for each in graph.outputs)
        return dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)


def _fold(op: Op) -> Operand | None:
    """Returns what the only result of an op is, or None where the op has to compute it."""
    if op.name == "select_n" and isinstance(op.operands[0], Literal):
        return op.operands[1 + int(op.operands[0].value)]
    if len(op.results) != 1 or op.results[0].shape or op.subgraphs or has_data_effects(op):
        return None
    if not op.operands or not all(isinstance(each, Literal) for each in op.operands):
        return None
    if not isinstance(op.results[0].dtype, np.dtype):
        # A typed key: no literal holds one.
        return None
    literals = [each for each in op.operands if isinstance(each, Literal)]
    aval = op.results[0].aval
    found = _compute_exactly(op, literals)
    if found is None:
        (found,) = bind_op(op, [each.value for each in literals])
    value: Any = np.asarray(found)[()]
    # A scalar of Python has a weak type.
    return Literal(value.item() if getattr(aval, "weak_type", False) else value, aval)


def _compute_exactly(op: Op, literals: Sequence[Literal]) -> Any:
    """Returns what NumPy computes, or None where XLA may round otherwise."""
    wanted, types = op.results[0].dtype, [each.aval.dtype for each in literals]
    function = _FUNCTIONS.get(op.name)
    if function is None or not all(map(_is_exact, [wanted, *types])):
        return None
    has_floats = any(jnp.issubdtype(each, jnp.floating) for each in types)
    if op.name == "div" and not has_floats:
        # Of integers it is cut off.
        return None
    if op.name == "nextafter" and wanted.itemsize < 4:
        # Between zeros of two signs NumPy stays where it is.
        return None
    if has_floats and jnp.issubdtype(wanted, jnp.integer):
        # It may be out of the integer's range.
        return None
    with np.errstate(all="ignore"):
        arrays = [
            np.asarray(each.value, dtype) for each, dtype in zip(literals, types, strict=True)
        ]
        found = function(*arrays)
        return found.astype(wanted) if op.name in _CONVERTED else found


def _is_exact(dtype: Any) -> bool:
    """True for booleans, integers, and floats of 16 bits or more."""
    dtype = np.dtype(dtype)
    is_float = bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 1
    return is_float or dtype.kind in "biu"


_CONVERTED = ("convert_element_type", "copy", "copy_p")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_CONVERTED, np.asarray),
    "add": np.add,
    "and": np.bitwise_and,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": np.nextafter,
    "not": np.invert,
    "or": np.bitwise_or,
    "sqrt": np.sqrt,
    "sub": np.subtract,
}
