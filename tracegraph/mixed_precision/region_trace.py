"""RegionTrace: what ops go through in a region of `tg.amp.autocast`.

Note [Regions]. JAX sends each op of a thread to the thread's current trace. A region puts one in
front of it, which casts the operands, lets the trace behind it compute the op, and casts the
results back. So the region sees ops before derivatives do when it is entered inside of them, and
the ops of derivatives when it is around them; both give the same bits, see Note [Types stay].

What JAX traces on its own in a region (`jit`, loops, branches, checkpoints) reaches it as one op
with jaxprs in it. These are rewritten. A region inside of them has left its mark in their scopes:
what has one is left as it is. The mark has a depth, since ops of an inner region also go through
the outer one when a derivative is between the two.

Note [Kept casts]. Only arrays are cast once. A value that is traced is cast at each use: equal
casts become one when it is compiled, and the gradients of all uses are added in float32, where
PyTorch adds those of one cast weight in 16 bits.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from tracegraph.jax_internals import (
    BaseTrace,
    call_jaxpr,
    describe_current_scope,
    describe_scope,
    enclose,
    equation_context,
    infer_dtypes,
    open_jaxpr,
    replace_equations,
    rewrite_jaxprs,
    run_in,
    trace_state,
)
from tracegraph.mixed_precision.cast_rules import OPAQUE, CastRules, change_params, is_castable
from tracegraph.runtime.jax_interop import ArrayImpl

_MARK = re.compile(r"tg_autocast_(\d+)")
_CALLS = frozenset({"jit", "pjit"})
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
# By jaxpr, then by rules: what it is rewritten to, None for itself. JAX keeps what it compiles by
# the identity of a jaxpr.
_rewritten: weakref.WeakKeyDictionary[Any, dict[CastRules, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def enter_region(rules: CastRules | None) -> Iterator[None]:
    """Casts the ops of this thread while the context lasts.

    Args:
        rules: what is cast; None to leave all ops as they are, also in an outer region.
    """
    outer = trace_state.value
    depth = 1 + _find_depth(describe_current_scope())
    base = outer.parent_trace if isinstance(outer, RegionTrace) else outer
    with jax.named_scope(f"tg_autocast_{depth}"):
        if rules is None:
            with run_in(base):
                yield
            return
        trace = RegionTrace(base, rules, depth)
        try:
            with run_in(trace):
                yield
        finally:
            trace.forget()


class RegionTrace(BaseTrace):
    """Takes the ops of a region, see Note [Regions].

    Args:
        parent: takes the ops with their casts.
        rules: of the region.
        depth: how many regions this one is inside of, with itself.

    Attributes:
        parent_trace: the parent, as all traces of JAX call it.
    """

    def __init__(self, parent: Any, rules: CastRules, depth: int) -> None:
        super().__init__()
        self.parent_trace = parent
        self.requires_low = parent.requires_low
        self._rules, self._depth = rules, depth
        # By identity and dtype: the array, so that its id stays its own, and its cast. See
        # Note [Kept casts]; arrays of other types may be written between two ops.
        self._casts: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def forget(self) -> None:
        """Drops the casts."""
        self._casts.clear()

    # What JAX calls.

    def stage_value(self, val: Any) -> Any:
        """Takes a value in."""
        with run_in(self.parent_trace):
            return self.parent_trace.stage_value(val)

    def process_primitive(
        self, primitive: Any, tracers: Sequence[Any], params: Mapping[str, Any], /
    ) -> Any:
        """Computes an op."""
        if self._is_inner() or primitive.name in OPAQUE:
            return self._bind(primitive, tracers, params)
        types = [getattr(jax.typeof(each), "dtype", None) for each in tracers]
        dtype = self._rules.choose_dtype(primitive, params, types)
        if dtype is not None:
            with run_in(self.parent_trace):
                return self._compute(primitive, tracers, params, dtype)
        # So that casts are found again: most functions of jax.numpy are such calls.
        if primitive.name in _CALLS and params["inline"] and not _has_mark(params["jaxpr"]):
            with run_in(self):
                return call_jaxpr(params["jaxpr"], tracers)
        return self._bind(
            primitive,
            tracers,
            rewrite_jaxprs(params, lambda jaxpr: rewrite_jaxpr(jaxpr, self._rules)),
        )

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        """Computes a call with a derivative of its own."""
        return self._call(primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        """Computes a call with a gradient of its own."""
        return self._call(primitive, (fun, fwd, bwd), tracers, params)

    def process_shard_map(
        self, primitive: Any, fun: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        """Computes a function on the shards of its operands."""
        return self._call(primitive, (fun,), tracers, params)

    def process_call(
        self, primitive: Any, fun: Any, tracers: Sequence[Any], params: Mapping[str, Any], /
    ) -> Any:
        """Computes a call."""
        return self._call(primitive, (fun,), tracers, params)

    def _call(
        self,
        primitive: Any,
        functions: tuple[Any, ...],
        tracers: Sequence[Any],
        params: Mapping[str, Any],
    ) -> Any:
        if not self._is_inner():
            functions = tuple(enclose(each, _run_in_region, self._rules) for each in functions)
        return self._bind(primitive, tracers, {**params, "subfuns": functions})

    def _bind(self, primitive: Any, tracers: Sequence[Any], params: Mapping[str, Any]) -> Any:
        with run_in(self.parent_trace):
            return primitive.bind(*tracers, **params)

    def _is_inner(self) -> bool:
        """True for an op of a region inside of this one, which comes through a derivative."""
        return _find_depth(describe_current_scope()) > self._depth

    def _compute(
        self, primitive: Any, operands: Sequence[Any], params: Mapping[str, Any], dtype: Any
    ) -> Any:
        wanted = infer_dtypes(primitive, operands, params)
        cast = [self._cast(operand, dtype) for operand in operands]
        computed = primitive.bind(*cast, **change_params(params, dtype))
        if not primitive.multiple_results:
            return _restore(computed, wanted[0])
        return [_restore(*pair) for pair in zip(computed, wanted, strict=True)]

    def _cast(self, operand: Any, dtype: Any) -> Any:
        found = jax.typeof(operand).dtype
        if found == dtype or not is_castable(found):
            return operand
        kept = self._casts.get((id(operand), dtype))
        if kept is not None:
            return kept[1]
        cast = lax.convert_element_type(operand, dtype)
        if self._rules.caches and type(operand) is ArrayImpl:
            self._casts[id(operand), dtype] = operand, cast
        return cast


def _restore(result: Any, dtype: Any) -> Any:
    is_same = jax.typeof(result).dtype == dtype
    return result if is_same else lax.convert_element_type(result, dtype)


def rewrite_jaxpr(jaxpr: Any, rules: CastRules) -> Any:
    """Returns a jaxpr with casts around its ops; the same one if nothing in it is changed.

    Its inputs and results keep their types: what holds it, such as a loop, stays as it is.
    """
    with _lock:
        kept = _rewritten.get(jaxpr, {})
        if rules in kept:
            return jaxpr if kept[rules] is None else kept[rules]
    equations = open_jaxpr(jaxpr)[0].eqns
    written = [_rewrite_equation(each, rules) for each in equations]
    is_same = all(one is other for one, other in zip(equations, written, strict=True))
    result = None if is_same else replace_equations(jaxpr, written)
    with _lock:
        _rewritten.setdefault(jaxpr, {})[rules] = result
    return jaxpr if result is None else result


def _rewrite_equation(equation: Any, rules: CastRules) -> Any:
    primitive, params = equation.primitive, equation.params
    if primitive.name in OPAQUE or _find_depth(describe_scope(equation_context(equation))):
        return equation
    types = [getattr(operand.aval, "dtype", None) for operand in equation.invars]
    if primitive.name in _CUSTOM or rules.choose_dtype(primitive, params, types) is not None:
        return _write_call(equation, rules)
    changed = rewrite_jaxprs(params, lambda jaxpr: rewrite_jaxpr(jaxpr, rules))
    return equation if changed is params else equation.replace(params=changed)


def _write_call(equation: Any, rules: CastRules) -> Any:
    """Returns a call in place of an op: of a function that computes it in a region."""
    primitive = equation.primitive

    def autocast(*operands: Any) -> Any:
        with enter_region(rules):
            params = primitive.get_bind_params(dict(equation.params))
            return primitive.bind(*operands, **params)

    avals = [operand.aval for operand in equation.invars]
    (call,) = open_jaxpr(jax.make_jaxpr(jax.jit(autocast))(*avals))[0].eqns
    return equation.replace(primitive=call.primitive, params=call.params)


def _run_in_region(
    function: Callable[..., Any], rules: CastRules, *args: Any, **kwargs: Any
) -> Any:
    with enter_region(rules):
        return function(*args, **kwargs)


def _has_mark(jaxpr: Any) -> bool:
    equations = open_jaxpr(jaxpr)[0].eqns
    return any(_find_depth(describe_scope(equation_context(each))) for each in equations)


def _find_depth(scope: str) -> int:
    return max(map(int, _MARK.findall(scope)), default=0)
