"""Which op computes in which dtype inside of a region: the table, and the user's changes to it.

Note [Types stay]
A region changes how an op computes, never the dtype that JAX gave its results: operands are cast
before the op, results are cast back after it. So a region may stand anywhere, inside and outside
of derivatives, in loops whose carry has a type, in branches that must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegraph.ir.kernel_calls import KERNEL_CALLS
from tracegraph.jax_internals import find_open_precision, list_primitive_names, name_jaxprs
from tracegraph.mixed_precision.amp_errors import (
    make_dtype_error,
    make_rule_error,
    make_rules_error,
)

LOW_TYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
FLOAT32 = np.dtype(np.float32)
# Of primitives, by name; `docs/amp.md` has the same table in words.
IN_LOW_TYPE = frozenset({"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"})
_IN_FLOAT32 = """
acos acosh asin atanh cosh digamma erf_inv erfc exp exp2 expm1 igamma igammac lgamma log log1p log2
polygamma pow rsqrt sinh tan integer_pow
reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum
"""
IN_FLOAT32 = frozenset(_IN_FLOAT32.split())
# What a user's kernel computes is in its own text; a custom call's too.
OPAQUE = KERNEL_CALLS | {"ffi_call"}
KEEP, PROMOTE = "keep", "promote"
# A cast that is written stays; in a call, a loop or a branch each op has a rule of its own.
_UNRULED = """
convert_element_type jit pjit scan while cond remat checkpoint shard_map call closed_call
custom_jvp_call custom_vjp_call linear_solve
"""
UNRULED = OPAQUE | frozenset(_UNRULED.split())


@dataclasses.dataclass(frozen=True)
class CastRules:
    """What a region does to its ops; hashable.

    Attributes:
        dtype: of matmuls and convolutions.
        changes: the user's rules, by name of a primitive.
        caches: a value is cast once in a region.
    """

    dtype: np.dtype[Any]
    changes: tuple[tuple[str, Any], ...] = ()
    caches: bool = True

    def choose_dtype(
        self, primitive: Any, params: Mapping[str, Any], types: Sequence[Any]
    ) -> np.dtype[Any] | None:
        """Returns the dtype that an op is to compute in, None for the one that it has.

        Args:
            primitive: of JAX.
            params: of the op.
            types: dtypes of its operands.

        Raises:
            ConfigError: a rule gives a dtype to an op whose parameters say what is computed.
        """
        floats = {dtype for dtype in types if is_castable(dtype)}
        if not floats:
            return None
        change = dict(self.changes).get(primitive.name)
        if change is not None:
            chosen = _follow(change, floats)
            if chosen is not None and name_jaxprs(params):
                raise make_rule_error(primitive, change)
            return chosen
        if primitive.name in IN_LOW_TYPE:
            # An operand of another kind, such as float64 or an 8-bit type, says what is wanted.
            is_plain = all(is_castable(dtype) for dtype in types) and FLOAT32 in floats
            return self.dtype if is_plain and not _names_precision(params) else None
        if primitive.name in IN_FLOAT32 and FLOAT32 not in floats:
            return FLOAT32
        return None


def make_rules(dtype: Any, rules: Mapping[Any, Any] | None, *, caches: bool) -> CastRules:
    """Returns checked rules.

    Args:
        dtype: bfloat16 or float16.
        rules: by a primitive of JAX or its name: a dtype, ``"keep"`` or ``"promote"``.
        caches: a value is cast once in a region.

    Raises:
        ConfigError: a dtype or a rule is not allowed.
    """
    low = read_dtype(dtype)
    if low is None or low not in LOW_TYPES:
        raise make_dtype_error(dtype)
    if not isinstance(rules, Mapping | None):
        raise make_rules_error(rules)
    changes = dict([_read_rule(key, value) for key, value in (rules or {}).items()])
    return CastRules(low, tuple(sorted(changes.items(), key=lambda pair: pair[0])), caches)


def _read_rule(key: Any, value: Any) -> tuple[str, Any]:
    name = key if isinstance(key, str) else getattr(key, "name", None)
    is_known = name in list_primitive_names() if isinstance(key, str) else isinstance(name, str)
    is_word = isinstance(value, str) and value in (KEEP, PROMOTE)
    wanted: Any = value if is_word else read_dtype(value)
    is_allowed = is_word or (wanted is not None and is_castable(wanted))
    if not is_known or not is_allowed or name in UNRULED:
        raise make_rule_error(key, value)
    return str(name), wanted


def read_dtype(value: Any) -> np.dtype[Any] | None:
    """Returns what a user may write for a dtype, None for what is none."""
    # An array has a dtype and is none; NumPy's `dtype` would take it.
    if value is None or isinstance(value, np.ndarray | np.generic | jnp.ndarray):
        return None
    try:
        return np.dtype(jnp.dtype(value))
    except TypeError:
        return None


def is_castable(dtype: Any) -> bool:
    """True for the dtypes that a region casts: float32 and the two of 16 bits."""
    return dtype == FLOAT32 or dtype in LOW_TYPES


def change_params(params: Mapping[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Returns an op's parameters for operands of another dtype."""
    changed = dict(params)
    if changed.get("preferred_element_type") is not None:
        changed["preferred_element_type"] = dtype
    return changed


def _follow(change: Any, floats: set[Any]) -> np.dtype[Any] | None:
    """Returns what a user's rule asks for, None where the operands have it."""
    if change == KEEP:
        return None
    if change == PROMOTE:
        change = np.dtype(jnp.result_type(*floats))
    return None if floats == {change} else change


def _names_precision(params: Mapping[str, Any]) -> bool:
    """True for an op that says itself how precise it must be; a setting of JAX does not count.

    The linear algebra of JAX does so inside, since its factorizations need it.
    """
    precision = params.get("precision")
    if precision is None or precision == find_open_precision():
        return False
    pair = precision if isinstance(precision, tuple) else (precision,)
    return any(getattr(each, "name", None) != "DEFAULT" for each in pair)
