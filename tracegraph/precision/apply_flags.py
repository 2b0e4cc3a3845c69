"""Writes the precision flags into a trace, where its ops and JAX's settings leave them open.

Note [Open precision]
JAX writes the precision that an op, or its setting ``jax_default_matmul_precision``, names into the
op's parameter ``precision`` while it traces. None is left only where nothing was named. In XLA's
program that can no longer be told from ``DEFAULT``, so the flags are applied to the jaxpr.

Note [Sums in 32 bits]
XLA's own kernels add the partial sums of a 16-bit matmul in float32. cuBLAS, which it may choose
instead, adds those of a matmul that is split along its sum in the type of the result. XLA has no
option against it. A result in float32 that is rounded afterwards leaves cuBLAS nothing else.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from tracegraph.ir.kernel_calls import KERNEL_CALLS
from tracegraph.jax_internals import open_jaxpr, replace_equations, rewrite_jaxprs
from tracegraph.precision.flags import UNSET, PrecisionFlags

_TF32_TYPES = frozenset({np.dtype(np.float32), np.dtype(np.complex64)})
_MATMULS = frozenset({"dot_general", "ragged_dot_general"})


def apply_flags(jaxpr: Any, flags: PrecisionFlags) -> Any:
    """Returns a jaxpr with the flags written into its matmuls and convolutions.

    Args:
        jaxpr: of a whole function.
        flags: those that are set.

    Returns:
        The same jaxpr, if nothing in it is changed by them.
    """
    return jaxpr if flags == UNSET else _Writer(flags).write(jaxpr)


class _Writer:
    """Rewrites jaxprs from the inside out; one that is used twice is rewritten once."""

    def __init__(self, flags: PrecisionFlags) -> None:
        self._flags = flags
        # The jaxpr itself is kept, so that its id stays its own.
        self._written: dict[int, tuple[Any, Any]] = {}

    def write(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._written:
            equations = open_jaxpr(jaxpr)[0].eqns
            written = [self._write_equation(each) for each in equations]
            is_same = all(one is other for one, other in zip(equations, written, strict=True))
            result = jaxpr if is_same else replace_equations(jaxpr, written)
            self._written[id(jaxpr)] = jaxpr, result
        return self._written[id(jaxpr)][1]

    def _write_equation(self, equation: Any) -> Any:
        name = equation.primitive.name
        if name in KERNEL_CALLS:
            return equation
        if name in _MATMULS or name == "conv_general_dilated":
            return self._write_precision(equation)
        params = rewrite_jaxprs(equation.params, self.write)
        return equation if params is equation.params else equation.replace(params=params)

    def _write_precision(self, equation: Any) -> Any:
        precision = equation.params["precision"]
        types = {operand.aval.dtype for operand in equation.invars[:2]}
        is_matmul = equation.primitive.name in _MATMULS
        if types <= _TF32_TYPES:
            is_allowed = self._flags.matmul_tf32 if is_matmul else self._flags.cudnn_tf32
            if precision is not None or is_allowed is None:
                return equation
            chosen = lax.Precision.DEFAULT if is_allowed else lax.Precision.HIGHEST
            return equation.replace(params={**equation.params, "precision": (chosen, chosen)})
        # An algorithm says itself how it adds up.
        is_open = precision is None or isinstance(precision, tuple)
        types.add(equation.outvars[0].aval.dtype)
        if is_matmul and is_open and len(types) == 1 and self._forbids_reduction(types.pop()):
            return _widen_sum(equation)
        return equation

    def _forbids_reduction(self, dtype: Any) -> bool:
        flags = self._flags
        if dtype == jax.numpy.float16:
            return flags.matmul_fp16_reduction is False
        return dtype == jax.numpy.bfloat16 and flags.matmul_bf16_reduction is False


def _widen_sum(equation: Any) -> Any:
    """Returns a call in place of a 16-bit matmul, see Note [Sums in 32 bits]."""
    params = {**equation.params, "preferred_element_type": np.dtype(np.float32)}
    dtype = equation.outvars[0].aval.dtype

    def dot_in_float32(*operands: Any) -> Any:
        return lax.convert_element_type(equation.primitive.bind(*operands, **params), dtype)

    avals = [operand.aval for operand in equation.invars]
    (call,) = open_jaxpr(jax.make_jaxpr(jax.jit(dot_in_float32))(*avals))[0].eqns
    return equation.replace(primitive=call.primitive, params=call.params)
